"""The programs of a bundle may hold caches in float16 and in either layout; the engine follows them.

The shipped bundle's ONNX files are changed at their borders, where each cache is cast and transposed. What
they compute stays what it was, but for the rounding of keys and values to 11 bits.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from whisperport.program.bundle import Bundle
from whisperport.program.signatures import CacheForm, KvLayout
from whisperport.runtime import (
    DecodeOptions,
    Decoder,
    Engine,
    decode_together,
    decode_window,
    load_engine,
)
from whisperport.speech.audio import load_audio, log_mel
from whisperport.targets import RunOptions
from whisperport.verification.clips import shipped_audio

from ...embedded import default_bundle
from ...hostile_bundle import copy_of_shipped, rehash

ONNX = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
DECODING = ("cross_kv", "prefill_4", "prefill_64", "step", "align", "step_8")
RUN = RunOptions(threads=1, trust=True)
HALF = CacheForm(*(KvLayout(axis, "float16") for axis in (2, 1, 2, 1)), mask="float16")
TURNED = CacheForm(*(KvLayout(axis) for axis in (1, 2, 1, 2)))
HALF_TURNED = CacheForm(*(KvLayout(axis, "float16") for axis in (1, 2, 1, 2)), mask="float16")


def in_form(name: str, form: CacheForm) -> tuple[str, bool] | None:
    """The dtype of a tensor in this form, and whether its last two axes change places; None: no cache."""
    if name == "mask":
        return form.mask, False
    rows = getattr(form, name.rpartition("_")[0].replace("new", "self"), None)
    if rows is None:
        return None
    usual = getattr(CacheForm(), name.rpartition("_")[0].replace("new", "self"))
    return rows.dtype, rows.axis != usual.axis


def change_file(path: Path, form: CacheForm) -> None:
    """Cast and transpose the caches of an ONNX file at its borders."""
    model = onnx.load(path, load_external_data=False)
    graph, before, after = model.graph, [], []
    for tensor, is_input in (
        *((t, True) for t in graph.input),
        *((t, False) for t in graph.output),
    ):
        found = in_form(tensor.name, form)
        if found is None:
            continue
        (dtype, turned), inner = found, f"{tensor.name}_inside"
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [inner if name == tensor.name else name for name in names]
        perm = [0, 2, 1] if turned else [0, 1, 2]
        steps = [
            ("Transpose", {"perm": perm}),
            ("Cast", {"to": ONNX["float32" if is_input else dtype]}),
        ]
        names = [tensor.name, f"{tensor.name}_turned", inner][:: 1 if is_input else -1]
        (before if is_input else after).extend(
            helper.make_node(kind, [source], [result], **attributes)
            for (kind, attributes), source, result in zip(steps, names[:2], names[1:], strict=True)
        )
        sizes = [dim.dim_value for dim in tensor.type.tensor_type.shape.dim]
        kind = helper.make_tensor_type_proto(ONNX[dtype], [sizes[axis] for axis in perm])
        tensor.type.CopyFrom(kind)
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(model, path)


def change_manifest(document: dict[str, Any], form: CacheForm) -> None:
    for entry in document["programs"]:
        if entry["spec"]["name"] not in DECODING:
            continue
        for tensor in (*entry["spec"]["inputs"], *entry["spec"]["outputs"]):
            found = in_form(tensor["name"], form)
            if found:
                heads, *others = tensor["shape"]
                tensor["shape"] = [heads, *(others[::-1] if found[1] else others)]
                tensor["dtype"] = found[0]


@pytest.fixture(scope="module")
def shipped() -> Engine:
    return load_engine(Bundle.open(default_bundle(), check_hashes=False), RUN)


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[CacheForm], Engine]:
    """`changed(form)`: the shipped bundle with caches in another form."""

    def make(form: CacheForm) -> Engine:
        folder = copy_of_shipped(tmp_path / "bundle")
        for name in DECODING:
            change_file(folder / "onnxruntime" / f"{name}.onnx", form)
        rehash(folder, lambda document: change_manifest(document, form))
        return load_engine(Bundle.open(folder), RUN)

    return make


@pytest.fixture(scope="module")
def features(shipped: Engine) -> np.ndarray:
    """The features of a shipped clip."""
    samples, dims = load_audio(shipped_audio()[1].path), shipped.dims
    return shipped.encode(log_mel(samples, dims.n_mels, n_frames=dims.n_frames))


@pytest.mark.parametrize(
    ("form", "tolerance"),
    # Keys and values of 11 bits: 2 to the power of -11, through 2 layers; logits reach 30.
    [(HALF, 30 * 2**-10), (TURNED, 1e-4), (HALF_TURNED, 30 * 2**-10)],
    ids=["float16", "turned", "turned float16"],
)
def test_a_bundle_with_caches_in_another_form_decodes_the_same_tokens(
    shipped: Engine,
    changed: Callable[[CacheForm], Engine],
    features: np.ndarray,
    form: CacheForm,
    tolerance: float,
) -> None:
    engine = changed(form)
    assert (shipped.cache_form, engine.cache_form) == (CacheForm(), form)
    greedy = DecodeOptions(language="en", prompt=tuple(range(400, 420)))
    beams = DecodeOptions(language="en", beam_size=2)
    decoders = Decoder(shipped), Decoder(engine)

    for options in (greedy, beams):
        expected, found = (decode_window(decoder, features, options) for decoder in decoders)
        assert len(expected.tokens) > 5
        assert found.tokens == expected.tokens
        for together in decode_together(engine, [features] * 3, [options] * 3):
            assert together.tokens == expected.tokens

    scores, rows = decoders[0].align(expected.tokens)
    found_scores, found_rows = decoders[1].align(expected.tokens)
    np.testing.assert_allclose(found_rows, rows, atol=tolerance)
    np.testing.assert_allclose(found_scores, scores, atol=tolerance)
    last = [decoder.step(expected.tokens[-1]) for decoder in decoders]
    np.testing.assert_allclose(last[1], last[0], atol=tolerance)

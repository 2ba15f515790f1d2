"""Programs with the matrices of an adapter as inputs: any adapter without another export."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whisperport.build.export.drafting import traced_programs
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.export.placing import PlacementRequest, place
from whisperport.errors import CheckpointError, UsageError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.checkpoint.adapter import merged
from whisperport.model.network.whisper import build_model
from whisperport.program.adapter_settings import read_adapter
from whisperport.program.bundle import Bundle
from whisperport.program.low_rank import LowRank, parse_low_rank
from whisperport.runtime import BatchExecutor, DecodeOptions, Decoder, decode_window, load_engine
from whisperport.runtime.decoding.decode import decoding
from whisperport.runtime.engine.adapters import (
    AdaptedRunner,
    AdapterMatrices,
    matrices_for,
)
from whisperport.targets import RunOptions
from whisperport.transcription import Transcriber
from whisperport.verification.adapter_check import adapter_checks
from whisperport.verification.bundle_check import verify
from whisperport.verification.eager import eager_engine
from whisperport.verification.precision import precisions
from whisperport.verification.recording import BundleSession
from whisperport.verification.reference import Reference

from ...extent import core_or_all
from ...micro import ADAPTER_RANK as RANK
from ...micro import DIMS, GENERATION, adapter_tensors, write_adapter

ONE_THREAD = RunOptions(threads=1)
TARGETS = core_or_all(["onnxruntime"], ["onnxruntime", "openvino", "xnnpack", "litert"])
AUDIO = (0.1 * np.random.default_rng(3).standard_normal(3200)).astype(np.float32)
QUERY = "model.decoder.layers.0.self_attn.q_proj"

Make = Callable[..., Any]


@pytest.fixture
def bundle(exported: Make) -> Bundle:
    opened: Bundle = exported("onnxruntime", "micro", adapters_as_inputs="4", batch=4)
    return opened


@pytest.fixture
def adapter(tmp_path: Path) -> Make:
    """`adapter(tensors, key=value)`: the folder of an adapter with these settings."""

    def write(stored: dict[str, np.ndarray], name: str = "mine", **settings: Any) -> Path:
        return write_adapter(tmp_path / name, stored, **settings)

    return write


def outputs(engine: Any) -> np.ndarray:
    """Features, logits of a prompt and of steps, and scores of `align`, as one row."""
    random = np.random.default_rng(1)
    mel = random.standard_normal((DIMS.n_mels, DIMS.n_frames)).astype(np.float32)
    decoder, features = Decoder(engine), engine.encode(mel)
    decoder.start_window(features)
    rows = [features, decoder.prefill([50, 51, 53, 57])[0].copy()]
    rows += [decoder.step(token).copy() for token in (1, 2, 3)]
    rows += [decoder.align([50, 51, 53, 57, 1])[0]]
    return np.concatenate([row.ravel() for row in rows])


@pytest.mark.parametrize("target", TARGETS)
def test_an_adapter_as_inputs_computes_what_the_merged_weights_do(
    target: str, exported: Make, adapter: Make, micro_checkpoint: Any
) -> None:
    pytest.importorskip({"xnnpack": "executorch", "litert": "litert_torch"}.get(target, target))
    opened = exported(target, "micro", adapters_as_inputs="4", batch=4)
    folder = adapter(adapter_tensors(0), use_rslora=True)
    weights = merged(read_adapter(folder), micro_checkpoint, name="merged")
    model = build_model(weights)
    heads = replace(GENERATION, alignment_heads=opened.manifest.generation.alignment_heads)
    expected = outputs(eager_engine(model, heads))
    base = load_engine(opened, ONE_THREAD)
    actual = outputs(base.adapted(matrices_for(folder, opened.manifest)))
    # Float32 in another order. The base differs by far more.
    np.testing.assert_allclose(actual, expected, atol=2e-4)
    assert np.abs(outputs(base) - expected).max() > 0.1


def test_adapters_are_swapped_in_the_memory_of_one_bundle(bundle: Bundle, adapter: Make) -> None:
    folders = [adapter(adapter_tensors(seed), str(seed)) for seed in (1, 2)]
    base = Transcriber(bundle, ONE_THREAD)
    first, second = map(base.adapted, folders)
    texts = [text_of(each) for each in (base, first, second)]
    assert len({*texts}) == 3
    assert [text_of(each) for each in (second, base, first)] == [texts[2], texts[0], texts[1]]
    runners = [each.engine.step for each in (base, first, second)]
    assert len({id(runner.inner) for runner in runners if isinstance(runner, AdaptedRunner)}) == 1
    at_load = Transcriber(bundle, RunOptions(threads=1, adapter=folders[0]))
    assert text_of(at_load) == texts[1]


def text_of(transcriber: Transcriber) -> str:
    return transcriber.transcribe(AUDIO, language="en", temperature=0.0).text


def test_texts_with_several_adapters_are_decoded_at_the_same_time(
    bundle: Bundle, adapter: Make
) -> None:
    base = load_engine(bundle, ONE_THREAD)
    read = [matrices_for(adapter(adapter_tensors(n), str(n)), bundle.manifest) for n in (1, 2)]
    engines = [base, *map(base.adapted, read)]
    mel = np.random.default_rng(1).standard_normal((DIMS.n_mels, DIMS.n_frames))
    features = [engine.encode(mel.astype(np.float32)) for engine in engines]
    options = DecodeOptions(language="en", max_tokens=8, without_timestamps=True)

    def start(which: int, decoder: Decoder) -> Any:
        decoder.use(engines[which])
        return decoding(decoder, features[which], options)

    expected = [
        decode_window(Decoder(e), f, options).tokens for e, f in zip(engines, features, strict=True)
    ]
    assert len({*expected}) == 3
    executor = BatchExecutor(base, base.batch_size)
    try:
        futures = [executor.submit(partial(start, number % 3)) for number in range(12)]
        decoded = [future.result().tokens for future in futures]
    finally:
        executor.shutdown()
    assert decoded == expected * 4


def test_inputs_of_the_wrong_layers_are_not_verified(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verify(bundle, run=ONE_THREAD)
    inputs = AdapterMatrices.inputs

    def exchanged(matrices: Any, program: str, *sizes: Any) -> dict[str, Any]:
        arrays = inputs(matrices, program, *sizes)
        if program == "align":
            arrays["lora_a_0"], arrays["lora_a_1"] = arrays["lora_a_1"], arrays["lora_a_0"]
        return arrays

    monkeypatch.setattr(AdapterMatrices, "inputs", exchanged)
    report = verify(bundle, run=ONE_THREAD)
    failed = {
        (check.program, "adapter" in check.what) for check in report.checks if not check.passed
    }
    assert failed == {("align", True)}


@pytest.mark.parametrize("precision", ["fp32", "w8"])
def test_a_program_that_ignores_its_matrices_is_not_verified(
    precision: str, exported: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"adapters_as_inputs": "4", "batch": 4}
    if precision != "fp32":  # whose words decide, and this model has none
        options |= {"precision": precision, "allow_unverified": True}
    opened = exported("onnxruntime", "micro", **options)
    engine, reference = load_engine(opened, ONE_THREAD), Reference.from_arrays(opened.reference())
    taken, inputs = opened.manifest.adapters, AdapterMatrices.inputs
    assert taken

    def passes(ignoring: str) -> bool:
        def ignored(matrices: Any, program: str, *sizes: Any) -> dict[str, Any]:
            arrays = inputs(matrices, program, *sizes)
            return {k: 0 * each for k, each in arrays.items()} if program == ignoring else arrays

        monkeypatch.setattr(AdapterMatrices, "inputs", ignored)
        checks = adapter_checks(engine, taken, reference, precisions(opened, ONE_THREAD))
        return all(check.passed for check in checks)

    assert passes("")
    for entry in opened.manifest.programs:
        assert not passes(entry.spec.name), entry.spec.name


def test_samples_for_compilers_have_zeros_for_the_adapter(bundle: Bundle) -> None:
    session = BundleSession(bundle, ONE_THREAD)
    mel = np.zeros((DIMS.n_mels, DIMS.n_frames), np.float32)
    for name in ("encoder", "cross_kv", "step"):
        spec = bundle.manifest.program(name).spec
        sample = next(iter(session.inputs(spec, [mel])))
        assert [array.shape for array in sample] == [tensor.shape for tensor in spec.inputs]
        assert not any(array.any() for array in sample[-2:])


def test_a_bundle_without_a_reference_for_adapters_is_not_verified(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = replace(Reference.from_arrays(bundle.reference()), adapted=None)
    monkeypatch.setattr(Reference, "from_arrays", lambda _: without)
    assert "has none" in " ".join(verify(bundle, run=ONE_THREAD).failures())


def test_an_adapter_of_some_layers_leaves_the_others(bundle: Bundle, adapter: Make) -> None:
    taken = parse_low_rank("3:q_proj,v_proj")
    opened = replace(bundle, manifest=replace(bundle.manifest, adapters=taken))
    only = {name: each for name, each in adapter_tensors(4).items() if "q_proj" in name}
    matrices = matrices_for(adapter(only), opened.manifest)
    assert {name.rpartition(".")[2] for name in matrices.layers} == {"q_proj", "v_proj"}
    changed = {name for name, (a, _) in matrices.layers.items() if a.any()}
    assert changed == {name for name in matrices.layers if name.endswith("q_proj")}
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        matrices_for(adapter(adapter_tensors(4), "all"), opened.manifest)
    assert "lora_A.weight is no input of the programs" in caught.value.why


BIAS = np.zeros(16, np.float32)
WEIGHT = f"base_model.model.{QUERY}.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({WEIGHT: np.full((RANK, 16), np.nan, np.float32)}, {}, "has a NaN"),
        ({WEIGHT: np.zeros((RANK, 17), np.float32)}, {}, "found (3, 17)"),
        ({WEIGHT: None}, {}, "found none"),
        ({}, {"r": 5}, "rank 5; the programs take up to 4"),
        (
            {"base_model.model.proj_out.weight": np.zeros((70, 16), np.float32)},
            {},
            "proj_out.weight is no input",
        ),
        (
            {f"base_model.model.{QUERY}.lora_B.bias": np.zeros(16, np.float32)},
            {},
            "lora_B.bias is no input",
        ),
        ({}, {"use_dora": True}, "use_dora"),
        ({}, {"peft_type": "IA3"}, "IA3"),
        (
            {},
            {"base_model_name_or_path": "openai/whisper-tiny.en"},
            "trained on tiny.en; this is tiny",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_named(
    change: dict[str, Any], settings: dict[str, Any], message: str, bundle: Bundle, adapter: Make
) -> None:
    stored = {
        name: each for name, each in (adapter_tensors(0) | change).items() if each is not None
    }
    tiny = replace(bundle.manifest, source={"name": "tiny"})
    with pytest.raises(CheckpointError) as caught:
        matrices_for(adapter(stored, **settings), tiny)
    assert message in f"{caught.value}"
    assert caught.value.hint


@pytest.mark.parametrize("damage", ["absent", "pickle", "cut", "empty", "pipe"])
def test_a_damaged_file_of_an_adapter_is_named(damage: str, bundle: Bundle, adapter: Make) -> None:
    folder = adapter(adapter_tensors(0))
    file = folder / "adapter_model.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "pipe":
        (folder / "adapter_config.json").unlink()
        os.mkfifo(folder / "adapter_config.json")
    elif damage in ("absent", "pickle"):
        file.rename(folder / ("adapter_model.bin" if damage == "pickle" else "other.safetensors"))
    with pytest.raises(CheckpointError) as caught:
        matrices_for(folder, bundle.manifest)
    assert "adapter" in caught.value.what
    assert caught.value.hint


def test_a_bundle_without_inputs_for_adapters_says_so(exported: Make, adapter: Make) -> None:
    opened, run = exported("onnxruntime", "micro"), RunOptions(adapter=adapter(adapter_tensors(0)))
    with pytest.raises(UsageError, match="take no adapter"):
        load_engine(opened, run)


@pytest.mark.parametrize(
    "options",
    [
        {"adapters_as_inputs": "0"},
        {"adapters_as_inputs": "257"},
        {"adapters_as_inputs": "8:q_proj,conv1"},
        {"adapters_as_inputs": "8:"},
        {
            "adapters_as_inputs": "8",
            "precisions": {"encoder": "w8a16"},
            "placement": {"encoder": "qnn"},
        },
    ],
)
def test_what_takes_no_adapter_is_named_before_the_export(
    options: dict[str, Any], micro_checkpoint: Any, tmp_path: Path
) -> None:
    with pytest.raises(UsageError):
        export(micro_checkpoint, "onnxruntime", tmp_path / "out", ExportOptions(**options))


@pytest.mark.parametrize(("low_rank", "equalized"), [(None, 1), (LowRank(2), 0)])
def test_an_adapter_finds_the_activations_that_it_was_trained_on(
    low_rank: LowRank | None, equalized: int, micro: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("whisperport.model.network.equalization.equalize", calls.append)
    placed = place(PlacementRequest(target="rk3588"), ["encoder"])
    programs = list(traced_programs(micro, GENERATION, placed, None, low_rank))
    assert len(programs) == 1
    assert len(calls) == equalized


def test_a_rank_and_layers_are_read_from_text() -> None:
    assert parse_low_rank("16") == LowRank(16)
    assert parse_low_rank("8:v_proj,q_proj") == LowRank(8, ("q_proj", "v_proj"))


def test_a_checkpoint_is_read_with_an_adapter(
    tiny_checkpoint_folder: Path, tiny_checkpoint: Any, adapter: Make
) -> None:
    width = tiny_checkpoint.dims.n_audio_state
    shapes = {"A": (RANK, width), "B": (width, RANK)}
    name = "base_model.model.model.encoder.layers.0.self_attn.q_proj.lora_{}.weight"
    folder = adapter(
        {name.format(side): np.ones(shape, np.float32) for side, shape in shapes.items()}
    )
    read = load_checkpoint(tiny_checkpoint_folder, adapter=folder)
    changed = "encoder.blocks.0.attn.query.weight"
    difference = read.weights[changed] - tiny_checkpoint.weights[changed]
    torch.testing.assert_close(difference, torch.full((width, width), 6.0), atol=1e-2, rtol=0)
    assert read.source.name.endswith("with mine")
    other = adapter({}, "other", base_model_name_or_path="openai/whisper-base")
    settings = read_adapter(other)
    with pytest.raises(CheckpointError, match="for another base"):
        settings.check_base("tiny")

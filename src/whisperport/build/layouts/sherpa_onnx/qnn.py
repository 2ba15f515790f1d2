"""The context binaries that sherpa-onnx loads on the Hexagon NPUs of Qualcomm's chips.

Source: k2-fsa/sherpa-onnx@634265c, csrc/qnn/offline-whisper-model-qnn.cc and qnn-model.cc.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.layouts.layout import App, Compilation, Layout, apps
from whisperport.build.layouts.npu import FLOAT, Compiled, compile_graphs, for_one_of, reader, rule
from whisperport.build.layouts.reading import Files
from whisperport.build.layouts.sherpa_onnx import npu
from whisperport.build.layouts.sherpa_onnx.npu_graphs import LOOP, Form
from whisperport.program.spec import ProgramSpec
from whisperport.targets.vendors.qualcomm.chips import CHIPS, SIMULATOR, W8A16
from whisperport.targets.vendors.qualcomm.context import context_binary

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

NAMES = tuple(chip.name for chip in CHIPS)
TOKENS = "tokens.txt"
PROFILE = replace(npu.PROFILE, tokens_per_s=6, counts_prompt=True)


def _write(checkpoint: "Checkpoint", precision: str, folder: Path) -> None:
    prefix = npu.size_of(checkpoint).replace(".", "_")
    form = Form(prefix=f"{prefix}_", positions_last=True, is_quantized=precision == W8A16)
    npu.write(checkpoint, form, folder, TOKENS)


def _place(graph: Path, compiled: Path) -> None:
    (graph.parent / COMPILED.name(graph.stem, "")).write_bytes(context_binary(compiled))


def _compile(job: Compilation) -> None:
    compile_graphs(job, _place, LOOP)


def _size(_name: str, spec: ProgramSpec) -> str:
    """Return the size that the names of inputs begin with, as the app reads it."""
    return spec.inputs[0].name.rpartition("_")[0].replace("_", ".", 1)


def _expected(files: Files, _encoder: str, decoder: str) -> Mapping[str, ProgramSpec]:
    """A context binary states names to us, and no shapes: those of the caches do not matter then."""
    first, *_ = names = sorted(files.read(decoder, _rows))
    form = Form(first.decode().removesuffix("this_self_k_0"), positions_last=True)
    shapes = {name.decode(): (1, 1, 1) for name in names} | {
        form.named(name): (1, 1, 1) for name in ("mel", "self_k_0", "cross_k_0", "logits")
    }
    return npu.signatures_of(files, shapes, form)


def _rows(path: Path) -> frozenset[bytes]:
    """Return the names of the outputs of a decoder with new keys; empty: it is another file."""
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        return frozenset(re.findall(rb"[a-z_]{1,20}this_self_k_[0-9]{1,2}", content))


def _other(spec: ProgramSpec, path: Path) -> str:
    """Compare names: a context binary has those of its inputs and outputs as text."""
    if not path.stat().st_size:
        return "it is empty"
    names = (tensor.name for tensor in (*spec.inputs, *spec.outputs))
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        lacking = next((name for name in names if content.find(name.encode()) < 0), None)
    return f"it does not name {lacking!r}, which the app asks for" if lacking else ""


COMPILED = Compiled(
    name=lambda stem, _size: f"{stem}.bin",
    other=_other,
    size=_size,
    sizes=npu.SIZES,
    is_known=lambda decoder: decoder.stat().st_size > 0 and bool(_rows(decoder)),
    expected=_expected,
)

LAYOUT = Layout(
    title="folder of context binaries for a Hexagon NPU: encoder.bin, decoder.bin and tokens.txt",
    precisions=(FLOAT, W8A16),
    apps=apps(
        App(
            name="sherpa-onnx-qnn",
            packages=(*SIMULATOR, "onnx", "kaldi-native-fbank"),
            module="kaldi_native_fbank",
            script=npu.CLIENT,
            devices=NAMES,
            compile=_compile,
            profile_of=lambda _checkpoint: PROFILE,
            compared="words",
            drops=(
                for_one_of(NAMES),
                *npu.DROPS,
                "audio after the window is not decoded, or more than 6 tokens a second with the prompt",
            ),
        )
    ),
    write=_write,
    unsupported=npu.unsupported,
    logits=LOOP.logits,
    reader=reader(COMPILED, npu.is_own),
    rules=(rule(COMPILED),),
)

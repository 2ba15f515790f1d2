"""The files that sherpa-onnx's script for Rockchip's boards loads.

Source: k2-fsa/sherpa-onnx@634265c, scripts/whisper/rknn/export_onnx.py and test_on_rk3588_board.py.
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.layouts.layout import App, Compilation, DecodingProfile, Layout, apps
from whisperport.build.layouts.npu import (
    ENCODER,
    FLOAT,
    Compiled,
    compile_graphs,
    for_one_of,
    reader,
    rule,
)
from whisperport.build.layouts.reading import Files
from whisperport.build.layouts.sherpa_onnx import npu
from whisperport.build.layouts.sherpa_onnx.npu_graphs import LOOP, Form
from whisperport.errors import BundleError
from whisperport.program.spec import ProgramSpec
from whisperport.targets.vendors.rockchip.chips import CHIPS, W8A8
from whisperport.targets.vendors.rockchip.compiler import KEPT, QUANTIZED
from whisperport.targets.vendors.rockchip.rknn_file import check_rknn, read_rknn

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

NAMES = tuple(chip.name for chip in CHIPS)
LAYERS = {"tiny": 4, "base": 6, "small": 12, "medium": 24}
MOST_OFFSETS = 100  # tokens with the prompt, in the app's script
POSITIONS = 448  # of a text, in the app's script


def _write(checkpoint: "Checkpoint", _precision: str, folder: Path) -> None:
    npu.write(checkpoint, Form(), folder, f"{npu.size_of(checkpoint)}-tokens.txt")


def _compile(job: Compilation) -> None:
    (tokens,) = job.folder.glob("*-tokens.txt")
    size = tokens.name.removesuffix("-tokens.txt")

    def place(graph: Path, compiled: Path) -> None:
        shutil.copyfile(compiled, job.folder / _name(graph.stem, size))
        for kept in filter(Path.is_file, map(compiled.with_suffix, KEPT)):  # the simulator's
            shutil.copyfile(kept, job.folder / kept.name)

    compile_graphs(job, place, LOOP, quantized=(ENCODER,), turned_on=("keep",))


def _warnings(checkpoint: "Checkpoint") -> Iterator[str]:
    dims, size = checkpoint.dims, npu.size_of(checkpoint)
    own = dims.n_text_layer, dims.n_text_state, dims.n_text_ctx
    name = size.removesuffix(".en")
    width = next(width for width, other in npu.WIDTHS.items() if other == name)
    expected = LAYERS[name], width, POSITIONS
    if own != expected:
        stated, wrong = (
            f"{layers} layers, width {width} and {positions} positions"
            for layers, width, positions in (own, expected)
        )
        yield (
            f"the app's script, test_on_rk3588_board.py, takes {wrong} from the file's name, `{size}`; "
            f"this decoder has {stated}: change them in the script"
        )


def _profile(checkpoint: "Checkpoint") -> DecodingProfile:
    return replace(npu.PROFILE, max_tokens=MOST_OFFSETS - checkpoint.generation.n_start_tokens)


def _name(stem: str, size: str) -> str:
    return f"{size}-{stem}.rknn"


def _other(spec: ProgramSpec, path: Path) -> str:
    try:
        check_rknn(path, next(iter(read_rknn(path).chips), ""), spec)
    except BundleError as error:
        return f"{error.what}: {error.why}"
    return ""


def _precision(path: Path) -> str:
    try:
        types = read_rknn(path).types
    except BundleError:  # a rule says so
        return FLOAT
    return next((name for name, (_, kind) in QUANTIZED.items() if kind in types), FLOAT)


def _expected(files: Files, encoder: str, decoder: str) -> Mapping[str, ProgramSpec]:
    of_audio, of_text = (files.read(name, read_rknn).shapes for name in (encoder, decoder))
    prefix = next(iter(of_audio), "").removesuffix("mel")  # the app's own export has the size there
    return npu.signatures_of(files, {**of_audio, **of_text}, Form(prefix))


COMPILED = Compiled(
    name=_name,
    other=_other,
    precision=_precision,
    is_known=lambda _decoder: True,  # no other app has such names
    expected=_expected,
    size=lambda name, _spec: name.rpartition("-")[0],
    sizes=npu.SIZES,
)

LAYOUT = Layout(
    title="folder of SIZE-encoder.rknn, SIZE-decoder.rknn and SIZE-tokens.txt for an NPU of Rockchip",
    precisions=(FLOAT, W8A8),
    apps=apps(
        App(
            name="sherpa-onnx-rknn",
            packages=("rknn-toolkit2==2.5.0", "kaldi-native-fbank", "setuptools<81"),
            module="rknn",
            script=npu.CLIENT,
            devices=NAMES,
            compile=_compile,
            profile_of=_profile,
            compared="words",
            drops=(
                for_one_of(NAMES),
                *npu.DROPS,
                "for these chips the app has a script only: English, one window, at most 100 tokens "
                "with the prompt, and sizes that follow from the name of the file",
            ),
        )
    ),
    write=_write,
    unsupported=npu.unsupported,
    logits=LOOP.logits,
    reader=reader(COMPILED, npu.is_own),
    rules=(rule(COMPILED),),
    warnings=_warnings,
)

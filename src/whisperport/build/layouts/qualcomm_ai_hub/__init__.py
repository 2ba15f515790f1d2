"""The compiled files and the settings that Qualcomm AI Hub's Whisper app loads.

Source: qai-hub-models 0.65.0, models/templates/hf_whisper/app.py (`HfWhisperApp`), and
qualcomm/ai-hub-apps@540a46e, apps/windows/python/Whisper/demo.py, which names the files.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.layouts.huggingface_files import (
    added_tokens,
    config,
    preprocessor_config,
    tokenizer_config,
    tokenizer_json,
    tokens_by_id,
    vocab,
    write_json,
)
from whisperport.build.layouts.layout import App, Compilation, DecodingProfile, Layout, apps
from whisperport.build.layouts.npu import (
    DECODER,
    ENCODER,
    FLOAT,
    Compiled,
    compile_graphs,
    dims_of,
    for_one_of,
    reader,
    rule,
)
from whisperport.build.layouts.onnx_graph.header import OnnxHeader, read_header
from whisperport.build.layouts.qualcomm_ai_hub.graphs import (
    LOOP,
    POSITIONS,
    signatures,
    write_decoder,
    write_encoder,
)
from whisperport.build.layouts.reading import Files
from whisperport.errors import BundleError
from whisperport.program.spec import ProgramSpec
from whisperport.targets.vendors.qualcomm.chips import CHIPS, SIMULATOR, W8A16
from whisperport.targets.vendors.qualcomm.context import check_context

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

NAMES = tuple(chip.name for chip in CHIPS)
WINDOW_S = 30  # to which the app fills audio
PROFILE = DecodingProfile(
    padding="audio",
    prompts=False,
    suppresses=False,
    suppresses_at_start=False,
    windows=False,
    max_tokens=POSITIONS - 1,
)


def _write(checkpoint: "Checkpoint", _precision: str, folder: Path) -> None:
    write_encoder(checkpoint, folder / ENCODER)
    write_decoder(checkpoint, folder / DECODER)
    generation = checkpoint.generation
    special = tokens_by_id(checkpoint)[generation.end_of_text : generation.timestamp_begin]
    for name, value in (
        ("config", config(checkpoint)),
        ("preprocessor_config", preprocessor_config(checkpoint.dims)),
        ("tokenizer_config", {**tokenizer_config(), "additional_special_tokens": special}),
        ("vocab", vocab(checkpoint)),
        ("added_tokens", added_tokens(checkpoint)),
    ):
        write_json(folder / f"{name}.json", value)
    merges = ["#version: 0.2", *tokenizer_json(checkpoint)["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")


def _place(graph: Path, compiled: Path) -> None:
    place = graph.parent / _name(graph.stem, "")
    place.parent.mkdir()
    shutil.copyfile(compiled, place)


def _compile(job: Compilation) -> None:
    compile_graphs(job, _place, LOOP)


def _name(stem: str, _size: str) -> str:
    return f"HfWhisper{stem.capitalize()}/model.onnx"


def _other(spec: ProgramSpec, path: Path) -> str:
    try:
        check_context(path, spec, beside=True)
    except BundleError as error:
        return f"{error.what}: {error.why}"
    return ""


def _unsupported(checkpoint: "Checkpoint", _precision: str) -> str:
    """Return why the app cannot run a checkpoint; empty: it can."""
    dims = checkpoint.dims
    if dims.window_s != WINDOW_S:
        return f"its window is {dims.window_s:g} s; the app fills audio to {WINDOW_S} s"
    if dims.n_text_ctx < POSITIONS:
        return f"its decoder has {dims.n_text_ctx} positions; the app decodes {POSITIONS}"
    return ""


def _is_own(encoder: OnnxHeader, decoder: OnnxHeader) -> bool:
    return "k_cache_cross_0" in encoder.outputs and "k_cache_self_0_in" in decoder.inputs


def _expected(files: Files, encoder: str, decoder: str) -> Mapping[str, ProgramSpec]:
    if files.checkpoint is not None:
        return signatures(files.checkpoint.dims)
    of_audio, of_text = (files.read(name, read_header) for name in (encoder, decoder))
    heads, _, width, positions = map(int, of_audio.outputs["k_cache_cross_0"])
    dims = dims_of(
        n_mels=int(of_audio.inputs["input_features"][1]),
        positions=positions,
        width=heads * width,
        heads=heads,
        layers=len(of_audio.outputs) // 2,
        tokens=POSITIONS,
        n_vocab=int(of_text.outputs["logits"][1]),
    )
    return signatures(dims)


COMPILED = Compiled(
    name=_name,
    other=_other,
    is_known=lambda _decoder: True,  # no other app has such folders
    expected=_expected,
)

LAYOUT = Layout(
    title="folder of HfWhisperEncoder and HfWhisperDecoder, compiled, and of the tokenizer",
    precisions=(FLOAT, W8A16),
    apps=apps(
        App(
            name="qualcomm-ai-hub",
            packages=(*SIMULATOR, "transformers>=4.56,<5"),
            module="onnxruntime_qnn",
            script=Path(__file__).with_name("client.py"),
            devices=NAMES,
            compile=_compile,
            profile_of=lambda _checkpoint: PROFILE,
            compared="words",
            drops=(
                for_one_of(NAMES),
                "the app runs on devices only: its loop, once more in Python, calls the vendor's simulator",
                "the model itself chooses language, task and timestamps",
                f"at most {POSITIONS - 1} tokens in 30 s, and no suppressed tokens",
            ),
        ),
    ),
    write=_write,
    unsupported=_unsupported,
    logits=LOOP.logits,
    reader=reader(COMPILED, _is_own),
    rules=(rule(COMPILED),),
)

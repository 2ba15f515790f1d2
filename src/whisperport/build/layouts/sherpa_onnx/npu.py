"""Write what sherpa-onnx runs on NPUs: the graphs, which are then compiled, and the tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.layouts.layout import DecodingProfile
from whisperport.build.layouts.npu import DECODER, ENCODER, dims_of
from whisperport.build.layouts.onnx_graph.header import OnnxHeader
from whisperport.build.layouts.reading import Files
from whisperport.build.layouts.sherpa_onnx.folder import text_tokens
from whisperport.build.layouts.sherpa_onnx.npu_graphs import (
    Form,
    signatures,
    write_decoder,
    write_encoder,
)
from whisperport.program.spec import ProgramSpec

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

CLIENT = Path(__file__).with_name("npu_client.py")
WIDTHS = {384: "tiny", 512: "base", 768: "small", 1024: "medium"}  # d -> OpenAI's model
SIZES = tuple(WIDTHS.values())
PROFILE = DecodingProfile(
    padding="mel", timestamps=False, suppresses=False, suppresses_at_start=False, windows=False
)  # of both vendors' chips
DROPS = (
    "the app cannot be installed here: its loop, once more in Python, calls the vendor's simulator",
    "ids of special tokens are those of OpenAI's models before large-v3",
    "no timestamps, and no suppressed tokens",
)


def write(checkpoint: "Checkpoint", form: Form, folder: Path, tokens: str) -> None:
    """Write both graphs, and the tokens to a file of this name."""
    write_encoder(checkpoint, form, folder / ENCODER)
    write_decoder(checkpoint, form, folder / DECODER)
    (folder / tokens).write_text(text_tokens(checkpoint), encoding="ascii")


def size_of(checkpoint: "Checkpoint") -> str:
    """Return the name of OpenAI's model that is as wide, or tiny: the app has no other names."""
    name = WIDTHS.get(checkpoint.dims.n_text_state, "tiny")
    return name if checkpoint.generation.is_multilingual else f"{name}.en"


def unsupported(checkpoint: "Checkpoint", _precision: str) -> str:
    """Return why the app cannot run a checkpoint: its code has the ids of special tokens; empty: it can."""
    generation = checkpoint.generation
    languages, tasks = generation.languages, generation.tasks
    ids: list[tuple[str, int | None, int]] = [
        ("<|startoftranscript|>", generation.start_of_transcript, 50257),
        ("<|endoftext|>", generation.end_of_text, 50256),
        ("<|notimestamps|>", generation.no_timestamps, 50362),
    ]
    if generation.is_multilingual:
        ids = [(token, own, expected + 1) for token, own, expected in ids]
        ids += [("<|en|>", languages.get("en"), 50259)]
        ids += [("<|transcribe|>", tasks.get("transcribe"), 50359)]
    for token, own, expected in ids:
        if own != expected:
            return f"the id of {token} is {own}; the app has {expected}, as OpenAI's models before large-v3"
    return ""


def signatures_of(
    files: Files, shapes: Mapping[str, Sequence[int]], form: Form
) -> Mapping[str, ProgramSpec]:
    """Return what the graphs of compiled files were: `Compiled.expected`.

    Args:
        files: in which the graphs are missing.
        shapes: of the inputs and outputs that the compiled files state, by name.
        form: of the graphs.
    """
    if files.checkpoint is not None:
        return signatures(files.checkpoint.dims, form)
    cache, audio = shapes[form.named("self_k_0")][1:], shapes[form.named("cross_k_0")][1:]
    tokens, width = reversed(cache) if form.positions_last else cache
    dims = dims_of(
        n_mels=min(shapes[form.named("mel")][1:]),
        positions=audio[form.positions_last],
        width=width,
        heads=1,
        layers=sum(name.startswith(form.named("this_self_k_")) for name in shapes),
        tokens=tokens,
        n_vocab=shapes[form.named("logits")][-1],
    )
    return signatures(dims, form)


def is_own(encoder: OnnxHeader, decoder: OnnxHeader) -> bool:
    """Return whether graphs with these headers are those that `write` writes."""
    *_, offset, mask = ("", "", *decoder.inputs)
    ends = offset.rpartition("_")[2], mask.rpartition("_")[2]
    return "cross_k_0" in encoder.outputs and ends == ("offset", "mask")

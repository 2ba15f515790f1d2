"""An encoder and a decoder that a script of a vendor or of a user wrote: they are only judged."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.layouts.graph_pair.decoding import emitted, logits
from whisperport.build.layouts.graph_pair.forms import Form, form_of
from whisperport.build.layouts.graph_pair.pair import Pair, read_pair
from whisperport.build.layouts.graph_pair.rules import RULES, first_position
from whisperport.build.layouts.layout import App, DecodingProfile, Extent, Layout, apps
from whisperport.build.layouts.onnx_graph.stored import stored_arrays
from whisperport.build.layouts.reading import Files, Reader, StoredArray
from whisperport.errors import LoweringError
from whisperport.speech.audio import FRAMES_PER_SECOND

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

__all__ = ["PAIRS", "RULES", "layout_of_pair"]

PAIRS = "graphs of any exporter"

FORMATS = {".onnx": "ONNX", ".tflite": "TFLite", ".pte": "ExecuTorch"}


def layout_of_pair(files: Files) -> Layout | None:
    """Return the layout of a folder, or of a file, with an encoder and a decoder; None: it has none.

    Raises:
        ProgramError: a graph is damaged.
        MissingPackageError: the reader of a format is not installed.
    """
    pair = read_pair(files)
    if pair is None:
        return None
    form = form_of(pair)
    return Layout(
        title=_title(pair),
        precisions=(_precision(pair),),
        apps=apps(_app(form)),
        write=_not_written,
        reader=Reader(
            recognize=lambda files: read_pair(files) is not None,
            precisions=lambda _files: [_precision(pair)],
            # Others are folded into one another, or packed for a delegate.
            arrays=partial(_arrays, pair) if pair.decoder.suffix == ".onnx" else None,
            sizes=lambda _files: _sizes(pair),
        ),
        rules=RULES,
        logits=logits,
        emitted=emitted,
        extent=Extent(
            n_frames=pair.n_frames,
            first_position=first_position(files, pair),
            n_tokens=pair.n_tokens,
        ),
        target=form.target,
    )


def _title(pair: Pair) -> str:
    window = f"{pair.n_frames / FRAMES_PER_SECOND:g} s" if pair.n_frames else "any length"
    cache = "keeps its cache inside" if pair.holds_state else "no cache"
    if pair.of("cache"):
        cache = f"cache of {pair.cached}" if pair.cached else "cache of any length"
    reads = "any number of tokens" if not pair.n_new else f"{pair.n_new} tokens per run"
    return (
        f"{FORMATS[pair.encoder.suffix]} graphs: an encoder of {pair.n_mels} mel bins and {window}, a "
        f"decoder of {pair.n_vocab} tokens ({reads}, {cache})"
    )


def _app(form: Form) -> App:
    profile = DecodingProfile(
        padding=form.padding,
        timestamps=False,
        suppresses=False,
        suppresses_at_start=False,
        windows=False,
    )
    return App(
        name=form.name,
        packages=(),
        module="",
        script=Path(),
        profile_of=lambda _checkpoint: profile,
        compared="words",
        drops=form.drops,
    )


def _precision(pair: Pair) -> str:
    values = [
        value
        for part in (pair.encoder, pair.decoder)
        for node in part.graph.nodes
        for value in node.tensors
        if value.constant and len(value.shape or ()) > 1
    ]
    kinds = {value.dtype for value in values}
    if kinds & {"int8", "uint8"}:
        return "w8"
    return "fp16" if "float16" in kinds else "fp32"


def _sizes(pair: Pair) -> Mapping[str, int]:
    return {"num_mel_bins": pair.n_mels, "vocab_size": pair.n_vocab}


def _arrays(pair: Pair, files: Files, _precision: str) -> Iterator[StoredArray]:
    yield from stored_arrays(files, [pair.encoder.file, pair.decoder.file])


def _not_written(_checkpoint: "Checkpoint", _precision: str, _path: Path) -> None:
    raise LoweringError(
        "`convert` does not write such graphs",
        hint="`whisperport export` writes programs for chips",
    )

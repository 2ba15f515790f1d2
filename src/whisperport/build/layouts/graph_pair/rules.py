"""What an encoder and a decoder lose or cannot do, whoever exported them."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whisperport.build.layouts.checkpoint_rules import Setting, checkpoint_rules
from whisperport.build.layouts.graph_pair.forms import COMPILED, compiled_types
from whisperport.build.layouts.graph_pair.pair import Pair, read_pair
from whisperport.build.layouts.onnx_graph.header import text
from whisperport.build.layouts.onnx_graph.stored import stored_arrays
from whisperport.build.layouts.reading import Files
from whisperport.build.layouts.rules import layout_rule
from whisperport.program.dims import SECONDS_PER_POSITION
from whisperport.speech.audio import FRAMES_PER_SECOND

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

WINDOW_S = 30.0  # of Whisper
N_TEXT_CTX = 448  # of OpenAI's models
QUANTIZERS = ("QuantizeLinear", "QUANTIZE")
EIGHT_BITS = ("int8", "uint8")
COMPILED_NODE = "EPContext"


@layout_rule("WP771", "The encoder takes a short window", remedy="export", is_warning=True)
def short_window(files: Files) -> Iterator[tuple[str, str]]:
    """Whisper was trained with 30 s. What follows a shorter window is lost, and the decoder may loop.

    What to do: `whisperport export CHECKPOINT --target TARGET`.
    """
    pair = _pair(files)
    seconds = pair.n_frames / FRAMES_PER_SECOND
    if 0 < seconds < WINDOW_S:
        yield pair.encoder.file, f"it takes {seconds:g} s; what follows is cut"


@layout_rule(
    "WP772",
    "The decoder reads a fixed number of tokens, and has no cache",
    remedy="export",
    is_warning=True,
)
def fixed_tokens(files: Files) -> Iterator[tuple[str, str]]:
    """A longer text stops early; or the app drops the oldest tokens, and the decoder repeats them: "((((".

    What to do: `whisperport export CHECKPOINT --target TARGET` writes a cache.
    """
    pair = _pair(files)
    if pair.n_new > 1 and not pair.of("cache"):
        yield (
            pair.decoder.file,
            f"it reads {pair.n_new} tokens with the prompt, again for each new one",
        )


@layout_rule("WP773", "The cache of the decoder is short", remedy="export", is_warning=True)
def short_cache(files: Files) -> Iterator[tuple[str, str]]:
    """A window of fast speech needs more than 200 of Whisper's 448 tokens.

    What to do: `whisperport export CHECKPOINT --target TARGET`.
    """
    pair = _pair(files)
    if 0 < pair.cached < N_TEXT_CTX - 1:
        yield pair.decoder.file, f"a text has at most {pair.n_tokens} tokens with its prompt"


@layout_rule("WP774", "Activations have 8 bits", remedy="export")
def eight_bit_activations(files: Files) -> Iterator[tuple[str, str]]:
    """One scale for outliers erases the rest: the text is empty, or "((((((((". Calibration does not help.

    What to do: float16, or 16-bit activations: `whisperport export CHECKPOINT --target TARGET`, then
    `whisperport compile`.
    """
    pair = _pair(files)
    for part in (pair.encoder, pair.decoder):
        graph = part.graph
        n_quantized = sum(
            node.original_op in QUANTIZERS and node.output.dtype in EIGHT_BITS
            for node in graph.with_folded or graph.nodes
        )
        n_quantized += sum(
            value.dtype in EIGHT_BITS and value.quantization is not None
            for node in graph.nodes
            for value in node.outputs
        )
        if n_quantized:
            yield part.file, f"{n_quantized} activations are rounded to 8 bits"
    for name in _compiled(files, pair):
        types = files.read(name, compiled_types)
        if types & set(EIGHT_BITS):
            yield name, f"it was compiled with {', '.join(sorted(types & set(EIGHT_BITS)))}"


@layout_rule(
    "WP775", "The positions of a short window are not the first", remedy="export", is_warning=True
)
def late_positions(files: Files) -> Iterator[tuple[str, str]]:
    """The audio seems to begin later than in training.

    What to do: export with `positional_embedding[:n]`, not `[-n:]`.
    """
    pair = _pair(files)
    if first := first_position(files, pair):
        yield pair.encoder.file, f"they begin at {first * SECONDS_PER_POSITION:g} s of 30 s"


@layout_rule(
    "WP776", "The decoder reads integers beside real numbers", remedy="export", is_warning=True
)
def integer_inputs(files: Files) -> Iterator[tuple[str, str]]:
    """A tool that takes every input file for float32 returns other tokens, or zeros, without an error.

    What to do: give integers as integers (`qnn-net-run --use_native_input_files`).
    """
    pair = _pair(files)
    integers = [v for v in pair.decoder.graph.inputs if v.dtype.startswith("int")]
    if integers and pair.of("cache") and pair.n_new == 1:
        shown = ", ".join(f"{v.name} {v.dtype} {list(v.shape or ())}" for v in integers)
        newest = "last" if pair.moves_cache else "at its place"
        yield pair.decoder.file, f"{shown}; in cache and mask, the newest token is {newest}"


@layout_rule(
    "WP777", "The vocabulary projection is not delegated", remedy="export", is_warning=True
)
def undelegated(files: Files) -> Iterator[tuple[str, str]]:
    """Half of each token's time is "native_call_mm"; quantizing does not change it.

    What to do: `whisperport lower decoder.pt2 --target xnnpack --out decoder.pte`.
    """
    from whisperport.model.inspection.node_modules import vocabulary_projection

    pair = _pair(files)
    for part in (pair.encoder, pair.decoder):
        # Operators outside of a delegate have names of torch.
        own = [node for node in part.graph.nodes if node.original_op.startswith("aten.")]
        for node in own if part.method else ():
            if vocabulary_projection(node):
                yield (
                    part.file,
                    f"{node.original_op} of {list(node.output.shape or ())} runs on the CPU",
                )


@layout_rule("WP778", "A graph is compiled for one chip", remedy="export", is_warning=True)
def compiled(files: Files) -> Iterator[tuple[str, str]]:
    """Its weights and arithmetic cannot be read.

    What to do: judge the file that was compiled.
    """
    pair = _pair(files)
    for part in (pair.encoder, pair.decoder):
        if any(node.original_op.endswith(COMPILED_NODE) for node in part.graph.nodes):
            yield part.file, "it holds a compiled program of another file"
    for name in _compiled(files, pair):
        yield name, "it is not read"


@layout_rule("WP779", "Encoder and decoder do not fit together", remedy="export")
def fits(files: Files) -> Iterator[tuple[str, str]]:
    """They are of two sizes, or one was changed.

    What to do: export both from one checkpoint.
    """
    pair = _pair(files)
    if not (pair.of("features") or pair.of("cross")):
        shapes = ", ".join(str(list(v.shape or ())) for v in pair.encoder.graph.outputs[:2])
        yield pair.decoder.file, f"no input has the shape that the encoder returns: {shapes}"


def _settings(files: Files, checkpoint: "Checkpoint") -> Iterator[Setting]:
    pair, dims = _pair(files), checkpoint.dims
    yield Setting(pair.encoder.file, "the number of mel bins", pair.n_mels, dims.n_mels)
    yield Setting(pair.decoder.file, "the size of the vocabulary", pair.n_vocab, dims.n_vocab)


RULES = (
    fits,
    eight_bit_activations,
    short_window,
    fixed_tokens,
    short_cache,
    late_positions,
    integer_inputs,
    undelegated,
    compiled,
    *checkpoint_rules(_settings),
)


def first_position(files: Files, pair: Pair) -> int:
    """Return the row of Whisper's table of positions with which the encoder's table begins."""
    n_rows = pair.n_frames // 2
    n_all = round(WINDOW_S / SECONDS_PER_POSITION)
    if not 0 < n_rows < n_all or pair.encoder.suffix != ".onnx":
        return 0
    for array in stored_arrays(files, [pair.encoder.file]):
        shape = tuple(size for size in array.values.shape if size != 1)
        is_text = array.values.dtype.kind == "O"
        if (
            not is_text
            and len(shape) == 2
            and shape[0] == n_rows
            and shape[1]
            and shape[1] % 2 == 0
        ):
            # Sinusoids: the first column is the sine of the place.
            column = array.values.reshape(shape)[:, 0].astype(np.float64)
            places = np.arange(n_all)
            for first in (0, n_all - n_rows):
                if np.allclose(column, np.sin(places[first : first + n_rows]), atol=1e-3):
                    return first
    return 0


def _pair(files: Files) -> Pair:
    pair = read_pair(files)
    assert pair is not None  # the layout was recognized by it
    return pair


def _compiled(files: Files, pair: Pair) -> list[str]:
    """Return the compiled programs beside a pair: none of the files that hold weights of a graph."""
    compiled = [name for name in pair.further_files if Path(name).suffix in COMPILED]
    names = (pair.encoder.file, pair.decoder.file, *pair.further_files)
    graphs = [name for name in names if name.endswith(".onnx")] if compiled else []
    weights = {Path(name).parent / file for name in graphs for file in files.read(name, _weights)}
    return [name for name in compiled if Path(name) not in weights]


def _weights(path: Path) -> frozenset[str]:
    """Return the files, relative to its folder, in which an ONNX graph stores weights."""
    from whisperport.model.inspection.read_onnx import read_skeleton

    tensors = read_skeleton(path).graph.initializer
    entries = (entry for tensor in tensors for entry in tensor.external_data)
    return frozenset(text(entry.value) for entry in entries if entry.key == "location")

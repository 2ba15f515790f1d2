"""Compile a layout's graphs for an NPU: an encoder and a decoder of one token, which stay beside the files.

The app reads what was compiled. The graphs, in float32, are verified, and can be compiled again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

import numpy as np

from whisperport.build.compile.compile_file import compile_file
from whisperport.build.compile.compile_options import CompileOptions
from whisperport.build.compile.lowered_file import READERS
from whisperport.build.layouts.arrays import Floats
from whisperport.build.layouts.environments import command_of
from whisperport.build.layouts.layout import Compilation
from whisperport.build.layouts.onnx_graph.file import open_session, run_session, write_graph
from whisperport.build.layouts.onnx_graph.graph import Array, Graph
from whisperport.build.layouts.onnx_graph.header import OnnxHeader, read_header
from whisperport.build.layouts.onnx_graph.stored import stored_arrays
from whisperport.build.layouts.reading import Files, Reader
from whisperport.build.layouts.rules import LayoutRule, layout_rule
from whisperport.errors import AudioError, BundleError, LoweringError, MissingPackageError
from whisperport.program.dims import Dims
from whisperport.program.spec import ProgramSpec
from whisperport.runtime import start_tokens
from whisperport.speech.audio import log_mel
from whisperport.system.locking import temporary_folder
from whisperport.system.progress import begin_stage
from whisperport.targets import get_target
from whisperport.verification.clips import shipped_audio, shipped_clips
from whisperport.verification.recording.audio_files import (
    CalibrationAudio,
    audio_files,
    fingerprint,
)

ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
GRAPHS = (ENCODER, DECODER)
FLOAT = "fp16"  # in which a chip computes the graphs; other precisions are calibrated
SAMPLES = 32  # of calibration; as many as the targets of these chips read
Inputs = dict[str, Array]


class Decoding(Protocol):
    """The decoder after a run of the encoder, one token at a time, with the cache as the app writes it."""

    offset: int  # of the next token

    def inputs(self, token: int) -> Inputs:
        """Return the inputs of the next run. They change in the run."""

    def logits(self, inputs: Inputs) -> Floats:
        """Run the decoder, and return the logits (1, V) after a token."""

    def keys_and_values(self) -> dict[str, Floats]:
        """Return those of all tokens, and of the audio, under the names that `Layout.logits` has."""


@dataclass(frozen=True, slots=True)
class Loop:
    """How an app runs the graphs of its folder.

    Attributes:
        inputs: takes a session of the encoder, and a spectrogram (n_mels, 2T); returns the inputs.
        begin: takes a session of the decoder, and what the encoder returned; returns the decoder.
    """

    inputs: Callable[[Any, Floats], Inputs]
    begin: Callable[[Any, Sequence[Floats]], Decoding]

    def logits(
        self,
        folder: Path,
        _precision: str,
        mel: Floats,
        tokens: Sequence[int],
        n_prompt: int,
        caches: dict[str, Floats],
    ) -> Floats:
        """Return the logits (S, V) after each of S tokens, as `Layout.logits` says."""
        encoder = open_session(folder / ENCODER)
        audio = run_session(encoder, self.inputs(encoder, mel))
        del encoder  # its memory, before the decoder takes more
        decoding = self.begin(open_session(folder / DECODER), audio)
        result: list[Floats] = []
        for token in tokens:
            result.append(decoding.logits(decoding.inputs(token)))
            if decoding.offset == n_prompt:
                caches |= decoding.keys_and_values()
        return np.concatenate(result)


def for_one_of(chips: Sequence[str]) -> str:
    """Return a sentence for lists."""
    return f"the files are for one chip: {', '.join(chips)}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a vendor's compiler makes of the graphs, in the folder of the app.

    Others publish it without the graphs.

    Attributes:
        name: takes a graph's stem and the size; returns the name of its file.
        other: returns how a file differs from what would be compiled of a graph; empty: it does not.
        size: takes a name, and what the graph is; returns the size, if the app reads it from one of them.
        sizes: that the app knows.
        precision: takes a file; returns the precision in which it is computed.
        is_known: whether a file of the decoder is the app's, where its graph is missing.
        expected: returns what the graphs were, in the sizes of the checkpoint, or in those that both files
            state. It raises BundleError for a damaged file, and KeyError, IndexError or ValueError for one
            without these sizes.
    """

    name: Callable[[str, str], str]
    other: Callable[[ProgramSpec, Path], str]
    size: Callable[[str, ProgramSpec], str] = lambda _name, _spec: ""
    sizes: Sequence[str] = ("",)
    precision: Callable[[Path], str] = lambda _path: FLOAT
    is_known: Callable[[Path], bool] = lambda _path: False
    expected: Callable[[Files, str, str], Mapping[str, ProgramSpec]] = lambda *_: {}

    def file(self, files: Files, graph: str) -> str:
        """Return the name of a graph's file, of any size; empty: it is missing."""
        pattern = self.name(Path(graph).stem, "*")
        paths = files.path.glob(pattern) if files.path.is_dir() else ()
        return next((path.relative_to(files.path).as_posix() for path in sorted(paths)), "")

    def is_published(self, files: Files) -> bool:
        """Return whether there are files for the app, and no graphs."""
        names = [self.file(files, graph) for graph in GRAPHS]
        if any(map(files.has, GRAPHS)) or not all(names):
            return False
        return files.read(names[-1], self.is_known)

    def spec(self, files: Files, graph: str) -> ProgramSpec:
        """Return the inputs and outputs that a file must have.

        Raises:
            BundleError: its graph is missing, and it does not state its own.
        """
        if files.has(graph):
            return files.read(graph, READERS[".onnx"])[0]
        names = [self.file(files, name) for name in GRAPHS]
        try:
            return files.kept(self, lambda: self.expected(files, *names))[graph]
        except (KeyError, IndexError, ValueError) as error:
            raise BundleError(
                "the inputs and outputs are not those that the app expects", why=f"no size: {error}"
            ) from error


def write_signed(path: Path, graph: Graph, signature: ProgramSpec) -> None:
    """Write a graph with these inputs and outputs."""
    inputs, outputs = (
        [(tensor.name, np.dtype(tensor.dtype), list(tensor.shape)) for tensor in tensors]
        for tensors in (signature.inputs, signature.outputs)
    )
    write_graph(path, graph, inputs, outputs)


def dims_of(
    *, n_mels: int, positions: int, width: int, heads: int, layers: int, tokens: int, n_vocab: int
) -> Dims:
    """Return the sizes of a model, as far as the inputs and outputs of its graphs state them.

    Raises:
        ValueError: one is none of a model.
    """
    return Dims(
        n_mels=n_mels,
        n_audio_ctx=positions,
        n_audio_state=width,
        n_audio_head=heads,
        n_audio_layer=layers,
        n_text_ctx=tokens,
        n_text_state=width,
        n_text_head=heads,
        n_text_layer=layers,
        n_vocab=n_vocab,
        n_audio_ffn=width,
        n_text_ffn=width,
    )


def compile_graphs(
    job: Compilation,
    place: Callable[[Path, Path], None],
    loop: Loop,
    *,
    quantized: Sequence[str] = GRAPHS,
    turned_on: Sequence[str] = (),
) -> None:
    """Compile both graphs of a folder for an app's chip, with the compiler in the app's environment.

    Args:
        job: what is compiled.
        place: takes a graph and the file that the compiler wrote, and writes what the app loads.
        loop: runs the graphs, if they are calibrated.
        quantized: the graphs that a precision of 8 bits is for; the others are computed in float.
        turned_on: options of the compiler.

    Raises:
        AudioError: there is too little audio to calibrate them.
        MissingPackageError: the compiler is not installed.
        LoweringError: it failed.
    """
    (chip,) = job.app.devices
    compiler, command = get_target(chip).compiler, command_of(job.app)
    places = {compiler.toolchain: command[0]} if compiler and command else {}
    calibrated = () if job.precision == FLOAT else quantized
    chosen = {f"{chip}.emulate": "0"}  # the simulator runs in the app's loop instead
    with temporary_folder() as scratch:
        if calibrated:
            _write_samples(job, loop, scratch, calibrated)
        for name in GRAPHS:
            is_quantized, own = name in calibrated, scratch / Path(name).stem
            options = CompileOptions(
                target=chip,
                precision=job.precision if is_quantized else FLOAT,
                inputs=own if is_quantized else None,
                out=own / chip,
                work=own / "work",
                options=chosen | dict.fromkeys((f"{chip}.{option}" for option in turned_on), "on"),
                toolchains=places,
            )
            try:
                result = compile_file(job.folder / name, options)
            except MissingPackageError as error:
                error.hint = f"whisperport apps --install {job.app.name}"
                raise
            except LoweringError as error:
                error.hint = _with_kept_logs(error.hint, own)
                raise
            place(job.folder / name, result.folder / result.programs[0].file)


def _with_kept_logs(hint: str, scratch: Path) -> str:
    """Return a hint that names copies of the logs in a folder, since the folder is deleted."""
    for log in scratch.rglob("*.log"):
        if str(log) in hint:
            with NamedTemporaryFile(prefix="whisperport-", suffix=".log", delete=False) as kept:
                kept.write(log.read_bytes())
            hint = hint.replace(str(log), kept.name)
    return hint


def _write_samples(job: Compilation, loop: Loop, folder: Path, graphs: Sequence[str]) -> None:
    """Write inputs of graphs, with which they are calibrated: STEM/NUMBER/INPUT.npy.

    Raises:
        AudioError: there is too little audio.
    """
    begin_stage("making the calibration set")
    dims, generation = job.checkpoint.dims, job.checkpoint.generation
    files = audio_files(job.calibration) if job.calibration else [a.path for a in shipped_audio()]
    known = frozenset(fingerprint(clip.samples) for clip in shipped_clips())
    audio = CalibrationAudio(files=files, seconds=dims.window_s, excluded=known)
    mels = (log_mel(window, dims.n_mels, n_frames=dims.n_frames) for window in audio.windows())
    prompt = [generation.start_of_transcript]
    if job.app.profile_of(job.checkpoint).prompts:
        prompt = start_tokens(generation, job.language, "transcribe")
    encoder, n_samples = open_session(job.folder / ENCODER), 0
    decoder = open_session(job.folder / DECODER) if DECODER in graphs else None
    for mel in islice(mels, SAMPLES):
        inputs = {ENCODER: loop.inputs(encoder, mel)}
        if decoder is not None:
            decoding = loop.begin(decoder, run_session(encoder, inputs[ENCODER]))
            offset = n_samples % dims.n_text_ctx
            inputs[DECODER] = _token_inputs(decoding, offset, prompt, generation.end_of_text)
        for name, arrays in inputs.items():
            place = folder / Path(name).stem / f"{n_samples:03d}"
            place.mkdir(parents=True)
            for tensor, array in arrays.items():
                np.save(place / f"{tensor}.npy", array)
        n_samples += 1
    if n_samples < SAMPLES:
        skipped = f"; skipped: {audio.faults}" if audio.skipped else ""
        raise AudioError(
            f"too little audio to calibrate {job.app.name} in {job.precision}",
            why=f"{SAMPLES} windows of {dims.window_s:g} s are needed, and {n_samples} can be used, each "
            f"one at three levels (unchanged, quiet, loud){skipped}",
            hint="give more audio files with speech to `--calibration`",
        )


def _token_inputs(decoding: Decoding, offset: int, prompt: Sequence[int], end: int) -> Inputs:
    """Return the decoder's inputs at a token of the text, or at its last one if it has fewer."""
    tokens = list(prompt)
    while True:
        inputs = decoding.inputs(tokens[decoding.offset])
        if decoding.offset == offset:
            return inputs
        best = int(decoding.logits(inputs).argmax())
        if decoding.offset == len(tokens):
            if best == end:
                return inputs
            tokens.append(best)


def reader(compiled: Compiled, is_own: Callable[[OnnxHeader, OnnxHeader], bool]) -> Reader:
    """Return the reader of folders with the graphs, and with what was compiled of one of them, or of both.

    Args:
        compiled: what it is compiled to.
        is_own: takes the headers of both graphs; returns whether they are the layout's.
    """

    def recognize(files: Files) -> bool:
        if compiled.is_published(files):
            return True
        if not all(map(files.has, GRAPHS)) or not any(compiled.file(files, g) for g in GRAPHS):
            return False
        return is_own(*(files.read(graph, read_header) for graph in GRAPHS))

    def precision_of(files: Files) -> list[str]:
        names = filter(None, (compiled.file(files, graph) for graph in GRAPHS))
        precisions = [files.read(name, compiled.precision) for name in names]
        return [next((precision for precision in precisions if precision != FLOAT), FLOAT)]

    return Reader(
        recognize,
        precision_of,
        lambda files, _precision: stored_arrays(files, GRAPHS),
        is_readable=lambda files: files.has(ENCODER),
    )


def rule(compiled: Compiled) -> LayoutRule:
    """Return the rule of the files that were compiled."""

    @layout_rule("WP785", "A file for an NPU is missing, or is not what its graph or its app needs")
    def check(files: Files) -> Iterator[tuple[str, str]]:
        """The app loads what was compiled of `encoder.onnx` and `decoder.onnx`. Without these, the file is
        compared with what the app expects. To some apps, a size in the names of files or inputs tells the
        ids of special tokens: tiny, base, small or medium, and `.en` if English-only.

        What to do: `whisperport convert` with `--chips`.
        """
        for graph in GRAPHS:
            name = compiled.file(files, graph)
            if not name:
                yield compiled.name(Path(graph).stem, "SIZE"), "the file is missing"
                continue
            try:
                spec = compiled.spec(files, graph)
            except BundleError as error:
                yield name, f"{error.what}: {error.why}"
                continue
            size = compiled.size(name, spec)
            if size.removesuffix(".en") not in compiled.sizes:
                yield name, f"the app knows no size {size[:40]!r}"
            if reason := files.read_now(name, partial(compiled.other, spec)):
                yield name, reason

    return check

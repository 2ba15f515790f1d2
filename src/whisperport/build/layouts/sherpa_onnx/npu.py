"""Write the graphs that sherpa-onnx runs on NPUs, and compile them for a chip.

The app reads what was compiled, and the tokens. The graphs stay, to be verified and compiled again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whisperport.build.compile.compile_file import compile_file
from whisperport.build.compile.compile_options import CompileOptions
from whisperport.build.compile.lowered_file import READERS
from whisperport.build.layouts.environments import command_of
from whisperport.build.layouts.layout import Compilation, DecodingProfile
from whisperport.build.layouts.onnx_graph.header import read_header
from whisperport.build.layouts.onnx_graph.stored import stored_arrays
from whisperport.build.layouts.reading import Files, Reader
from whisperport.build.layouts.rules import LayoutRule, layout_rule
from whisperport.build.layouts.sherpa_onnx.folder import text_tokens
from whisperport.build.layouts.sherpa_onnx.npu_graphs import (
    DECODER,
    ENCODER,
    Form,
    samples,
    write_decoder,
    write_encoder,
)
from whisperport.errors import AudioError
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

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

GRAPHS = (ENCODER, DECODER)
CLIENT = Path(__file__).with_name("npu_client.py")
PRECISION = "fp16"  # in which a chip computes; the graphs are float32
SAMPLES = 32  # of calibration; as many as the targets of these chips take
WIDTHS = {384: "tiny", 512: "base", 768: "small", 1024: "medium"}  # d -> OpenAI's model
PROFILE = DecodingProfile(
    padding="mel", timestamps=False, suppresses=False, suppresses_at_start=False, windows=False
)  # of both vendors' chips
DROPS = (
    "the app cannot be installed here: its loop, once more in Python, calls the vendor's simulator",
    "ids of special tokens are those of OpenAI's models before large-v3",
    "no timestamps, and no suppressed tokens",
)


def for_one_of(chips: Sequence[str]) -> str:
    """Return a sentence for lists."""
    return f"the files are for one chip: {', '.join(chips)}"


def write(checkpoint: "Checkpoint", form: Form, folder: Path, tokens: str) -> None:
    """Write both graphs, and the tokens to a file of this name."""
    write_encoder(checkpoint, form, folder / ENCODER)
    write_decoder(checkpoint, form, folder / DECODER)
    (folder / tokens).write_text(text_tokens(checkpoint), encoding="ascii")


def compile_graphs(job: Compilation, place: Callable[[Path, Path], None]) -> None:
    """Compile both graphs of a folder for an app's chip, with the compiler in the app's environment.

    Args:
        job: what is compiled.
        place: takes a graph and the file that the compiler wrote, and writes what the app loads.

    Raises:
        AudioError: there is too little audio to calibrate them.
        MissingPackageError: the compiler is not installed.
        LoweringError: it failed.
    """
    (chip,) = job.app.devices
    compiler, command = get_target(chip).compiler, command_of(job.app)
    places = {compiler.toolchain: command[0]} if compiler and command else {}
    is_quantized = job.precision != PRECISION
    with temporary_folder() as scratch:
        if is_quantized:
            _write_samples(job, scratch)
        for name in GRAPHS:
            own = scratch / Path(name).stem
            options = CompileOptions(
                target=chip,
                precision=job.precision,
                inputs=own if is_quantized else None,
                out=own / chip,
                work=own / "work",
                options={f"{chip}.emulate": "0"},  # the simulator runs in the app's loop instead
                toolchains=places,
            )
            result = compile_file(job.folder / name, options)
            place(job.folder / name, result.folder / result.programs[0].file)


def _write_samples(job: Compilation, folder: Path) -> None:
    """Write inputs of both graphs, with which they are calibrated: STEM/NUMBER/INPUT.npy.

    Raises:
        AudioError: there is too little audio.
    """
    begin_stage("making the calibration set")
    dims, generation = job.checkpoint.dims, job.checkpoint.generation
    given = audio_files(job.calibration) if job.calibration else [a.path for a in shipped_audio()]
    known = frozenset(fingerprint(clip.samples) for clip in shipped_clips())
    audio = CalibrationAudio(files=given, seconds=dims.window_s, excluded=known)
    mels = (log_mel(window, dims.n_mels, n_frames=dims.n_frames) for window in audio.windows())
    prompt = start_tokens(generation, job.language, "transcribe")
    n_samples = 0
    for inputs in samples(job.folder, islice(mels, SAMPLES), prompt, generation.end_of_text):
        for name, arrays in zip(GRAPHS, inputs, strict=True):
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


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a vendor's compiler makes of the graphs, in the folder of the app.

    Attributes:
        name: takes a graph's stem and the size; returns the name of its file.
        size: takes that name, and what the graph is; returns the size.
        other: returns how a file differs from what would be compiled of a graph; empty: it does not.
    """

    name: Callable[[str, str], str]
    size: Callable[[str, ProgramSpec], str]
    other: Callable[[ProgramSpec, Path], str]

    def file(self, files: Files, graph: str) -> Path | None:
        """Return the file of a graph, of any size; None: it is missing."""
        pattern = self.name(Path(graph).stem, "*")
        paths = files.path.glob(pattern) if files.path.is_dir() else ()
        return next(iter(sorted(paths)), None)


def reader(compiled: Compiled) -> Reader:
    """Return the reader of folders with the graphs, and with what was compiled of one of them."""

    def recognize(files: Files) -> bool:
        if not all(map(files.has, GRAPHS)) or not any(compiled.file(files, g) for g in GRAPHS):
            return False
        encoder, decoder = (files.read(graph, read_header) for graph in GRAPHS)
        *_, offset, mask = ("", "", *decoder.inputs)
        ends = offset.rpartition("_")[2], mask.rpartition("_")[2]
        return "cross_k_0" in encoder.outputs and ends == ("offset", "mask")

    return Reader(
        recognize,
        lambda _files: [PRECISION],
        lambda files, _precision: stored_arrays(files, GRAPHS),
    )


def rule(compiled: Compiled) -> LayoutRule:
    """Return the rule of the files that were compiled."""

    @layout_rule("WP785", "A file for an NPU is missing, or is not that of the graph beside it")
    def check(files: Files) -> Iterator[tuple[str, str]]:
        """The app loads what was compiled of `encoder.onnx` and `decoder.onnx`. A size in the names of
        files or inputs tells it the ids of special tokens: tiny, base, small or medium, and `.en` if
        English-only.

        What to do: `whisperport convert` with `--chips`.
        """
        for graph in GRAPHS:
            path = compiled.file(files, graph)
            if path is None:
                yield compiled.name(Path(graph).stem, "SIZE"), "the file is missing"
                continue
            spec, _ = files.read(graph, READERS[".onnx"])
            size = compiled.size(path.name, spec)
            if size.removesuffix(".en") not in WIDTHS.values():
                yield path.name, f"the app knows no size {size[:40]!r}"
            if reason := files.read_now(path.name, partial(compiled.other, spec)):
                yield path.name, reason

    return check

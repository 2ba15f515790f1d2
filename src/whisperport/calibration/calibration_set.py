"""Make a program's calibration set on disk, or reuse the existing one if its sources are the same."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.atomic import write_atomic
from whisperport.audio import FRAMES_PER_SECOND
from whisperport.bundle import Bundle
from whisperport.calibration.arrays import array_files, write_arrays
from whisperport.calibration.audio_files import (
    LEVELS,
    CalibrationAudio,
    Floats,
    audio_files,
    fingerprint,
)
from whisperport.calibration.inputs import program_inputs, samples_per_window
from whisperport.calibration.spectrograms import (
    check_spectrograms,
    spectrograms_of,
    stored_spectrograms,
)
from whisperport.errors import AudioError
from whisperport.progress import Progress
from whisperport.spec import ProgramSpec
from whisperport.targets import RunOptions
from whisperport.targets.compiler import CalibrationNeed, Layout
from whisperport.verification.clips import shipped_audio
from whisperport.verification.reference import Reference

MADE_FROM = "calibration.json"  # file in a program's folder: the sources of its calibration set


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """Options of `calibration_set`."""

    # An audio file, a folder of them, or an .npy of spectrograms. None: reuse the existing set, or use the
    # audio files shipped with the package.
    source: Path | None = None
    force: bool = False  # also use silent and narrow-band audio, and too few samples
    run: RunOptions = field(default_factory=RunOptions)  # for the programs that compute the inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSet:
    """A calibration set on disk."""

    arrays: tuple[str, ...]  # file name of each input's array, in the order of the program's inputs
    samples: int  # number of samples in each array


def calibration_set(
    bundle: Bundle,
    spec: ProgramSpec,
    need: CalibrationNeed,
    encoder_layout: Layout,
    folder: Path,
    options: CalibrationOptions,
    progress: Progress,
) -> CalibrationSet:
    """Return the calibration set in a program's folder; make it if it is missing or its sources changed.

    Args:
        bundle: the bundle that holds the program.
        spec: the program to calibrate.
        need: number, names, layout and dtype of the samples that the compiler reads.
        encoder_layout: layout of the encoder's calibration set. An .npy in `options.source` has it too.
        folder: the program's work folder.
        options: the audio to use.
        progress: called with a line for each stage.

    Raises:
        AudioError: audio is missing, or there are too few samples, or none can be used.
    """
    arrays, existing = array_files(need), _existing(folder, spec, need)
    enough = existing and (options.force or existing["samples"] >= need.samples)
    if enough and options.source is None:
        progress(f"{spec.name}: using the existing calibration set")
        return CalibrationSet(arrays=arrays, samples=existing["samples"])
    files = _files(options.source)
    made_from = _json_round_trip(
        {
            "sources": {os.fspath(f): [f.stat().st_size, f.stat().st_mtime_ns] for f in files},
            "spec": spec.to_json(),
            "need": _need_json(spec, need),
            "bundle": bundle.manifest.source,
            "samples": need.samples,
            "force": options.force,
        }
    )
    if existing and existing["from"] == made_from:
        progress(f"{spec.name}: using the existing calibration set")
        return CalibrationSet(arrays=arrays, samples=existing["samples"])
    progress(f"{spec.name}: making the calibration set")
    count = _make(bundle, spec, need, encoder_layout, folder, files, options, progress)
    record = {"from": made_from, "files": list(arrays), "samples": count}
    write_atomic(folder / MADE_FROM, json.dumps(record).encode("utf-8"))
    return CalibrationSet(arrays=arrays, samples=count)


def check_enough(
    spec: ProgramSpec, need: CalibrationNeed, count: int, audio: CalibrationAudio
) -> None:
    """Check that there are as many samples as the compiler reads, or, with `force`, at least one.

    Raises:
        AudioError: there are fewer.
    """
    if count >= need.samples or (audio.force and count):
        return
    skipped = ", ".join(f"{n} {reason}" for reason, n in sorted(audio.skipped.items()))
    windows = need.samples / samples_per_window(spec) / len(LEVELS)
    hours = windows * audio.seconds / 3600
    hints = [
        "give more audio",
        need.fewer_hint,
        "`--force` uses this audio, skipped windows included",
    ]
    raise AudioError(
        f"too little audio to calibrate `{spec.name}`",
        why=f"it gives {count} samples of {audio.seconds:g} s, and {need.samples} samples are needed: "
        f"{hours:.1f} h of audio, of which each window is used at three levels (unchanged, quiet, loud)"
        + (f"; skipped: {skipped}" if skipped else ""),
        hint="; ".join(filter(None, hints)),
    )


def _make(
    bundle: Bundle,
    spec: ProgramSpec,
    need: CalibrationNeed,
    encoder_layout: Layout,
    folder: Path,
    files: Sequence[Path],
    options: CalibrationOptions,
    progress: Progress,
) -> int:
    encoder = bundle.manifest.program("encoder").spec
    audio = _calibration_audio(bundle, files, force=options.force)
    mels: Iterator[Floats]
    if files[0].suffix == ".npy":
        windows = math.ceil(need.samples / samples_per_window(spec))
        check_spectrograms(files[0], encoder, encoder_layout, windows, force=options.force)
        mels = stored_spectrograms(files[0], encoder, encoder_layout)
    else:
        mels = spectrograms_of(audio, encoder)
    samples = program_inputs(bundle, spec, mels, options.run)
    count = write_arrays(samples, spec, need, folder, progress)
    check_enough(spec, need, count, audio)
    return count


def _existing(folder: Path, spec: ProgramSpec, need: CalibrationNeed) -> Any:
    """Return the record of the set in a folder; None if it is missing, incomplete or has other shapes."""
    try:
        record = json.loads((folder / MADE_FROM).read_text(encoding="utf-8"))
        made_from = record["from"]
        fits = made_from["spec"] == spec.to_json() and made_from["need"] == _json_round_trip(
            _need_json(spec, need)
        )
        complete = all((folder / file).is_file() for file in record["files"])
        return record if fits and complete else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _need_json(spec: ProgramSpec, need: CalibrationNeed) -> dict[str, Any]:
    """Return the parts of a need that the arrays depend on, except the number of samples."""
    shapes = [need.layout(np.zeros(tensor.shape, tensor.dtype)).shape for tensor in spec.inputs]
    layout = getattr(need.layout, "__qualname__", "")
    return {"names": need.names, "dtype": need.dtype, "shapes": shapes, "layout": layout}


def _json_round_trip(data: Any) -> Any:
    """Return the data as `json.loads` reads it back, for comparison with a file."""
    return json.loads(json.dumps(data))


def _files(source: Path | None) -> list[Path]:
    if source is None:
        return [recording.path for recording in shipped_audio()]
    return audio_files(source)


def _calibration_audio(bundle: Bundle, files: Sequence[Path], *, force: bool) -> CalibrationAudio:
    """Use windows of the transcriber's length, and exclude the clips of the bundle's reference."""
    window, dims = bundle.manifest.window, bundle.manifest.dims
    frames = 2 * window.audio_positions if window else dims.n_frames
    reference = Reference.from_arrays(bundle.reference())
    return CalibrationAudio(
        files=files,
        seconds=frames / FRAMES_PER_SECOND,
        excluded=frozenset(fingerprint(clip.samples) for clip in reference.clips),
        force=force,
    )

"""A program's calibration set on disk: kept if it was made from the same, else made anew."""

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
from whisperport.calibration.inputs import program_inputs, samples_per_window
from whisperport.calibration.recordings import (
    LOUDNESS,
    Floats,
    Recordings,
    fingerprint,
    recording_files,
)
from whisperport.calibration.spectrograms import (
    check_stored,
    spectrograms_of,
    stored_spectrograms,
)
from whisperport.errors import AudioError
from whisperport.progress import Progress
from whisperport.spec import ProgramSpec
from whisperport.targets import RunOptions
from whisperport.targets.compiler import CalibrationNeed, Layout
from whisperport.verification.clips import shipped_recordings
from whisperport.verification.reference import Reference

MADE_FROM = "calibration.json"  # in a program's folder: what its calibration set was made from


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """What a calibration set is made from."""

    source: Path | None = None  # recordings, or an .npy; None: as before, or those of the package
    force: bool = False  # use too few, silent and narrow-band recordings too
    run: RunOptions = field(default_factory=RunOptions)  # of the programs that compute it


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSet:
    """A set on disk."""

    arrays: tuple[str, ...]  # the file of each input, in the order of the program's inputs
    samples: int


def calibration_set(
    bundle: Bundle,
    spec: ProgramSpec,
    need: CalibrationNeed,
    encoder_layout: Layout,
    folder: Path,
    options: CalibrationOptions,
    progress: Progress,
) -> CalibrationSet:
    """The set that lies in a program's folder, if it was made from the same; else a new one.

    Args:
        encoder_layout: that of spectrograms made elsewhere, which is that of the encoder's own set.

    Raises:
        AudioError: the recordings are missing, too few, or not fit to calibrate with.
    """
    arrays, kept = array_files(need), _kept(folder, spec, need)
    enough = kept and (options.force or kept["samples"] >= need.samples)
    if enough and options.source is None:
        progress(f"{spec.name}: the calibration set is kept")
        return CalibrationSet(arrays=arrays, samples=kept["samples"])
    files = _files(options.source)
    made_from = _plain(
        {
            "sources": {os.fspath(f): [f.stat().st_size, f.stat().st_mtime_ns] for f in files},
            "spec": spec.to_json(),
            "need": _described(spec, need),
            "bundle": bundle.manifest.source,
            "samples": need.samples,
            "force": options.force,
        }
    )
    if kept and kept["from"] == made_from:
        progress(f"{spec.name}: the calibration set is kept")
        return CalibrationSet(arrays=arrays, samples=kept["samples"])
    progress(f"{spec.name}: making the calibration set")
    count = _made(bundle, spec, need, encoder_layout, folder, files, options, progress)
    noted = {"from": made_from, "files": list(arrays), "samples": count}
    write_atomic(folder / MADE_FROM, json.dumps(noted).encode("utf-8"))
    return CalibrationSet(arrays=arrays, samples=count)


def check_enough(
    spec: ProgramSpec, need: CalibrationNeed, count: int, recordings: Recordings
) -> None:
    """Raises AudioError if there are fewer samples than the compiler reads, unless that is forced."""
    if count >= need.samples or (recordings.force and count):
        return
    left_out = ", ".join(f"{n} {reason}" for reason, n in sorted(recordings.left_out.items()))
    windows = need.samples / samples_per_window(spec) / len(LOUDNESS)
    hours = windows * recordings.seconds / 3600
    hints = ["give more recordings", need.fewer_hint, "`--force` uses these, and what was left out"]
    raise AudioError(
        f"too few recordings to calibrate `{spec.name}` with",
        why=f"they make {count} samples of {recordings.seconds:g} s, and {need.samples} are needed: "
        f"{hours:.1f} h of audio, each window being used as recorded, quiet and loud"
        + (f"; left out: {left_out}" if left_out else ""),
        hint="; ".join(filter(None, hints)),
    )


def _made(
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
    recordings = _recordings(bundle, files, force=options.force)
    mels: Iterator[Floats]
    if files[0].suffix == ".npy":
        windows = math.ceil(need.samples / samples_per_window(spec))
        check_stored(files[0], encoder, encoder_layout, windows, force=options.force)
        mels = stored_spectrograms(files[0], encoder, encoder_layout)
    else:
        mels = spectrograms_of(recordings, encoder)
    samples = program_inputs(bundle, spec, mels, options.run)
    count = write_arrays(samples, spec, need, folder, progress)
    check_enough(spec, need, count, recordings)
    return count


def _kept(folder: Path, spec: ProgramSpec, need: CalibrationNeed) -> Any:
    """What is noted of the set in a folder; None if there is none, or a part, or of other shapes."""
    try:
        noted = json.loads((folder / MADE_FROM).read_text(encoding="utf-8"))
        made_from = noted["from"]
        fits = made_from["spec"] == spec.to_json() and made_from["need"] == _plain(
            _described(spec, need)
        )
        return noted if fits and all((folder / file).is_file() for file in noted["files"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _described(spec: ProgramSpec, need: CalibrationNeed) -> dict[str, Any]:
    """What of a need the arrays depend on, besides their number."""
    shapes = [need.layout(np.zeros(tensor.shape, tensor.dtype)).shape for tensor in spec.inputs]
    layout = getattr(need.layout, "__qualname__", "")
    return {"names": need.names, "dtype": need.dtype, "shapes": shapes, "layout": layout}


def _plain(data: Any) -> Any:
    """As it is read back from JSON."""
    return json.loads(json.dumps(data))


def _files(source: Path | None) -> list[Path]:
    if source is None:
        return [recording.path for recording in shipped_recordings()]
    return recording_files(source)


def _recordings(bundle: Bundle, files: Sequence[Path], *, force: bool) -> Recordings:
    """Cut as the transcriber cuts them, without those of the bundle's reference."""
    window, dims = bundle.manifest.window, bundle.manifest.dims
    frames = 2 * window.audio_positions if window else dims.n_frames
    reference = Reference.from_arrays(bundle.reference())
    return Recordings(
        files=files,
        seconds=frames / FRAMES_PER_SECOND,
        apart_from=frozenset(fingerprint(clip.samples) for clip in reference.clips),
        force=force,
    )

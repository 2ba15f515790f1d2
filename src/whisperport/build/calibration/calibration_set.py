"""Make calibration sets of programs on disk, or reuse existing ones if their sources are the same."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.build.calibration.arrays import ArrayWriter, array_files
from whisperport.build.calibration.spectrograms import (
    check_spectrograms,
    spectrograms_of,
    stored_spectrograms,
)
from whisperport.errors import AudioError
from whisperport.program.json_records import to_json
from whisperport.program.spec import ProgramSpec
from whisperport.speech.audio import FRAMES_PER_SECOND
from whisperport.system.atomic import write_atomic
from whisperport.system.progress import begin_stage
from whisperport.targets.compiler import CalibrationNeed, Layout
from whisperport.verification.clips import shipped_audio
from whisperport.verification.recording.audio_files import (
    LEVELS,
    NO_SPEECH,
    CalibrationAudio,
    Floats,
    audio_files,
    fingerprint,
)
from whisperport.verification.recording.bundle_session import BundleSession, ProgramInputs
from whisperport.verification.recording.inputs import samples_per_window

MISLEADING = ("silent", "constant", NO_SPEECH)  # reasons for which audio is skipped
COST = (
    "Measured on a checkpoint with a massive activation, encoder in w8a8: calibrated on silence, 18 of 55 "
    "words were wrong (11 dB); on white noise none, with ranges twice as large; on speech none (22 dB)"
)
MADE_FROM = "calibration.json"  # file in a program's folder: the sources of its calibration set


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """Options of `calibration_sets`."""

    # An audio file, a folder of them, or an .npy of spectrograms. None: reuse the existing set, or use the
    # audio files shipped with the package.
    source: Path | None = None
    force: bool = False  # also use silent and narrow-band audio, and too few samples


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """A program to calibrate.

    Attributes:
        spec: the program.
        need: number, names, layout and dtype of the samples that the compiler reads.
        folder: the program's work folder.
    """

    spec: ProgramSpec
    need: CalibrationNeed
    folder: Path


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """A calibration set on disk."""

    arrays: tuple[str, ...]  # file name of each input's array, in the order of the program's inputs
    samples: int  # number of samples in each array


def calibration_sets(
    session: BundleSession,
    requests: Sequence[CalibrationRequest],
    encoder_layout: Layout,
    options: CalibrationOptions,
) -> dict[str, CalibrationSet]:
    """Return the calibration sets of programs; make those that are missing or whose sources changed.

    The missing sets are made in one pass over the audio: each window is encoded once.

    Args:
        session: of the bundle that holds the programs.
        requests: the programs.
        encoder_layout: layout of the encoder's calibration set. An .npy in `options.source` has it too.
        options: the audio to use.

    Returns:
        Program -> its calibration set.

    Raises:
        AudioError: audio is missing, or there are too few samples, or none can be used.
    """
    sets: dict[str, CalibrationSet] = {}
    missing: list[tuple[CalibrationRequest, Any]] = []
    files: list[Path] = []
    for request in requests:
        name, need = request.spec.name, request.need
        existing = _existing(request)
        enough = existing and (options.force or existing["samples"] >= need.samples)
        made_from = None  # of an existing set that is used whatever it was made from
        if not enough or options.source is not None:
            files = files or _files(options.source)
            made_from = _made_from(session, request, files, options)
        if existing and made_from in (None, existing["from"]):
            begin_stage(f"{name}: using the existing calibration set")
            sets[name] = CalibrationSet(arrays=array_files(need), samples=existing["samples"])
        else:
            missing.append((request, made_from))
    if missing:
        missing_requests = [request for request, _ in missing]
        counts, audio = _make(session, missing_requests, encoder_layout, files, options)
        for (request, made_from), count in zip(missing, counts, strict=True):
            check_enough(request.spec, request.need, count, audio)
            arrays = array_files(request.need)
            record = {"from": made_from, "files": list(arrays), "samples": count}
            write_atomic(request.folder / MADE_FROM, json.dumps(record).encode("utf-8"))
            sets[request.spec.name] = CalibrationSet(arrays=arrays, samples=count)
    return sets


def check_enough(
    spec: ProgramSpec, need: CalibrationNeed, count: int, audio: CalibrationAudio
) -> None:
    """Check that there are as many samples as the compiler reads, or, with `force`, at least one.

    Raises:
        AudioError: there are fewer.
    """
    if count >= need.samples or (audio.force and count):
        return
    windows = need.samples / samples_per_window(spec) / len(LEVELS)
    hours = windows * audio.seconds / 3600
    hints = [
        "give more audio",
        need.fewer_hint,
        "`--force` of `compile` uses this audio, skipped windows included",
    ]
    raise AudioError(
        f"too little audio to calibrate `{spec.name}`",
        why=f"it gives {count} samples of {audio.seconds:g} s, and {need.samples} samples are needed: "
        f"{hours:.1f} h of audio, of which each window is used at three levels (unchanged, quiet, loud)"
        + (f"; skipped: {audio.faults}" if audio.skipped else "")
        + ("" if audio.skipped.keys().isdisjoint(MISLEADING) else f". {COST}"),
        hint="; ".join(filter(None, hints)),
    )


def _make(
    session: BundleSession,
    requests: Sequence[CalibrationRequest],
    encoder_layout: Layout,
    files: Sequence[Path],
    options: CalibrationOptions,
) -> tuple[list[int], CalibrationAudio]:
    """Make calibration sets in one pass. Returns the number of samples of each, and the audio."""
    begin_stage(f"{', '.join(r.spec.name for r in requests)}: making the calibration set")
    encoder = session.bundle.manifest.program("encoder").spec
    audio = _calibration_audio(session, files, force=options.force)
    mels: Iterator[Floats]
    if files[0].suffix == ".npy":
        windows = max(math.ceil(r.need.samples / samples_per_window(r.spec)) for r in requests)
        check_spectrograms(files[0], encoder, encoder_layout, windows, force=options.force)
        mels = stored_spectrograms(files[0], encoder, encoder_layout)
    else:
        mels = spectrograms_of(audio, encoder)
    makers = [
        (ProgramInputs(session, r.spec), ArrayWriter(r.spec, r.need, r.folder)) for r in requests
    ]
    for mel in mels:
        unfinished = [(inputs, writer) for inputs, writer in makers if not writer.is_full]
        for inputs, writer in unfinished:
            writer.add(inputs.record(mel))
        if all(writer.is_full for _, writer in unfinished):
            break
    if audio.skipped:
        begin_stage(f"skipped of the calibration audio: {audio.faults}")
    return [writer.close() for _, writer in makers], audio


def _made_from(
    session: BundleSession,
    request: CalibrationRequest,
    files: Sequence[Path],
    options: CalibrationOptions,
) -> Any:
    """Return what a calibration set is made from, as JSON."""
    return _json_round_trip(
        {
            "sources": {os.fspath(f): [f.stat().st_size, f.stat().st_mtime_ns] for f in files},
            "spec": to_json(request.spec),
            "need": _need_json(request.spec, request.need),
            "bundle": session.bundle.manifest.source,
            "samples": request.need.samples,
            "force": options.force,
        }
    )


def _existing(request: CalibrationRequest) -> Any:
    """Return the record of the set in a folder; None if it is missing, incomplete or has other shapes."""
    spec, need, folder = request.spec, request.need, request.folder
    try:
        record = json.loads((folder / MADE_FROM).read_text(encoding="utf-8"))
        made_from = record["from"]
        fits = made_from["spec"] == to_json(spec) and made_from["need"] == _json_round_trip(
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


def _calibration_audio(
    session: BundleSession, files: Sequence[Path], *, force: bool
) -> CalibrationAudio:
    """Use windows of the transcriber's length, and exclude the clips of the bundle's reference."""
    window, dims = session.bundle.manifest.window, session.bundle.manifest.dims
    frames = 2 * window.audio_positions if window else dims.n_frames
    return CalibrationAudio(
        files=files,
        seconds=frames / FRAMES_PER_SECOND,
        excluded=frozenset(fingerprint(clip.samples) for clip in session.reference.clips),
        force=force,
    )

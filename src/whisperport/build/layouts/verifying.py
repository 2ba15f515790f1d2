"""Verify files in their app: what it returns for clips is what the checkpoint emits in eager torch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whisperport.build.layouts import layout_of
from whisperport.build.layouts.checks import checks_of, doubt
from whisperport.build.layouts.client import ClientRun, run_client
from whisperport.build.layouts.exact import check_graphs, check_weights
from whisperport.build.layouts.layout import App, Layout
from whisperport.build.layouts.record import (
    KnownClip,
    LayoutRecord,
    Verification,
    check_name,
    read_record,
    record_path,
    write_record,
)
from whisperport.build.layouts.reference import Emitted
from whisperport.errors import AudioError, BundleError, MissingPackageError, VerificationError
from whisperport.program.checks import Check
from whisperport.speech.audio import SAMPLE_RATE, load_audio
from whisperport.speech.audio.pcm import to_int16
from whisperport.system.progress import begin_stage
from whisperport.verification.clips import Clip, clips_in, shipped_audio, shipped_clips
from whisperport.verification.evidence import today
from whisperport.verification.machine import machine

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class ClipSet:
    """The clips of a verification, and where they come from.

    Attributes:
        clips: the first window of each, rounded to 16 bits, as a WAV file has them.
        paths: of each: a file of the user, or empty for a clip that came with whisperport.
    """

    clips: tuple[Clip, ...]
    paths: tuple[str, ...]

    @classmethod
    def of(cls, folder: Path | None, language: str, window_s: float) -> "ClipSet":
        """Read the audio files in a folder; None: those that come with whisperport.

        Raises:
            AudioError: a file cannot be read, or there is none.
            UsageError: a file's name is not UTF-8.
        """
        clips = shipped_clips() if folder is None else clips_in(folder, language)
        paths = ["" if folder is None else os.path.abspath(folder / clip.name) for clip in clips]
        for path in paths:
            check_name(path)
        return cls(tuple(_first_window(clip, language, window_s) for clip in clips), tuple(paths))

    @property
    def digests(self) -> tuple[str, ...]:
        """SHA-256 of the samples of each."""
        return tuple(map(_digest, self.clips))

    def known(self, expected: Sequence[Emitted]) -> tuple[KnownClip, ...]:
        """Return what a record keeps of them; of results that are not known, nothing."""
        return tuple(
            KnownClip(clip.name, path, clip.text, _digest(clip), emitted)
            for clip, path, emitted in zip(self.clips, self.paths, expected, strict=bool(expected))
        )


def run_and_compare(
    app: App, path: Path, record: LayoutRecord, clips: Sequence[Clip], expected: Sequence[Emitted]
) -> tuple[ClientRun, Verification]:
    """Run the app on clips, and compare what it returns with what is expected.

    Raises:
        MissingPackageError, VerificationError: see `run_client`.
    """
    checks: list[Check] = []
    versions: dict[str, str] = {}
    for device in app.devices:
        on = f" on {device}" if device else ""
        begin_stage(f"running {app.name}{on} with {len(clips)} clips")
        how = (record.precision, record.language, device)
        run = run_client(app, path, clips, *how, words=any(emitted.words for emitted in expected))
        versions |= run.versions
        compared = (app, record.precision, clips, expected, run.results)
        checks += checks_of(*compared, exact=record.exact, device=device)
        if why := record.difference(path):
            raise VerificationError(f"{app.name} changed the files when it ran", why=why)
    verification = Verification(
        versions=versions, machine=machine(), date=today(), checks=tuple(checks)
    )
    return run, verification


def compare_without_app(
    layout: Layout,
    path: Path,
    record: LayoutRecord,
    clips: Sequence[Clip],
    checkpoint: "Checkpoint | None" = None,
) -> LayoutRecord:
    """Return a record with the comparisons of the files themselves.

    Args:
        layout: of the files.
        path: of the files.
        record: what is known of them.
        clips: those of the record.
        checkpoint: None: weights, which have not changed since, are not compared again.
    """
    begin_stage("comparing the files with the checkpoint")
    exact = record.exact
    if record.logits is not None:
        known, window_s = record.logits, record.window_s
        try:
            check = check_graphs(
                layout, path, record.precision, known, clips, window_s, exact=exact
            )
        except MissingPackageError as error:
            return replace(record, without_app=(), not_compared=str(error.what))
    elif checkpoint is not None:
        check = check_weights(layout, path, checkpoint, exact=exact)
    else:
        return record
    return replace(record, without_app=(check,), not_compared="")


def doubt_of(record: LayoutRecord) -> str:
    """Return why the results of the clips show little; empty: they show what they must."""
    texts = [(clip.expected.text, clip.text) for clip in record.clips]
    return doubt(record.language, texts)


def verify_layout(path: str | os.PathLike[str], *, record: bool = False) -> LayoutRecord:
    """Verify files again: that none has changed, and that the app still returns what it must.

    Args:
        path: of a folder or file that `convert` wrote.
        record: whether the result is written to the record of the files.

    Returns:
        The record with a new verification.

    Raises:
        BundleError: the record is missing or damaged, a file is missing or has changed, or a clip of the
            user has.
        MissingPackageError: the app is not installed.
        VerificationError: the app failed.
    """
    path = Path(path)
    known = read_record(record_path(path))
    layout = layout_of(known.app)
    if why := known.difference(path):
        raise BundleError(
            f"{path} is not what whisperport wrote",
            why=why,
            hint="write the files again with `whisperport convert`",
        )
    if not known.clips:
        raise BundleError(
            f"{path} cannot be verified",
            why="it was written without its app, so there are no results to compare with",
            hint=f"whisperport apps --install {known.app}\nand write the files again",
        )
    clips = [_clip_again(clip, known) for clip in known.clips]
    verified = compare_without_app(layout, path, known, clips)
    expected = [clip.expected for clip in known.clips]
    app = layout.apps[known.app].on(known.chip)
    _, verification = run_and_compare(app, path, verified, clips, expected)
    verified = replace(verified, verification=verification)
    if record:
        write_record(record_path(path), verified)
    return verified


def _first_window(clip: Clip, language: str, window_s: float) -> Clip:
    samples = to_int16(clip.samples[: round(window_s * SAMPLE_RATE)])
    rounded = samples.astype(np.float32) / np.float32(32768)
    return replace(clip, samples=rounded, language=language)


def _digest(clip: Clip) -> str:
    return sha256(clip.samples.tobytes()).hexdigest()


def _clip_again(known: KnownClip, record: LayoutRecord) -> Clip:
    """Read a clip again.

    Raises:
        BundleError: its file is missing, or its audio has changed.
    """
    try:
        shipped = (file.path for file in shipped_audio() if file.path.name == known.name)
        samples = load_audio(known.path or next(shipped))
    except (AudioError, StopIteration) as error:
        raise _lost(known, str(error) or "whisperport no longer has this clip") from error
    clip = _first_window(Clip(known.name, known.text, samples), record.language, record.window_s)
    if _digest(clip) != known.sha256:
        raise _lost(known, "its audio has changed")
    return clip


def _lost(known: KnownClip, why: str) -> BundleError:
    return BundleError(
        f"the clip {known.path or known.name} of the verification cannot be used",
        why=why,
        hint="write the files again with `whisperport convert`",
    )

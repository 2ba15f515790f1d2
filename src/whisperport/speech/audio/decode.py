"""Decode audio files with FFmpeg's libraries (PyAV), one piece in memory at a time.

This module opens the files and passes open objects to FFmpeg, not names, and FFmpeg may open nothing else.
So a playlist with the name of an audio file cannot reach other files or the network.
"""

import codecs
import os
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream as AvAudioStream
from av.container import InputContainer
from av.error import FFmpegError
from numpy.typing import NDArray

from whisperport.errors import AudioError
from whisperport.speech.audio.callback_file import CallbackFile, ReopenedFile, is_seekable
from whisperport.speech.audio.downmix import Downmix
from whisperport.speech.audio.pcm import (
    MAX_FLOAT_PEAK,
    MIN_SAMPLES,
    SAMPLE_RATE,
    check_length,
    check_rate,
)
from whisperport.system.printable import is_printable

# Formats whose header states a length; for others FFmpeg estimates it, or reads it from the last page.
_HEADER_HAS_LENGTH = {"w64", "aiff", "flac", "mp3", "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}
_MISSING_S = 0.5  # seconds; a file that ends this much earlier than its header states was cut off
_RIFF_UNKNOWN = 0x7FFF_F000  # recorders write such sizes while the size is unknown
# FFmpeg looks for DTS in the samples of every 16-bit wav file, and reads 2 KB at a time. DTS is never mono.
_MONO_WAV_OPTIONS = {"probesize": "4096", "max_size": "8192"}
# PyAV below 19 fails for tags that are not UTF-8, unless told otherwise. 19 has no such argument.
_TAGS: dict[str, Any] = (
    {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
)


class DamagedAudioWarning(UserWarning):
    """Part of the audio could not be decoded. The rest is used."""


class ClippedAudioWarning(UserWarning):
    """Float samples are far outside [-1, 1]: they may be integers that were not scaled."""


class AudioDecoder:
    """Decodes one audio file. Use it in a `with` block, or call `close()`.

    FFmpeg mixes down and resamples to 16-bit mono at 16 kHz, as openai-whisper's command
    `ffmpeg -ac 1 -ar 16000 -f s16le` does. Differences from that command, measured with FFmpeg 5.1 (PyAV 18
    contains 8.1) for mono and stereo at 8 to 48 kHz, in steps of 16 bits:

        float wav, 24-bit wav, mp3   equal
        ogg, opus, m4a               at most 1
        16-bit wav, flac             equal at 16 kHz; at most 4 (mean 0.7) if resampled

    Opus in webm with a header rate below 48 kHz keeps 5 ms of its lead-in. If FFmpeg does not know the
    layout of the channels, such as 64 channels of a microphone array, the channels are averaged.

    Args:
        source: a path, "-" for standard input, a binary file object, or a file that can be reopened.

    Raises:
        AudioError: the source is missing, is not a file, or has no audio that FFmpeg can read.
    """

    def __init__(self, source: str | os.PathLike[str] | BinaryIO | ReopenedFile) -> None:
        self._file, self.name, self._must_close = open_source(source)
        self._container: InputContainer | None = None
        try:
            self._callbacks = CallbackFile(self._file)
            self._container, self._stream = _probed(self._file, self._callbacks, self.name)
        except BaseException:
            self.close()
            raise

    @property
    def duration_s(self) -> float | None:
        """Duration that the container states, in seconds; None if it states none (a pipe, raw mp3)."""
        if self._stream.duration is not None and self._stream.time_base is not None:
            seconds = float(self._stream.duration * self._stream.time_base)
        elif self._container is not None and self._container.duration is not None:
            seconds = self._container.duration / av.time_base
        else:
            return None
        return seconds if seconds > 0 else None

    @property
    def sample_rate(self) -> int:
        """Sample rate of the file in Hz, 0 if it states none. `pieces` always returns 16 kHz."""
        return int(self._stream.rate or 0)

    def pieces(self, piece_s: float = 1.0) -> Iterator[NDArray[np.float32]]:
        """Yield the samples in order, (n,) float32, mono, 16 kHz, within [-1, 1].

        Args:
            piece_s: minimum duration of a piece in seconds; the last piece may be shorter.

        Warns:
            DamagedAudioWarning: packets cannot be decoded, or the file ends before the stated duration.
            ClippedAudioWarning: float samples exceed 2 in magnitude. Samples beyond 1 are clipped.

        Raises:
            AudioError: nothing can be decoded, a float file contains a NaN or an infinity, or there are
                fewer samples than one mel frame (10 ms).
        """
        n_samples, waiting, n_waiting = 0, [], 0
        for samples in self._resampled():
            waiting.append(samples)
            n_waiting += samples.size
            if n_waiting >= piece_s * SAMPLE_RATE:
                n_samples += n_waiting
                yield np.concatenate(waiting).astype(np.float32) / np.float32(32768.0)
                waiting, n_waiting = [], 0
        n_samples += n_waiting
        if n_samples < MIN_SAMPLES:
            check_length(n_samples, self.name)
        self._warn_if_cut(n_samples)
        if waiting:
            yield np.concatenate(waiting).astype(np.float32) / np.float32(32768.0)

    def close(self) -> None:
        """Close the file, unless the caller opened it. May be called several times."""
        if self._container is not None:
            self._container.close()
        if self._must_close:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _resampled(self) -> Iterator[NDArray[np.int16]]:
        """Yield samples (n,) int16 at 16 kHz. A change of rate or layout starts a new resampler."""
        downmix, key = Downmix(), None
        for frame in self._frames():
            frame_key = (frame.format.name, frame.layout.name, frame.sample_rate)
            if frame_key != key:
                if key is not None:
                    yield from downmix.push(None)
                check_rate(frame.sample_rate, self.name)
                downmix, key = Downmix(), frame_key
            try:
                yield from downmix.push(frame)
            except (FFmpegError, ValueError) as error:
                raise AudioError(
                    f"{self.name} cannot be mixed down to mono",
                    why=f"{_reason(error)}; its channels are: {frame.layout.name}",
                    hint="mix it down with another tool, e.g. `ffmpeg -i IN -ac 1 OUT.wav`",
                    code="unsupported",
                ) from error
        if key is not None:
            yield from downmix.push(None)

    def _frames(self) -> Iterator[AudioFrame]:
        """Yield decoded frames. Damaged packets are skipped, as by the `ffmpeg` command."""
        n_bad, n_good, last, peak = 0, 0, "", 0.0
        packets = self._container.demux(self._stream) if self._container else iter(())
        while True:
            try:
                with self._callbacks.calls():
                    packet = next(packets, None)
            except (FFmpegError, OSError, ValueError) as error:
                n_bad, last, packet = n_bad + 1, _reason(error), None
            if packet is None:
                break
            try:
                frames = packet.decode()
            except (FFmpegError, ValueError) as error:
                n_bad, last = n_bad + 1, _reason(error)
                continue
            for frame in frames:
                assert isinstance(frame, AudioFrame)
                peak = max(peak, _checked_peak(frame, self.name))
                n_good += 1
                yield frame
        if n_bad and not n_good:
            raise AudioError(
                f"nothing in {self.name} can be decoded",
                why=last,
                hint=_convert_hint(self._file),
                code="damaged",
            )
        if n_bad:
            warnings.warn(
                f"{self.name}: {n_bad} damaged part{'s' * (n_bad > 1)} skipped ({last})",
                DamagedAudioWarning,
                stacklevel=2,
            )
        # The decoded peak of compressed audio is not the peak of the original samples.
        if peak > MAX_FLOAT_PEAK and self._stream.codec_context.name.startswith("pcm"):
            warnings.warn(
                f"{self.name} has samples up to {peak:g}, clipped at 1: they may be unscaled integers",
                ClippedAudioWarning,
                stacklevel=2,
            )

    def _warn_if_cut(self, n_samples: int) -> None:
        """Warn if the file ends before the length that its header states."""
        format_name = self._container.format.name if self._container else ""
        stated_s, decoded_s = self.duration_s, n_samples / SAMPLE_RATE
        if format_name == "wav" and (n_missing := _missing_riff_bytes(self._file)) > 0:
            lost = f"its header states {n_missing} bytes more than it has"
        elif (
            format_name in _HEADER_HAS_LENGTH
            and stated_s is not None
            and decoded_s < stated_s - _MISSING_S
        ):
            lost = f"its header states {stated_s:.1f} s"
        else:
            return
        warnings.warn(
            f"{self.name} is incomplete: {lost}; {decoded_s:.1f} s could be decoded",
            DamagedAudioWarning,
            stacklevel=2,
        )


def open_source(
    source: str | os.PathLike[str] | BinaryIO | ReopenedFile,
) -> tuple[BinaryIO, str, bool]:
    """Open a source.

    Returns:
        The open file, its name for messages, and whether the caller must close it.
    """
    if isinstance(source, ReopenedFile):
        return source.reopen(), "the audio file", True
    if isinstance(source, str) and source == "-":
        if sys.stdin is None:  # closed before Python began
            raise AudioError("standard input is closed", hint="give a file or a pipe")
        if sys.stdin.isatty():
            raise AudioError(
                "standard input is a terminal",
                why="`-` reads audio from a pipe",
                hint="e.g. `arecord -f S16_LE -r 16000 | whisperport transcribe -`",
            )
        # Unbuffered if possible: a pipe then returns the data that is there, instead of waiting for more.
        stdin: BinaryIO = getattr(sys.stdin.buffer, "raw", sys.stdin.buffer)
        return stdin, "standard input", False
    if not isinstance(source, str | os.PathLike):
        if not callable(getattr(source, "read", None)) or not isinstance(source.read(0), bytes):
            raise AudioError(
                f"cannot read audio from an object of type {type(source).__name__}",
                why="expected a path, `-`, a file opened in binary mode, or a numpy array",
                hint="convert it to one of these",
            )
        name = getattr(source, "name", None)
        return source, f"`{name}`" if isinstance(name, str) else "the file object", False
    if not os.fspath(source):  # `Path("")` is the current folder
        raise AudioError("the path of the audio file is empty", hint="give one file, e.g. talk.wav")
    path = Path(source)
    name = (
        f"`{os.fspath(source)}`"  # as it was typed: `Path` removes the second slash of an address
    )
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise AudioError(
                f"{name} is a folder, not an audio file",
                hint="give the audio files in it one by one",
                code="not-a-file",
            )
        # A pipe is opened unbuffered, so that it returns the data that is there instead of waiting for
        # more.
        file = path.open("rb", buffering=-1 if stat.S_ISREG(mode) else 0)
    except FileNotFoundError as error:
        if "://" in os.fspath(source):
            raise AudioError(
                f"{name} is an address, not a file",
                why="audio is not downloaded",
                hint="download it first, and give the file",
                code="missing",
            ) from error
        raise AudioError(f"{name} does not exist", hint="check the path", code="missing") from error
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise AudioError(
            f"cannot open {name}",
            why=_reason(error),
            hint="check the path and its permissions",
            code="unreadable",
        ) from error
    if stat.S_ISREG(mode) and path.stat().st_size == 0:
        file.close()
        raise AudioError(
            f"{name} is empty",
            why="it has 0 bytes",
            hint="record or copy it again",
            code="empty",
        )
    return file, name, True


def _probed(
    file: BinaryIO, callbacks: CallbackFile, name: str
) -> tuple[InputContainer, AvAudioStream]:
    try:
        options = _MONO_WAV_OPTIONS if _is_mono_wav(file) else {}
        with callbacks.calls():
            container = av.open(
                callbacks,
                mode="r",
                # No protocol has this name, so nothing the file refers to is opened.
                container_options={"protocol_whitelist": "none", **options},
                **_TAGS,
            )
    except (FFmpegError, OSError, ValueError) as error:
        if text := _text_at_start(file):
            raise AudioError(
                f"{name} is not an audio file",
                why=f"it is a text, which begins with `{text}`",
                hint="give an audio or video file; a download that failed often leaves an error page",
                code="not-audio",
            ) from error
        raise AudioError(
            f"{name} is not an audio file that FFmpeg can read",
            why=_reason(error),
            hint=_convert_hint(file),
            code="not-audio",
        ) from error
    stream = container.streams.best("audio")
    if not isinstance(stream, AvAudioStream):
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        container.close()
        raise AudioError(
            f"{name} contains no audio that can be decoded",
            why=f"FFmpeg found these streams in it: {kinds}",
            hint="give a file that contains audio",
            code="not-audio",
        )
    return container, stream


def _text_at_start(file: BinaryIO) -> str:
    """Return the first line of a text file, up to 40 characters; "" if it is no text, or is a pipe."""
    if not is_seekable(file):
        return ""
    file.seek(0)
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(file.read(512)).strip()
    except UnicodeDecodeError:
        return ""
    return text.splitlines()[0][:40] if text and is_printable("".join(text.split())) else ""


def _is_mono_wav(file: BinaryIO) -> bool:
    """Return whether a file is a wav file of 16-bit mono samples; False for a pipe, which is not read."""
    if not is_seekable(file):
        return False
    start = file.tell()
    head = file.read(36)
    file.seek(start)
    pcm, mono, bits = head[20:22], head[22:24], head[34:36]
    return (head[:4], head[8:16], pcm, mono, bits) == (
        b"RIFF",
        b"WAVEfmt ",
        b"\x01\x00",
        b"\x01\x00",
        b"\x10\x00",
    )


def _missing_riff_bytes(file: BinaryIO) -> int:
    """Return how many bytes a wav file lacks; FFmpeg reports the length of the existing part."""
    if not is_seekable(file):
        return 0
    file.seek(0)
    header = file.read(8)
    stated = int.from_bytes(header[4:8], "little")
    if header[:4] != b"RIFF" or stated >= _RIFF_UNKNOWN:
        return 0
    return stated + 8 - file.seek(0, os.SEEK_END)


def _checked_peak(frame: AudioFrame, name: str) -> float:
    """Return the largest magnitude of float samples, 0 for integers.

    Raises:
        AudioError: there is a NaN or an infinity.
    """
    if frame.format.name[:3] not in ("flt", "dbl"):
        return 0.0
    # Checked before the conversion, which turns a NaN into an arbitrary 16-bit number.
    peak = float(np.abs(frame.to_ndarray()).max(initial=0.0))
    if not np.isfinite(peak):
        raise AudioError(
            f"{name} contains a NaN or an infinity",
            why="audio samples must be finite numbers",
            hint="write it again with 16-bit samples, e.g. with `ffmpeg -c:a pcm_s16le`",
            code="not-finite",
        )
    return peak


def _convert_hint(file: BinaryIO) -> str:
    """Return the hint for a file that FFmpeg cannot read."""
    if is_seekable(file):
        return "convert it, e.g. `ffmpeg -i IN -ac 1 -ar 16000 OUT.wav`"
    return "save it to a file first: formats with an index at the end (m4a, mp4) cannot be read from a pipe"


def _reason(error: Exception) -> str:
    """Return the text of an error without its number and file name."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

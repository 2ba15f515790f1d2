"""Transcribe a recording with a bundle: windows in a row, each decoded greedily."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from whisperport.audio import SAMPLE_RATE, AudioSource, AudioStream, log_mel
from whisperport.bundle import Bundle
from whisperport.errors import BundleError
from whisperport.runtime import Decoded, DecodeOptions, Engine, decode_greedy, load_engine
from whisperport.targets import RunOptions
from whisperport.text import Segment, Tokenizer

Heard = Callable[[float, float | None], None]
"""Told how many seconds were transcribed, and of how many where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscribeOptions:
    """How a recording is transcribed; defaults are openai-whisper's."""

    decode: DecodeOptions = field(default_factory=DecodeOptions)
    run: RunOptions = field(default_factory=RunOptions)
    no_speech_threshold: float = 0.6  # a window above it, and unsure of its words, is silence
    logprob_threshold: float = -1.0  # average per token; at or below it the words are unsure


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said in a recording."""

    text: str
    segments: tuple[Segment, ...]  # one for each window with speech
    language: str
    duration_s: float
    truncated: tuple[float, ...]  # starts of windows that met the token limit, in seconds


class Transcriber:
    """A loaded bundle. Load once, transcribe many recordings; none leaves a trace in the next.

    Raises:
        BundleError: the bundle is damaged or missing.
        MissingPackageError: a target's runtime is not installed.
    """

    def __init__(
        self, bundle: Bundle | str | os.PathLike[str] | None = None, run: RunOptions | None = None
    ) -> None:
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle or default_bundle())
        self.bundle = opened
        self.engine: Engine = load_engine(opened, run)
        self._tokenizer = Tokenizer.from_json(opened.tokenizer_json(), self.engine.generation)

    def transcribe(
        self,
        source: AudioSource,
        options: TranscribeOptions | None = None,
        *,
        sample_rate: int | None = None,
        progress: Heard = lambda _done, _of: None,
    ) -> Transcript:
        """Transcribe a recording of any length, one window in memory at a time.

        Args:
            source: a path, "-" for standard input, a binary file object, or an array of samples.
            sample_rate: of an array, in Hz; None: 16 kHz.
            progress: called after every window.

        Raises:
            AudioError: the sound is missing, unreadable, empty, or not numbers.
            UsageError: the checkpoint has no such language or task.
        """
        options = options or TranscribeOptions()
        window = round(self.engine.dims.window_s * SAMPLE_RATE)
        segments: list[Segment] = []
        truncated: list[float] = []
        language, start, seconds = options.decode.language, 0, 0.0
        with AudioStream(source, sample_rate=sample_rate, look_back_s=0.0) as stream:
            while (samples := stream.read(start, window)).size:
                dims, begin = self.engine.dims, start / SAMPLE_RATE
                features = self.engine.encode(log_mel(samples, dims.n_mels, n_frames=dims.n_frames))
                decode = DecodeOptions(
                    language=language,
                    task=options.decode.task,
                    max_tokens=options.decode.max_tokens,
                )
                decoded = decode_greedy(self.engine, features, decode)
                language = decoded.language  # as in the original, the first window decides
                seconds = begin + samples.size / SAMPLE_RATE
                if not _is_silence(decoded, options):
                    segments.append(self._segment(decoded, begin, seconds))
                    if not decoded.ended:
                        truncated.append(begin)
                start += window
                progress(seconds, stream.duration_s)
        text = "".join(segment.text for segment in segments).strip()
        return Transcript(text, tuple(segments), language or "", seconds, tuple(truncated))

    def _segment(self, decoded: Decoded, start: float, end: float) -> Segment:
        return Segment(
            start=start,
            end=end,
            text=self._tokenizer.decode(decoded.tokens),
            tokens=decoded.tokens,
            avg_logprob=decoded.avg_logprob,
            no_speech_prob=decoded.no_speech_prob,
        )


def _is_silence(decoded: Decoded, options: TranscribeOptions) -> bool:
    """openai-whisper's rule: the no-speech token is probable, and the words are not."""
    return (
        decoded.no_speech_prob > options.no_speech_threshold
        and decoded.avg_logprob <= options.logprob_threshold
    )


def transcribe(
    source: AudioSource,
    bundle: Bundle | str | os.PathLike[str] | None = None,
    options: TranscribeOptions | None = None,
    *,
    sample_rate: int | None = None,
    progress: Heard = lambda _done, _of: None,
) -> Transcript:
    """Transcribe one recording; see `Transcriber.transcribe`.

    Args:
        bundle: None: the embedded default model (English commands, numbers, times, names).
    """
    run = options.run if options else None
    return Transcriber(bundle, run).transcribe(
        source, options, sample_rate=sample_rate, progress=progress
    )


def default_bundle() -> Path:
    """The folder of the bundle that comes with the package.

    Raises:
        BundleError: this copy of the package was built without it.
    """
    folder = Path(str(files("whisperport"))) / "data" / "bundle"
    if not folder.is_dir():
        raise BundleError(
            "this copy of whisperport has no default bundle",
            hint="give one with `--bundle DIR`, or install the package again",
        )
    return folder

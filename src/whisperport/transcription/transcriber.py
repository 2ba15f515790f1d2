"""Transcribe recordings with a loaded bundle."""

import os
from importlib.resources import files
from pathlib import Path

from whisperport.audio import AudioSource, AudioStream, RecordingMel
from whisperport.audio.recording import can_be_read_twice
from whisperport.bundle import Bundle
from whisperport.errors import BundleError, UsageError
from whisperport.runtime import Around, Draw, Engine, load_engine
from whisperport.targets import RunOptions
from whisperport.text import Tokenizer
from whisperport.transcription.chunked import ChunkedTranscription
from whisperport.transcription.options import TranscribeOptions
from whisperport.transcription.session import Session, clip_frames
from whisperport.transcription.transcript import Heard, Transcript


class Transcriber:
    """A loaded bundle. Load once, transcribe many recordings; none leaves a trace in the next.

    Args:
        bundle: None: the embedded default model.
        around: given every runner, returns the one to use, such as one that times it.

    Raises:
        BundleError: the bundle is damaged or missing.
        MissingPackageError: a target's runtime is not installed.
    """

    def __init__(
        self,
        bundle: Bundle | str | os.PathLike[str] | None = None,
        run: RunOptions | None = None,
        *,
        around: Around = lambda runner: runner,
    ) -> None:
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle or default_bundle())
        self.bundle = opened
        self.engine: Engine = load_engine(opened, run, around)
        self.tokenizer = Tokenizer.from_json(opened.tokenizer_json(), self.engine.generation)

    def transcribe(
        self,
        source: AudioSource,
        options: TranscribeOptions | None = None,
        *,
        sample_rate: int | None = None,
        progress: Heard = lambda _done, _of: None,
        draw: Draw | None = None,
    ) -> Transcript:
        """Transcribe a recording of any length, one window in memory at a time.

        Args:
            source: a path, "-" for standard input, a binary file object, or an array of samples.
            sample_rate: of an array, in Hz; None: 16 kHz.
            progress: called after every window, or chunk.
            draw: chooses tokens at temperatures above 0; None: numpy, seeded by the sound.

        Raises:
            AudioError: the sound is missing, unreadable, empty, or not numbers.
            UsageError: the checkpoint has no such language or task, or chunks are wanted of sound
                that can be heard only once.
        """
        options = options or TranscribeOptions()
        if options.vad is not None and not can_be_read_twice(source):
            raise UsageError(
                "cannot cut standard input or a stream into chunks",
                why="speech is looked for ahead of what is transcribed, so the sound is read twice",
                hint="save it to a file first, or transcribe it without `vad`",
            )
        dims = self.engine.dims
        mel = RecordingMel(source, dims.n_mels, dims.n_frames, sample_rate=sample_rate)
        try:
            if options.vad is None:
                return self.transcribe_mel(mel, options, progress=progress, draw=draw)
            chunked = ChunkedTranscription(self.engine, self.tokenizer, options, options.vad, draw)
            with AudioStream(source, sample_rate=sample_rate, look_back_s=0) as stream:
                return chunked.run(stream, mel, progress)
        finally:
            mel.close()

    def transcribe_mel(
        self,
        mel: RecordingMel,
        options: TranscribeOptions | None = None,
        *,
        progress: Heard = lambda _done, _of: None,
        draw: Draw | None = None,
    ) -> Transcript:
        """As `transcribe`, of a spectrogram that the caller opened for this model, and closes.

        Raises:
            UsageError: chunks are wanted, for which the sound itself is needed.
        """
        options = options or TranscribeOptions()
        if options.vad is not None:
            raise UsageError("cannot look for speech in a spectrogram", hint="use `transcribe`")
        parts = clip_frames(options.clips)
        return Session(self.engine, self.tokenizer, options, mel, draw, parts).run(progress)


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

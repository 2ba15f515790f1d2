"""Transcribe audio with a loaded bundle.

`TranscribeArguments` are openai-whisper's argument names.
"""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from threading import Condition, Lock
from typing import Any, TypedDict, Unpack

from whisperport.build.export.bundle_cache import open_bundle
from whisperport.errors import UsageError
from whisperport.program.bundle import Bundle
from whisperport.runtime import (
    DecodeOptions,
    Engine,
    Floats,
    RunnerWrapper,
    Thresholds,
    TokenSampler,
    load_engine,
)
from whisperport.runtime.decoding.decode import check_language
from whisperport.runtime.decoding.phrases import Phrase
from whisperport.runtime.engine.adapters import matrices_for
from whisperport.speech.audio import AudioSource, AudioStream, MelWindows, VadOptions
from whisperport.speech.audio.mel_windows import can_be_read_twice
from whisperport.speech.text import Tokenizer
from whisperport.system.machine import usable_cores
from whisperport.system.process import OwnProcess
from whisperport.system.progress import ProgressCallback
from whisperport.targets import RunOptions
from whisperport.transcription.decoders import IdleDecoders
from whisperport.transcription.feature_session import (
    FeatureSession,
    check_options,
    checked_features,
)
from whisperport.transcription.session import Session, clip_frames
from whisperport.transcription.speech_pipeline import ChunkedTranscription
from whisperport.transcription.transcribe_options import TranscribeOptions
from whisperport.transcription.transcript import Transcript


class TranscribeArguments(TypedDict, total=False):
    """The keyword arguments of `transcribe`; see `TranscribeOptions`, `DecodeOptions` and `Thresholds`.

    `temperature` is openai-whisper's name of `temperatures`, and may be one number.
    """

    language: str | None
    task: str
    without_timestamps: bool
    max_tokens: int | None
    best_of: int | None
    beam_size: int | None
    patience: float | None
    length_penalty: float | None
    suppress_tokens: tuple[int, ...]
    suppress_blank: bool
    max_initial_timestamp: float | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None
    temperature: float | tuple[float, ...]
    temperatures: tuple[float, ...]
    condition_on_previous_text: bool | None
    initial_prompt: str | None
    carry_initial_prompt: bool
    prefix: str
    phrases: Iterable[str | Phrase]
    grammar: str
    grammar_threshold: float | None
    word_timestamps: bool
    hallucination_silence_threshold: float | None
    prepend_punctuations: str
    append_punctuations: str
    clip_timestamps: tuple[float, ...]
    vad: VadOptions | None
    workers: int
    batch: bool


class Transcriber:
    """A loaded bundle. Load it once and transcribe any number of audio files with it, from any threads.

    The loaded programs do not change, and each call has its own state, so concurrent calls return exactly
    what single calls return. At most `max_concurrent` calls run concurrently, and others wait. A
    `LiveTranscriber` counts while it decodes. Programs of one target share its CPU threads, so set
    `threads=1` in `run` for many concurrent calls.

    Each running call needs 8·L·d·(N + T) bytes for its decoder: keys and values in float32 of N tokens and
    T positions of audio in L decoder layers of width d. That is 24 MB for Whisper tiny and 638 MB for
    large-v3 (N = 448, T = 1500). Each beam, or each sample of `best_of`, after the first adds 8·L·d·N
    bytes. A call with `workers` counts as one call and has a decoder for each worker. A call that decodes
    speech chunks, files, beams or samples together has B decoders, the number in the name of the bundle's
    program `step_B`.

    A process that was started by `fork()` after the bundle was loaded cannot use it: see ForkError.

    Args:
        bundle: an open bundle, the path of its folder, or the name of a model such as "tiny.en" or anything
            else that `load_checkpoint` accepts. The bundle of a model is exported once, which takes a
            minute or more and needs torch, and kept in the user's cache. "default" is the embedded model,
            which understands English commands, numbers, times of day and names only. None: the folder in
            the environment variable WHISPERPORT_BUNDLE.
        run: CPU threads, trust and the targets' run options; None: defaults.
        wrap_runner: called with every runner; returns the runner to use, such as one that measures time.
        max_concurrent: maximum number of concurrent calls, 1 or more; None: the number of CPU cores that
            this process may use.
        encoder: False does not load the encoder. Only `transcribe_features` can be used then, and the
            memory of the encoder's weights is saved.

    Raises:
        BundleError: the bundle is damaged or missing.
        CheckpointError: there is no such bundle and no such model.
        MissingPackageError: a target's runtime is not installed; or a model must be exported, and torch is
            not installed.
        UsageError: `max_concurrent` is below 1, no bundle is given, or short windows are asked of a bundle
            that has none.
    """

    def __init__(
        self,
        bundle: Bundle | str | os.PathLike[str] | None = None,
        run: RunOptions | None = None,
        *,
        wrap_runner: RunnerWrapper = lambda runner: runner,
        max_concurrent: int | None = None,
        encoder: bool = True,
    ) -> None:
        self.turns = Turns(max_concurrent)
        self.bundle = opened = open_bundle(bundle)
        self.engine: Engine = load_engine(opened, run, wrap_runner, encoder=encoder)
        if run is not None and run.short_windows and self.engine.short_windows is None:
            raise UsageError(
                "this bundle has no short windows",
                why="its encoder or its `cross_kv` reads windows of one length only",
                hint="export with `--windows`, or for a runtime on the CPU that reads audio of any length; "
                "or do not set `short_windows`",
            )
        self.idle = IdleDecoders(self.engine)
        self.tokenizer = Tokenizer.from_json(
            opened.tokenizer_json(), self.engine.generation, check_merges=False
        )

    def adapted(self, adapter: str | os.PathLike[str]) -> "Transcriber":
        """Return a transcriber with an adapter: of the same programs, in the same memory and turns.

        Args:
            adapter: folder of a LoRA adapter of PEFT, trained on the bundle's checkpoint.

        Raises:
            UsageError: the bundle's programs take none; see `export`'s `adapters_as_inputs`.
            CheckpointError: the adapter is damaged, or does not fit the bundle.
        """
        matrices = matrices_for(Path(adapter), self.bundle.manifest)
        adapted = copy(self)
        adapted.engine = self.engine.adapted(matrices)
        adapted.idle = IdleDecoders(adapted.engine)
        return adapted

    def transcribe(
        self,
        source: AudioSource,
        options: TranscribeOptions | None = None,
        *,
        sample_rate: int | None = None,
        progress: ProgressCallback = lambda _done, _of: None,
        sampler: TokenSampler | None = None,
        **arguments: Unpack[TranscribeArguments],
    ) -> Transcript:
        """Transcribe audio of any duration, with one window in memory at a time.

        Args:
            source: a path, "-" for standard input, a binary file object, or an array of samples.
            options: transcription options; None: defaults.
            sample_rate: sample rate of an array in Hz; None: 16 kHz.
            progress: called after every window or chunk with the seconds done and the total, or None. It
                must not use this transcriber, which might wait for the call that it is part of.
            sampler: chooses tokens at temperatures above 0; None: a numpy generator, seeded by the audio.
            arguments: options by openai-whisper's names, such as `language="en"`; they replace those in
                `options`.

        Raises:
            AudioError: the audio is missing, unreadable, empty, or contains values that are not finite.
            UsageError: there is no such argument, the checkpoint has no such language or task, `vad` is
                set for audio that can be read only once, or there are several `workers` without `vad`.
            NumericalError: a program returned a NaN or an infinity.
            IncompleteError: the transcription failed after some text was transcribed.
            ForkError: this process is a fork of the process that loaded the bundle.
        """
        options = with_arguments(options, arguments)
        check_language(self.engine.generation, options.decode)
        if options.vad is not None and not can_be_read_twice(source):
            raise UsageError(
                "`vad` cannot be used with standard input, a pipe or a file object",
                why="speech is detected ahead of the transcription, so the audio is read twice",
                hint="save the audio to a file first, or do not set `vad`",
            )
        with self.turns.turn():
            dims = self.engine.dims
            open_mel = partial(
                MelWindows, source, dims.n_mels, dims.n_frames, sample_rate=sample_rate
            )
            if options.vad is not None:
                parts = self.engine, self.tokenizer, options, options.vad, sampler
                with AudioStream(source, sample_rate=sample_rate, look_back_s=0) as stream:
                    return ChunkedTranscription(*parts).run(stream, open_mel, progress)
            mel = open_mel()
            try:
                return self._run(mel, options, sampler, progress)
            finally:
                mel.close()

    def transcribe_mel(
        self,
        mel: MelWindows,
        options: TranscribeOptions | None = None,
        *,
        progress: ProgressCallback = lambda _done, _of: None,
        sampler: TokenSampler | None = None,
    ) -> Transcript:
        """Transcribe a spectrogram that the caller opens for this model, and closes. See `transcribe`.

        Raises:
            UsageError: `vad` is set, which needs the audio itself.
        """
        options = options or TranscribeOptions()
        if options.vad is not None:
            raise UsageError("`vad` cannot be used with a spectrogram", hint="use `transcribe`")
        with self.turns.turn():
            return self._run(mel, options, sampler, progress)

    def transcribe_features(
        self,
        features: Floats | Sequence[Floats],
        options: TranscribeOptions | None = None,
        *,
        progress: ProgressCallback = lambda _done, _of: None,
        sampler: TokenSampler | None = None,
    ) -> Transcript:
        """Transcribe the encoder's output of consecutive windows, computed elsewhere, such as on a device.

        The bundle's encoder is not used. Each window begins where the one before it ends. A segment that
        the end of a window cuts ends there.

        Args:
            features: (T, d), (n, T, d) or a sequence of (T, d) floats, one for each window, in order.
            options: transcription options without `clip_timestamps`, `vad` and
                `hallucination_silence_threshold`; None: defaults.
            progress: called after every window with the seconds done and the total.
            sampler: see `transcribe`.

        Raises:
            UsageError: the features have another shape, or an option needs the audio.
            NumericalError: the features contain, or a program returned, a NaN or an infinity.
            IncompleteError: the transcription failed after some text was transcribed.
            ForkError: this process is a fork of the process that loaded the bundle.
        """
        options = options or TranscribeOptions()
        check_options(options)
        options.check_for_one()
        windows = checked_features(self.engine, features)
        with self.turns.turn(), self.idle.lend(options) as decoder:
            session = FeatureSession(self.engine, self.tokenizer, options, windows, sampler)
            return session.run(decoder, progress)

    def _run(
        self,
        mel: MelWindows,
        options: TranscribeOptions,
        sampler: TokenSampler | None,
        progress: ProgressCallback,
    ) -> Transcript:
        """Transcribe in windows, with a decoder of its own."""
        options.check_for_one()
        parts = clip_frames(options.clip_timestamps)
        session = Session(self.engine, self.tokenizer, options, mel, sampler, parts)
        with self.idle.lend(options) as decoder:
            return session.run(decoder, progress)


def transcribe(
    source: AudioSource,
    bundle: Bundle | str | os.PathLike[str] | None = None,
    options: TranscribeOptions | None = None,
    *,
    sample_rate: int | None = None,
    progress: ProgressCallback = lambda _done, _of: None,
    **arguments: Unpack[TranscribeArguments],
) -> Transcript:
    """Transcribe one audio file. See `Transcriber.transcribe`.

    Args:
        source: a path, "-" for standard input, a binary file object, or an array of samples.
        bundle: a bundle or the name of a model: see `Transcriber`.
        options: transcription options; None: defaults.
        sample_rate: sample rate of an array in Hz; None: 16 kHz.
        progress: called after every window or chunk with the seconds done and the total, or None.
        arguments: options by openai-whisper's names, such as `language="en"`; they replace those in
            `options`.
    """
    options = with_arguments(options, arguments)
    return Transcriber(bundle, options.run).transcribe(
        source, options, sample_rate=sample_rate, progress=progress
    )


def with_arguments(
    options: TranscribeOptions | None, arguments: Mapping[str, Any]
) -> TranscribeOptions:
    """Return the options with the values of keyword arguments in place of their own.

    Args:
        options: transcription options; None: defaults.
        arguments: values by the names of `TranscribeArguments`.

    Raises:
        UsageError: there is no such argument, or a value is out of its range.
    """
    options, values = options or TranscribeOptions(), dict(arguments)
    for name in values:
        _check_name(name)
    if "temperature" in values:
        temperature = values.pop("temperature")
        values["temperatures"] = (
            (temperature,) if isinstance(temperature, int | float) else tuple(temperature)
        )
    if values.get("initial_prompt", "") is None:  # openai-whisper's default
        values["initial_prompt"] = ""
    own = {temperature.name for temperature in fields(TranscribeOptions)}
    for part in ("decode", "thresholds"):
        before: DecodeOptions | Thresholds = getattr(options, part)
        names = {temperature.name for temperature in fields(before)} - own
        values[part] = replace(before, **{name: values.pop(name) for name in names & {*values}})
    return replace(options, **values)


def _check_name(name: str) -> None:
    known = TranscribeArguments.__annotations__
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise UsageError(
            f"`transcribe` has no argument `{name}`",
            hint=f"did you mean `{near[0]}`?"
            if near
            else f"its arguments are {', '.join(sorted(known))}",
        )


class Turns:
    """Turns for at most `limit` concurrent callers. A waiting caller gets a turn when another returns it.

    Args:
        limit: 1 or more; None: the number of CPU cores that this process may use.

    Raises:
        UsageError: `limit` is below 1.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise UsageError(f"`max_concurrent` is {limit}", why="expected 1 or more")
        self.limit = limit or usable_cores()
        self._process = OwnProcess()
        self._running: set[object] = set()
        # `with self._lock` cannot be interrupted between acquiring and entering; `with Condition()` can.
        self._lock = Lock()
        self._returned = Condition(self._lock)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, and hold it during the block. Any exception, Ctrl-C included, returns it.

        Raises:
            ForkError: this process is a fork of the process that loaded the bundle.
        """
        self._process.check("a `Transcriber`")  # before the lock, which a fork copies in its state
        me = object()
        try:
            with self._lock:
                self._returned.wait_for(lambda: len(self._running) < self.limit)
                self._running.add(me)
            yield
        finally:
            with self._lock:
                self._running.discard(me)
                self._returned.notify()

"""What a checkpoint emits in eager torch, decoded as an app decodes, for a comparison with the app."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whisperport.build.layouts.layout import DecodingProfile, Padding
from whisperport.program.dims import SECONDS_PER_POSITION
from whisperport.runtime import DecodeOptions, Decoder, Engine, split_segments, start_tokens
from whisperport.runtime.decoding.decode import decode_window
from whisperport.runtime.segments.alignment import align_words
from whisperport.runtime.segments.segments import SegmentedWindow
from whisperport.runtime.segments.words import add_words
from whisperport.speech.audio import FRAMES_PER_SECOND, HOP_LENGTH, SAMPLE_RATE, log_mel
from whisperport.speech.audio.mel import N_FFT
from whisperport.speech.text import Segment, Tokenizer
from whisperport.system.progress import Counted, begin_stage
from whisperport.verification.clips import Clip
from whisperport.verification.eager import eager_engine

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

Floats = NDArray[np.float32]
MAX_TOKENS = 24  # with the prompt, whose logits are compared: enough for a cache that grows


@dataclass(frozen=True, slots=True)
class TimedText:
    """A segment or a word: its start and end in seconds, and its text."""

    start_s: float
    end_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Emitted:
    """What was emitted for one clip.

    Attributes:
        tokens: ids, without the prompt and the end of text; of an app that returns no timestamps as ids,
            those of the text; of an app that returns none, empty.
        text: without timestamps.
        segments: with their start and end.
        timestamp_begin: id of <|0.00|>; 0: not known.
        words: with their start and end; empty: they were not computed.
    """

    tokens: tuple[int, ...]
    text: str
    segments: tuple[TimedText, ...]
    timestamp_begin: int = 0
    words: tuple[TimedText, ...] = ()

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """The ids that are no timestamps."""
        return tuple(token for token in self.tokens if token < self.timestamp_begin)


@dataclass(frozen=True, slots=True)
class KnownLogits:
    """What the checkpoint computes for one clip with given tokens, for a comparison without the app.

    Attributes:
        clip: its name.
        padding: of its spectrogram; see `DecodingProfile`.
        n_mels: rows of its spectrogram.
        tokens: S tokens: the prompt, and the first of those that the checkpoint emits.
        n_prompt: how many of them are the prompt.
        best: after each token, the token with the highest logit, before any rule.
        highest: that logit.
    """

    clip: str
    padding: Padding
    n_mels: int
    tokens: tuple[int, ...]
    n_prompt: int
    best: tuple[int, ...]
    highest: tuple[float, ...]


def reference_of(
    checkpoint: "Checkpoint",
    profile: DecodingProfile,
    clips: Sequence[Clip],
) -> list[Emitted]:
    """Decode clips greedily with the checkpoint in eager torch, under an app's profile.

    Raises:
        UsageError: the checkpoint does not know a clip's language.
    """
    from whisperport.model.network.whisper import build_model

    generation = checkpoint.generation
    tokenizer = Tokenizer.from_json(checkpoint.tokenizer_json.decode(), generation)
    engine = eager_engine(build_model(checkpoint), generation)
    results = []
    for index, clip in enumerate(clips):
        begin_stage(Counted(f"running the model in torch on {clip.name}", index, len(clips)))
        pieces = [_emitted(engine, tokenizer, profile, piece) for piece in _pieces(clip, profile)]
        results.append(_joined(pieces, profile, generation.timestamp_begin))
    return results


def known_logits(
    checkpoint: "Checkpoint",
    profile: DecodingProfile,
    clips: Sequence[Clip],
    emitted: Sequence[Emitted],
) -> KnownLogits:
    """Return the logits of the clip with the most tokens, computed in eager torch without a cache.

    Args:
        checkpoint: computes them.
        profile: pads the clip.
        clips: at least one.
        emitted: for each clip; empty: not known, and the best tokens of the first clip are taken.
    """
    import torch

    from whisperport.model.network.whisper import build_model

    clip, text = clips[0], tuple[int, ...]()
    if emitted:
        clip, longest = max(zip(clips, emitted, strict=True), key=lambda pair: len(pair[1].tokens))
        text = longest.tokens
    dims = checkpoint.dims
    prompt = start_tokens(
        checkpoint.generation, clip.language, "transcribe", timestamps=profile.timestamps
    )
    n_tokens = min(MAX_TOKENS, dims.n_text_ctx)
    tokens = (*prompt, *text)[:n_tokens]
    mel = spectrogram(clip.samples, dims.n_mels, dims.n_frames, profile.padding)
    model = build_model(checkpoint)
    with torch.no_grad():
        audio = model.cross_kv(model.encode(torch.from_numpy(mel[None, :, : dims.n_frames])))
        logits = model.logits(torch.tensor(tokens), audio)
        while not emitted and len(tokens) < n_tokens:
            tokens = (*tokens, int(logits[-1].argmax()))
            logits = model.logits(torch.tensor(tokens), audio)
    return KnownLogits(
        clip=clip.name,
        padding=profile.padding,
        n_mels=dims.n_mels,
        tokens=tokens,
        n_prompt=len(prompt),
        best=tuple(logits.argmax(dim=1).tolist()),
        highest=tuple(logits.amax(dim=1).tolist()),
    )


def _pieces(clip: Clip, profile: DecodingProfile) -> Iterator[Clip]:
    """Yield the parts of a clip that an app decodes one after the other; most apps decode it whole."""
    size = round(profile.piece_s * SAMPLE_RATE) if profile.piece_s else len(clip.samples)
    for start in range(0, len(clip.samples), size):
        if start == 0 or len(clip.samples) - start > N_FFT // 2:  # too short for a spectrogram
            yield replace(clip, samples=clip.samples[start : start + size])


def _joined(pieces: Sequence[Emitted], profile: DecodingProfile, timestamp_begin: int) -> Emitted:
    """Return what was emitted for the parts of a clip as one result, with times in the clip."""
    if len(pieces) == 1:
        return pieces[0]
    starts = [i * (profile.piece_s or 0) for i in range(len(pieces))]
    return Emitted(
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        text="".join(piece.text for piece in pieces),
        segments=tuple(
            TimedText(start + s.start_s, start + s.end_s, s.text)
            for start, piece in zip(starts, pieces, strict=True)
            for s in piece.segments
        ),
        timestamp_begin=timestamp_begin,
    )


def _emitted(engine: Engine, tokenizer: Tokenizer, profile: DecodingProfile, clip: Clip) -> Emitted:
    """Decode window after window, as openai-whisper does, or the first window only."""
    limit = profile.max_tokens or engine.dims.n_text_ctx // 2
    if profile.tokens_per_s is not None:
        n_tokens = int(profile.tokens_per_s * len(clip.samples) / SAMPLE_RATE)
        if profile.counts_prompt:
            n_tokens -= engine.generation.n_start_tokens
        limit = min(limit, n_tokens)
    options = DecodeOptions(
        language=clip.language,
        without_timestamps=not profile.timestamps,
        suppress_tokens=(-1,) if profile.suppresses else (),
        suppress_blank=profile.suppresses_at_start,
        max_tokens=max(1, limit),
    )
    generation, decoder = engine.generation, Decoder(engine)
    tokens: list[int] = []
    segments: list[TimedText] = []
    words: list[TimedText] = []
    n_frames, seek = len(clip.samples) // HOP_LENGTH, 0
    mel = spectrogram(clip.samples, engine.dims.n_mels, engine.dims.n_frames, profile.padding)
    if not profile.prompts and n_frames:
        tokens, seek = _unprompted(decoder, mel[:, : engine.dims.n_frames], max(1, limit)), n_frames
    while seek < n_frames:
        window = mel[:, seek : seek + engine.dims.n_frames]
        decoded = decode_window(decoder, engine.encode(window), options)
        size = min(engine.dims.n_frames, n_frames - seek)
        tokens += decoded.tokens
        if not decoded.tokens:
            break
        split = split_segments(decoded.tokens, generation.timestamp_begin, size)
        window_s = seek / FRAMES_PER_SECOND
        for segment in split.segments:
            # A window without a pair of timestamps is one segment from 0; apps take its first timestamp.
            first = max(0, segment.tokens[0] - generation.timestamp_begin) * SECONDS_PER_POSITION
            times = window_s + first, window_s + segment.end_s
            segments.append(TimedText(*times, tokenizer.decode(segment.tokens)))
        if profile.words:
            last_speech_s = words[-1].end_s if words else 0.0
            words += _words(decoder, tokenizer, clip.language, split, seek, size, last_speech_s)
        if not profile.windows:
            break
        seek += split.advance
    text, begin = tokenizer.decode(tokens), generation.timestamp_begin
    return Emitted(tuple(tokens), text, tuple(segments), begin, tuple(words))


def _unprompted(decoder: Decoder, window: Floats, most: int) -> list[int]:
    """Return the tokens with the highest logits after the start token, until the end of the text."""
    generation = decoder.engine.generation
    decoder.start_window(decoder.engine.encode(window))
    logits, _ = decoder.prefill([generation.start_of_transcript])
    tokens = [int(logits.argmax())]
    while tokens[-1] != generation.end_of_text and len(tokens) < most:
        tokens.append(int(decoder.step(tokens[-1]).argmax()))
    return tokens[:-1] if tokens[-1] == generation.end_of_text else tokens


def _words(
    decoder: Decoder,
    tokenizer: Tokenizer,
    language: str,
    window: SegmentedWindow,
    seek: int,
    n_frames: int,
    last_speech_s: float,
) -> list[TimedText]:
    """Return the words of a window, with the times that openai-whisper computes.

    Args:
        decoder: has decoded the window.
        tokenizer: of the checkpoint.
        language: of the audio, a code.
        window: its segments.
        seek: first mel frame of the window in the audio.
        n_frames: mel frames of audio in the window.
        last_speech_s: end of the last word before it, in seconds.
    """
    begin_s, end = seek / FRAMES_PER_SECOND, decoder.engine.generation.end_of_text
    segments = [
        Segment(begin_s + s.start_s, begin_s + s.end_s, "", s.tokens, seek=seek)
        for s in window.segments
    ]
    text = [token for segment in segments for token in segment.tokens if token < end]
    timings = align_words(
        decoder, tokenizer, text, language=language, task="transcribe", n_frames=n_frames
    )
    timed = add_words(segments, timings, end_of_text=end, last_speech=last_speech_s)
    return [TimedText(w.start, w.end, w.word) for segment in timed for w in segment.words or ()]


def spectrogram(samples: Floats, n_mels: int, window: int, padding: Padding) -> Floats:
    """Return the log-mel spectrogram (n_mels, n + 2T) of a clip of n frames and a window of padding.

    Args:
        samples: of the clip.
        n_mels: rows.
        window: 2T, frames of a window.
        padding: what fills it after the clip; see `DecodingProfile`.
    """
    n_frames = len(samples) // HOP_LENGTH
    mel = log_mel(samples, n_mels, n_frames=n_frames + window)
    if padding == "mel":
        mel[:, n_frames:] = 0
    return mel

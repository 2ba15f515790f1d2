"""What a buffer seems to say: one pass of the model over it, with times of words."""

from dataclasses import dataclass, replace

from whisperport.audio import FRAMES_PER_SECOND
from whisperport.live.buffer import Buffer
from whisperport.runtime import (
    Decoded,
    Decoder,
    WindowSegment,
    decode_with_fallback,
    is_silence,
    split_segments,
)
from whisperport.runtime.agreement import HypothesisWord
from whisperport.runtime.alignment import align_words
from whisperport.runtime.words import add_words
from whisperport.text import Segment, Tokenizer
from whisperport.transcription import TranscribeOptions, Transcriber

MIN_FRAMES = 10  # of 10 ms; shorter sound holds no word


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """What a buffer seems to say; at least one word."""

    words: tuple[HypothesisWord, ...]
    complete: int  # how many of them are in segments that have ended
    decoded: Decoded
    ratio: float  # compression ratio of the text


def recognize(
    transcriber: Transcriber,
    buffer: Buffer,
    options: TranscribeOptions,
    prompt: tuple[int, ...],
    last_speech: float,
) -> Hypothesis | None:
    """Decode a buffer; None: it holds no words.

    Args:
        prompt: tokens of what was said before it.
        last_speech: seconds at which the last certain word ended.
    """
    if buffer.frames < MIN_FRAMES:
        return None
    decoder = transcriber.engine.decoder()
    decoded, ratio = decode_with_fallback(
        decoder,
        transcriber.engine.encode(buffer.mel()),
        replace(options.decode, prompt=prompt),
        options.temperatures,
        options.thresholds,
        transcriber.tokenizer.decode_with_special_tokens,
    )
    if is_silence(decoded, options.thresholds):
        return None
    pieces, n_complete = _pieces(decoded, transcriber.engine.generation.timestamp_begin, buffer)
    said = [
        # As of a recording, what takes no time was not said.
        segment.words or () if segment.end > segment.start else ()
        for segment in _with_words(
            decoder, transcriber.tokenizer, buffer, options, decoded, pieces, last_speech
        )
    ]
    words = tuple(
        HypothesisWord(word, starts_segment=i == 0)
        for words in said
        for i, word in enumerate(words)
    )
    complete = sum(len(words) for words in said[:n_complete])
    return Hypothesis(words, complete, decoded, ratio) if words else None


def _pieces(decoded: Decoded, begin: int, buffer: Buffer) -> tuple[list[WindowSegment], int]:
    """Segments, the one that has not ended among them, and how many have.

    That one is left out of a recording's window, since the next begins with it.
    """
    cut = split_segments(decoded.tokens, begin, buffer.frames)
    rest = decoded.tokens[sum(len(piece.tokens) for piece in cut.segments) :]
    pieces = list(cut.segments)
    if rest:
        start, end = cut.advance / FRAMES_PER_SECOND, buffer.frames / FRAMES_PER_SECOND
        pieces.append(WindowSegment(min(start, end), end, rest))
    return pieces, len(cut.segments)


def _with_words(
    decoder: Decoder,
    tokenizer: Tokenizer,
    buffer: Buffer,
    options: TranscribeOptions,
    decoded: Decoded,
    pieces: list[WindowSegment],
    last_speech: float,
) -> list[Segment]:
    end = decoder.engine.generation.end_of_text
    timings = align_words(
        decoder,
        tokenizer,
        [token for token in decoded.tokens if token < end],
        language=decoded.language,
        task=options.decode.task,
        n_frames=buffer.frames,
    )
    segments = [
        Segment(
            start=buffer.start_s + piece.start_s,
            end=buffer.start_s + piece.end_s,
            text=tokenizer.decode(piece.tokens),
            tokens=piece.tokens,
            seek=buffer.start,
        )
        for piece in pieces
    ]
    return add_words(
        segments,
        timings,
        end_of_text=end,
        last_speech=last_speech,
        prepended=options.prepend_punctuations,
        appended=options.append_punctuations,
    )

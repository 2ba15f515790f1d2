"""Times of words at the edges; that they are right is held against openai-whisper elsewhere."""

from typing import Any

from whisperport.runtime.decoding.alignment import align_words
from whisperport.speech.text import Tokenizer

from ...micro import DIMS, GENERATION, tokenizer_json


def test_words_beyond_the_decoders_positions_get_no_times(micro_decoder: Any, audio: Any) -> None:
    # given: as many tokens as positions, which `max_tokens` allows where no times are asked for
    decoder = micro_decoder()
    decoder.start_window(audio(0))
    tokenizer = Tokenizer.from_json(tokenizer_json(), GENERATION)
    text = [*range(10), *range(20, 34)]
    assert len(text) == DIMS.n_text_ctx

    timings = align_words(
        decoder, tokenizer, text, language="en", task="transcribe", n_frames=2 * DIMS.n_audio_ctx
    )

    # then: four start tokens and the end take their places
    timed = [token for timing in timings for token in timing.tokens]
    assert timed == text[: DIMS.n_text_ctx - 5]

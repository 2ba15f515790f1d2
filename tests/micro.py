"""Sizes and token ids of a Whisper model of a few kilobytes; every step takes less than a millisecond."""

import json

from whisperport.program.dims import Dims
from whisperport.program.generation import Generation
from whisperport.speech.text.byte_level import to_byte_characters

DIMS = Dims(
    n_mels=8,
    n_audio_ctx=10,  # 0.2 s
    n_audio_state=16,
    n_audio_head=2,
    n_audio_layer=1,
    n_text_ctx=24,
    n_text_state=16,
    n_text_head=2,
    n_text_layer=2,
    n_vocab=70,
    n_audio_ffn=32,
    n_text_ffn=32,
)
GENERATION = Generation(
    end_of_text=49,
    start_of_transcript=50,
    languages={"en": 51, "de": 52},
    tasks={"transcribe": 53, "translate": 54},
    start_of_previous=55,
    no_speech=56,
    no_timestamps=57,  # and times from 58 on
    suppressed=(*range(10, 20), 50, 53, 54, 55, 56),
    suppressed_at_start=(3, 49),
)
SPECIAL = {
    "<|endoftext|>": 49,
    "<|startoftranscript|>": 50,
    "<|en|>": 51,
    "<|de|>": 52,
    "<|transcribe|>": 53,
    "<|translate|>": 54,
    "<|startofprev|>": 55,
    "<|nospeech|>": 56,
    "<|notimestamps|>": 57,
}


def tokenizer_json() -> bytes:
    """Ids 0 to 48 are single letters, in any order."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"
    added = [{"id": i, "content": token, "special": True} for token, i in SPECIAL.items()]
    vocabulary = {to_byte_characters(letter.encode()): i for i, letter in enumerate(letters)}
    return json.dumps(
        {
            "added_tokens": added,
            "pre_tokenizer": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
    ).encode()

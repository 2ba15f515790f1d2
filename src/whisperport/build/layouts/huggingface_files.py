"""The JSON files of transformers, which several apps read, from a checkpoint's own sizes and settings."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.program.dims import SECONDS_PER_POSITION, Dims
from whisperport.speech.audio import FRAMES_PER_SECOND, HOP_LENGTH, SAMPLE_RATE
from whisperport.speech.text.byte_level import from_byte_characters
from whisperport.verification.alignment_heads import find_alignment_heads, with_alignment_heads

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

END_OF_TEXT = "<|endoftext|>"
N_FFT = 400  # samples of 25 ms
LONGEST_SETTINGS = 8192  # characters


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON; characters of other scripts stay as they are.

    Settings have a line for each entry. Tables of tokens have no spaces: they would be a sixth longer.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if len(text) <= LONGEST_SETTINGS:
        text = json.dumps(value, ensure_ascii=False, indent=1)
    path.write_text(text, encoding="utf-8")


def ids_by_token(checkpoint: "Checkpoint") -> dict[str, int]:
    """Return token -> id for every token of the tokenizer, special ones included."""
    stored = json.loads(checkpoint.tokenizer_json)
    added = {token["content"]: token["id"] for token in stored.get("added_tokens", [])}
    return {**stored["model"]["vocab"], **added}


def tokens_by_id(checkpoint: "Checkpoint") -> list[str]:
    """Return a token for each of the V ids."""
    begin = checkpoint.generation.timestamp_begin
    return all_tokens(ids_by_token(checkpoint), begin, checkpoint.dims.n_vocab)


def all_tokens(ids: Mapping[str, int], timestamp_begin: int, n_vocab: int) -> list[str]:
    """Return a token for each of V ids; those that the tokenizer lacks are timestamps, or unused."""
    tokens = {i: token for token, i in ids.items()}
    for i in range(n_vocab):
        timestamp = f"<|{(i - timestamp_begin) * SECONDS_PER_POSITION:.2f}|>"
        tokens.setdefault(i, timestamp if i >= timestamp_begin else f"<|unused{i}|>")
    return [tokens[i] for i in range(n_vocab)]


def text_tokens(checkpoint: "Checkpoint") -> list[bytes]:
    """Return the bytes of the tokens before <|endoftext|>, in the order of their ids."""
    texts = {i: token for token, i in vocab(checkpoint).items()}
    return [from_byte_characters(texts[i]) for i in range(checkpoint.generation.end_of_text)]


def tokenizer_json(checkpoint: "Checkpoint") -> dict[str, Any]:
    """Return the tokenizer with its merges as strings, which every version of `tokenizers` reads.

    Current versions write pairs. Those before 0.20 then fail with "untagged enum ModelWrapper".
    """
    stored: dict[str, Any] = json.loads(checkpoint.tokenizer_json)
    merges = stored["model"]["merges"]
    stored["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
    return stored


def added_tokens(checkpoint: "Checkpoint") -> dict[str, int]:
    """Return token -> id for all of the V ids that `vocab` lacks; some readers know no others."""
    stored = vocab(checkpoint)
    return {token: i for i, token in enumerate(tokens_by_id(checkpoint)) if stored.get(token) != i}


def vocab(checkpoint: "Checkpoint") -> dict[str, int]:
    """Return token -> id of the tokenizer's model: those of text, and in some files special ones, too."""
    tokens: dict[str, int] = json.loads(checkpoint.tokenizer_json)["model"]["vocab"]
    return tokens


def tokenizer_config() -> dict[str, Any]:
    """Return the settings of the tokenizer."""
    ends = ("bos_token", "eos_token", "unk_token", "pad_token")
    return {
        "tokenizer_class": "WhisperTokenizer",
        "processor_class": "WhisperProcessor",
        "model_max_length": 1024,
        "errors": "replace",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,  # text stays as the tokens have it
        **dict.fromkeys(ends, END_OF_TEXT),
    }


def config(checkpoint: "Checkpoint") -> dict[str, Any]:
    """Return the sizes of the model."""
    dims = checkpoint.dims
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "is_encoder_decoder": True,
        "activation_function": "gelu",
        "d_model": dims.n_text_state,
        "vocab_size": dims.n_vocab,
        "num_mel_bins": dims.n_mels,
        "encoder_layers": dims.n_audio_layer,
        "encoder_attention_heads": dims.n_audio_head,
        "encoder_ffn_dim": dims.n_audio_ffn,
        "decoder_layers": dims.n_text_layer,
        "decoder_attention_heads": dims.n_text_head,
        "decoder_ffn_dim": dims.n_text_ffn,
        "num_hidden_layers": dims.n_audio_layer,
        "max_source_positions": dims.n_audio_ctx,
        "max_target_positions": dims.n_text_ctx,
        "scale_embedding": False,
        "use_cache": True,
        "median_filter_width": 7,  # of the attention, before words are aligned; openai-whisper's
        **_start(checkpoint),
    }


def generation_config(checkpoint: "Checkpoint") -> dict[str, Any]:
    """Return the settings of decoding; the prompt has no timestamps unless a caller asks for them."""
    generation = checkpoint.generation
    settings = {
        **_start(checkpoint),
        "suppress_tokens": sorted(generation.suppressed),
        "no_timestamps_token_id": generation.no_timestamps,
        "prev_sot_token_id": generation.start_of_previous,
        "is_multilingual": generation.is_multilingual,
        "return_timestamps": False,
        "max_length": checkpoint.dims.n_text_ctx,
        "max_initial_timestamp_index": 50,  # 1 s, as in openai-whisper
        "alignment_heads": alignment_heads(checkpoint),
    }
    if generation.is_multilingual:
        settings["lang_to_id"] = {f"<|{code}|>": i for code, i in generation.languages.items()}
        settings["task_to_id"] = generation.tasks
    return settings


def alignment_heads(checkpoint: "Checkpoint") -> list[tuple[int, int]]:
    """Return (layer, head) of the heads that follow the audio."""
    return list(with_alignment_heads(checkpoint.generation, checkpoint.dims).alignment_heads)


def with_heads(checkpoint: "Checkpoint") -> "Checkpoint":
    """Return a checkpoint with alignment heads that follow the audio, for the apps' word timestamps."""
    from whisperport.model.network.whisper import build_model

    model = build_model(checkpoint)
    generation, warning = find_alignment_heads(
        checkpoint.generation, checkpoint.tokenizer_json, model
    )
    warnings = (*checkpoint.warnings, *filter(None, (warning,)))
    return replace(checkpoint, generation=generation, warnings=warnings)


def _start(checkpoint: "Checkpoint") -> dict[str, Any]:
    generation = checkpoint.generation
    ends = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {
        **dict.fromkeys(ends, generation.end_of_text),
        "decoder_start_token_id": generation.start_of_transcript,
        "begin_suppress_tokens": sorted(generation.suppressed_at_start),
    }


def preprocessor_config(dims: Dims) -> dict[str, Any]:
    """Return the settings of the log-mel spectrogram."""
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": dims.n_mels,
        "sampling_rate": SAMPLE_RATE,
        "hop_length": HOP_LENGTH,
        "n_fft": N_FFT,
        "chunk_length": dims.n_frames // FRAMES_PER_SECOND,
        "nb_max_frames": dims.n_frames,
        "n_samples": dims.n_frames * HOP_LENGTH,
        "padding_value": 0.0,
        "padding_side": "right",
        "return_attention_mask": False,
    }

"""The JSON files of transformers have the checkpoint's own sizes, ids and settings."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.micro import DIMS, GENERATION, SPECIAL

pytest.importorskip("torch")
from whisperport.build.layouts.huggingface_files import (
    added_tokens,
    config,
    generation_config,
    vocab,
    write_json,
)


def test_transformers_reads_the_same_sizes_and_settings(micro_checkpoint: Any) -> None:
    # given a checkpoint with a head that follows the audio
    generation = replace(GENERATION, alignment_heads=((1, 1),))
    checkpoint = replace(micro_checkpoint, generation=generation)
    # when its settings are written
    sizes, settings = config(checkpoint), generation_config(checkpoint)
    # then they are the checkpoint's
    assert (sizes["d_model"], sizes["num_mel_bins"]) == (DIMS.n_text_state, DIMS.n_mels)
    assert (sizes["encoder_layers"], sizes["decoder_layers"]) == (1, 2)
    assert settings["lang_to_id"] == {"<|en|>": 51, "<|de|>": 52}
    assert settings["suppress_tokens"] == list(GENERATION.suppressed)
    assert settings["begin_suppress_tokens"] == list(GENERATION.suppressed_at_start)
    assert settings["alignment_heads"] == [(1, 1)]


def test_every_id_has_a_token(micro_checkpoint: Any) -> None:
    # given a tokenizer that lacks the tokens of timestamps
    # when both lists of tokens are joined, as onnx-asr does
    tokens = {**vocab(micro_checkpoint), **added_tokens(micro_checkpoint)}
    # then each id has a token, and special tokens have their own
    assert sorted(tokens.values()) == list(range(DIMS.n_vocab))
    assert SPECIAL.items() <= tokens.items()
    assert tokens["<|0.02|>"] == GENERATION.timestamp_begin + 1


def test_without_alignment_heads_the_last_half_of_the_layers_stands_for_them(
    micro_checkpoint: Any,
) -> None:
    checkpoint = replace(micro_checkpoint, generation=replace(GENERATION, alignment_heads=()))
    assert generation_config(checkpoint)["alignment_heads"] == [(1, 0), (1, 1)]


def test_settings_have_lines_and_tables_of_tokens_no_spaces(tmp_path: Path) -> None:
    settings, tokens = {"d_model": 128, "begin": [1, 2]}, {f"token{i}": i for i in range(1000)}
    write_json(tmp_path / "settings.json", settings)
    write_json(tmp_path / "tokens.json", tokens)
    texts = [(tmp_path / name).read_text() for name in ("settings.json", "tokens.json")]
    assert list(map(json.loads, texts)) == [settings, tokens]
    assert '\n "d_model": 128,\n' in texts[0]
    assert not set(" \n") & set(texts[1])

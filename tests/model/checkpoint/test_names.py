"""Hugging Face's tensor names against openai-whisper's."""

from dataclasses import replace

import pytest
import torch

from whisperport.model.checkpoint.names import from_huggingface, to_huggingface
from whisperport.model.checkpoint.tensor_check import expected_shapes

from ...published_dims import whisper_dims

DIMS = replace(whisper_dims(64, 2, heads=2), n_audio_ctx=100)


def test_the_expected_tensors_are_openai_whispers_own(random_openai_whisper):
    state = random_openai_whisper().state_dict()

    expected = expected_shapes(DIMS)

    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected


def test_the_table_covers_every_tensor_of_transformers_both_ways(random_hf_whisper):
    theirs = set(random_hf_whisper().state_dict()) - {"proj_out.weight"}

    ours = {from_huggingface(name) for name in theirs}

    assert ours == set(expected_shapes(DIMS))
    assert {to_huggingface(name) for name in ours} == theirs


@pytest.mark.parametrize(
    "name",
    [
        "proj_out.weight",
        "model.encoder.layers.0.fc3.weight",
        "model.encoder.layers.01.fc1.weight",
        "model.encoder.layers.0.fc1",
        "model.decoder.layers.99999.fc1.weight",
        "transformer.h.0.attn.weight",
        "",
    ],
)
def test_a_foreign_name_has_no_translation(name):
    assert from_huggingface(name) is None


def test_translated_weights_give_transformers_the_outputs_of_openai_whisper(
    random_hf_whisper, random_openai_whisper
):
    openai, huggingface = random_openai_whisper(seed=3), random_hf_whisper(seed=4)
    state = {to_huggingface(name): tensor for name, tensor in openai.state_dict().items()}
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    huggingface.load_state_dict(state, strict=True)
    mel = torch.randn(1, 80, 200, generator=torch.Generator().manual_seed(5))
    tokens = torch.tensor([[50258, 50259, 50359, 50363, 440]])

    with torch.no_grad():
        expected = openai(mel, tokens)
        found = huggingface(input_features=mel, decoder_input_ids=tokens).logits

    # Both sum in float32 in other orders, and are held to 1e-4 everywhere; swapped tensors differ by
    # more than 1.
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)

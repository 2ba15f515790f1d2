"""Tensors that do not fit: all of them are named, in one message."""

import math

import pytest
import torch

from whisperport.errors import CheckpointError
from whisperport.model.checkpoint import load_checkpoint

Q_PROJ = "model.decoder.layers.1.self_attn.q_proj.weight"


def rejection(folder):
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    return caught.value


def test_missing_unexpected_and_misshaped_tensors_are_listed_together(altered_folder):
    def spoil(tensors):
        del tensors["model.encoder.conv2.bias"]
        tensors["model.encoder.adapter.weight"] = torch.zeros(3)
        tensors[Q_PROJ] = torch.zeros(64, 32)

    error = rejection(altered_folder(weights=spoil))

    assert "1 missing: model.encoder.conv2.bias" in error.why
    assert "1 unexpected: model.encoder.adapter.weight" in error.why
    assert f"{Q_PROJ} (expected (64, 64), found (64, 32))" in error.why
    assert error.hint


def test_after_a_dozen_the_rest_are_counted(altered_folder):
    error = rejection(altered_folder({"config.json": {"decoder_layers": 3}}))

    # A decoder layer has 2 attentions of 4 matrices and 3 biases, 2 linears and 3 norms with biases.
    assert "24 missing" in error.why
    assert "and 12 more" in error.why
    assert error.why.count("model.decoder.layers.2.") == 12


def test_a_bias_on_the_keys_is_unexpected(altered_folder):
    def add(tensors):
        tensors["model.encoder.layers.0.self_attn.k_proj.bias"] = torch.zeros(64)

    error = rejection(altered_folder(weights=add))

    assert "1 unexpected: model.encoder.layers.0.self_attn.k_proj.bias" in error.why


def test_a_tensor_under_two_spellings_of_one_name_is_unexpected(altered_folder):
    def add(tensors):
        tensors["encoder.conv1.bias"] = tensors["model.encoder.conv1.bias"].clone()

    error = rejection(altered_folder(weights=add))

    assert "1 unexpected" in error.why


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_rejected_by_name(value, altered_folder):
    def spoil(tensors):
        tensors[Q_PROJ][3, 5] = value

    error = rejection(altered_folder(weights=spoil))

    assert error.why == f"1 with NaN or infinity: {Q_PROJ}"


def test_a_quantized_tensor_is_rejected_by_its_dtype(altered_folder):
    def quantize(tensors):
        tensors[Q_PROJ] = tensors[Q_PROJ].to(torch.int8)

    error = rejection(altered_folder(weights=quantize))

    assert f"`{Q_PROJ}` is of dtype 'I8'" in error.why


def test_double_precision_in_a_pt_file_is_rejected_by_its_dtype(random_openai_whisper, tmp_path):
    model = random_openai_whisper().double()
    torch.save(
        {"dims": vars(model.dims), "model_state_dict": model.state_dict()}, tmp_path / "double.pt"
    )

    error = rejection(tmp_path / "double.pt")

    assert "not float32, float16 or bfloat16" in error.why
    assert "encoder.conv1.weight (float64)" in error.why
    assert "model.float()" in error.hint


@pytest.mark.parametrize(("kept", "absent"), [("encoder", "decoder"), ("decoder", "encoder")])
def test_an_encoder_or_decoder_alone_is_rejected(kept, absent, altered_folder):
    def halve(tensors):
        for name in [name for name in tensors if not name.startswith(f"model.{kept}.")]:
            del tensors[name]
        tensors["classifier.weight"] = torch.zeros(4, 64)

    error = rejection(altered_folder(weights=halve))

    assert f"holds no {absent}" in error.what
    assert error.hint


def test_the_embedding_under_the_name_of_the_projection_tied_to_it_is_used(
    altered_folder, tiny_checkpoint
):
    def rename(tensors):
        tensors["proj_out.weight"] = tensors.pop("model.decoder.embed_tokens.weight")

    weights = load_checkpoint(altered_folder(weights=rename)).weights

    name = "decoder.token_embedding.weight"
    assert torch.equal(weights[name], tiny_checkpoint.weights[name])


def test_an_output_projection_equal_to_the_embedding_is_accepted(altered_folder):
    def untie(tensors):
        tensors["proj_out.weight"] = tensors["model.decoder.embed_tokens.weight"].clone()

    folder = altered_folder({"config.json": {"tie_word_embeddings": False}}, weights=untie)

    assert "proj_out.weight" not in load_checkpoint(folder).weights


def test_a_separate_output_projection_is_rejected(altered_folder):
    def untie(tensors):
        tensors["proj_out.weight"] = tensors["model.decoder.embed_tokens.weight"] + 1

    error = rejection(altered_folder(weights=untie))

    assert "separate output projection" in error.what
    assert "its values differ" in error.why


def test_an_untied_projection_that_is_not_stored_is_rejected(altered_folder):
    error = rejection(altered_folder({"config.json": {"tie_word_embeddings": False}}))

    assert "it is missing" in error.why
    assert "tie_word_embeddings" in error.why


def test_weights_of_a_lora_are_rejected_with_the_way_to_merge(altered_folder):
    def add(tensors):
        tensors["base_model.model.model.encoder.layers.0.fc1.lora_A.weight"] = torch.zeros(4, 64)

    error = rejection(altered_folder(weights=add))

    assert "LoRA" in error.what
    assert "merge_and_unload" in error.hint


def test_an_adapter_folder_is_rejected_by_name_with_the_way_to_merge(tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "openai/whisper-small"}'
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")

    error = rejection(tmp_path)

    assert "PEFT adapter" in error.what
    assert "'LORA'" in error.why
    assert "'openai/whisper-small'" in error.why
    assert "merge_and_unload" in error.hint

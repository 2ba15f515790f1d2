"""The same weights, stored in different ways, are the same checkpoint."""

import json

import numpy as np
import pytest
import torch
import whisper
from safetensors.torch import load_file, save_file

from whisperport.errors import CheckpointError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.checkpoint.names import to_huggingface
from whisperport.model.checkpoint.openai_releases import RELEASES, alignment_heads
from whisperport.model.network.whisper import build_model
from whisperport.program.json_records import to_json
from whisperport.speech.text.vocabulary import openai_tokenizer


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def save_pt(model, path, **changes):
    torch.save({"dims": vars(model.dims), "model_state_dict": model.state_dict(), **changes}, path)
    return path


def test_a_pt_file_and_a_folder_with_the_same_weights_load_the_same(
    random_hf_whisper, random_openai_whisper, tmp_path
):
    openai = random_openai_whisper(seed=7)
    huggingface = random_hf_whisper(seed=8)
    state = {to_huggingface(name): tensor for name, tensor in openai.state_dict().items()}
    huggingface.load_state_dict(state, strict=False)
    huggingface.save_pretrained(tmp_path / "folder")
    (tmp_path / "folder" / "tokenizer.json").write_text(openai_tokenizer(51865).to_str())

    one = load_checkpoint(save_pt(openai, tmp_path / "one.pt"))
    two = load_checkpoint(tmp_path / "folder")

    assert equal(one.weights, two.weights)
    assert (one.dims, one.generation) == (two.dims, two.generation)
    assert json.loads(one.tokenizer_json) == json.loads(two.tokenizer_json)
    assert (one.source.kind, two.source.kind) == ("openai", "huggingface")


@pytest.mark.parametrize(
    "overrides",
    [
        {"vocab_size": 51864},
        {"vocab_size": 51866, "num_mel_bins": 128},
        {"encoder_layers": 3, "decoder_layers": 2, "decoder_attention_heads": 4},
        {"encoder_ffn_dim": 96, "decoder_ffn_dim": 160},
    ],
    ids=["english only", "large-v3", "distilled", "other feed-forward widths"],
)
def test_a_folder_of_other_sizes_loads_them_from_its_config(overrides, random_hf_whisper, tmp_path):
    model = random_hf_whisper(**overrides)
    model.save_pretrained(tmp_path)

    checkpoint = load_checkpoint(tmp_path)

    config, dims = model.config, checkpoint.dims
    assert (dims.n_vocab, dims.n_mels) == (config.vocab_size, config.num_mel_bins)
    assert (dims.n_audio_layer, dims.n_text_layer) == (config.encoder_layers, config.decoder_layers)
    assert dims.n_text_head == config.decoder_attention_heads
    assert (dims.n_audio_ffn, dims.n_text_ffn) == (config.encoder_ffn_dim, config.decoder_ffn_dim)
    assert checkpoint.generation.is_multilingual == (config.vocab_size != 51864)
    assert len(checkpoint.generation.languages) == {51864: 0, 51865: 99, 51866: 100}[dims.n_vocab]


def test_an_english_only_pt_file_has_no_languages(random_openai_whisper, tmp_path):
    path = save_pt(random_openai_whisper(n_vocab=51864), tmp_path / "tiny.en.pt")

    checkpoint = load_checkpoint(path)

    assert (checkpoint.generation.languages, checkpoint.generation.tasks) == ({}, {})
    assert checkpoint.generation.start_of_transcript == 50257


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_as_it_was_stored(dtype, random_hf_whisper, tmp_path):
    model = random_hf_whisper().to(dtype)
    model.save_pretrained(tmp_path)

    weights = load_checkpoint(tmp_path).weights

    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    expected = model.state_dict()["model.decoder.embed_tokens.weight"]
    assert torch.equal(weights["decoder.token_embedding.weight"], expected)


def test_shards_load_as_the_whole_file_does(random_hf_whisper, tiny_checkpoint, tmp_path):
    random_hf_whisper().save_pretrained(tmp_path, max_shard_size="200KB")

    checkpoint = load_checkpoint(tmp_path)

    assert len(checkpoint.source.sha256) > 1
    assert equal(checkpoint.weights, tiny_checkpoint.weights)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "base_model.model.", "model."])
def test_the_prefix_of_a_training_wrapper_is_removed(wrapper, altered_folder, tiny_checkpoint):
    def wrap(tensors):
        tensors["proj_out.weight"] = tensors["model.decoder.embed_tokens.weight"].clone()
        for name in list(tensors):
            tensors[wrapper + name] = tensors.pop(name)

    loaded = load_checkpoint(altered_folder(weights=wrap))

    assert loaded.weights.keys() == tiny_checkpoint.weights.keys()


class LinearLowRank(torch.nn.Module):
    """The layer of lite-whisper (efeslab/LiteASR@da5be85, src/lite_whisper/modeling_lite_whisper.py)."""

    def __init__(self, linear, rank):
        super().__init__()
        for name, shape in (
            ("weight1", (linear.in_features, rank)),
            ("weight2", (rank, linear.out_features)),
            ("bias", (linear.out_features,)),
        ):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape) / 8))

    def forward(self, x):
        return (x @ self.weight1) @ self.weight2 + self.bias


@pytest.fixture
def lite_whisper(random_hf_whisper, tmp_path):
    """A model with factored linears in its encoder, as lite-whisper has it, and its folder."""
    model = random_hf_whisper(max_source_positions=20)
    for layer in model.model.encoder.layers:
        for owner, names in (
            (layer, ("fc1", "fc2")),
            (layer.self_attn, ("q_proj", "k_proj", "out_proj")),
        ):
            for name in names:
                setattr(owner, name, LinearLowRank(getattr(owner, name), 16))
    save_file(
        {n: t.contiguous() for n, t in model.state_dict().items() if n != "proj_out.weight"},
        tmp_path / "model.safetensors",
    )
    config = {**model.config.to_dict(), "model_type": "lite-whisper"}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    return model, tmp_path


def test_factored_linears_of_lite_whisper_are_multiplied(lite_whisper):
    # given a model whose keys, too, have factors and thus a bias
    model, folder = lite_whisper
    mel = torch.randn(1, 80, 40)
    # when its folder is loaded
    checkpoint = load_checkpoint(folder)
    # then the encoder computes the same, and a warning says that the weights grow
    with torch.no_grad():
        expected = model.model.encoder(mel).last_hidden_state
        assert torch.allclose(build_model(checkpoint).encode(mel), expected, atol=1e-4)
    assert any("10 weights are stored as two factors" in w for w in checkpoint.warnings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight1": None}, "unexpected: model.encoder.layers.0.fc1.weight2"),
        ({"weight2": None}, "unexpected: model.encoder.layers.0.fc1.weight1"),
        ({"weight2": torch.zeros(9, 256)}, "(64, 16) and (9, 256)"),
        ({"weight1": torch.zeros(16)}, "(16,) and (16, 256)"),
        ({"weight1": torch.zeros(1 << 20, 1), "weight2": torch.zeros(1, 1 << 20)}, "(1048576, 1)"),
        ({"weight": torch.zeros(256, 64)}, "2 unexpected"),
    ],
    ids=[
        "no first",
        "no second",
        "ranks",
        "a vector",
        "a product of 4 TB",
        "beside a dense weight",
    ],
)
def test_factors_that_do_not_fit_are_rejected_by_name(change, message, lite_whisper):
    _, folder = lite_whisper
    tensors = load_file(folder / "model.safetensors")
    tensors.update({f"model.encoder.layers.0.fc1.{part}": t for part, t in change.items()})
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")

    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)

    assert message in caught.value.why


@pytest.mark.parametrize("prefix", ["", "model."])
def test_names_with_and_without_their_prefix_load_the_same(prefix, altered_folder, tiny_checkpoint):
    def rename(tensors):
        for name in list(tensors):
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    checkpoint = load_checkpoint(altered_folder(weights=rename))

    assert equal(checkpoint.weights, tiny_checkpoint.weights)


def test_pytorch_model_bin_loads_as_safetensors_does(
    altered_folder, tiny_checkpoint, tiny_checkpoint_folder
):
    folder = altered_folder(without=("model.safetensors",))
    torch.save(
        load_file(tiny_checkpoint_folder / "model.safetensors"), folder / "pytorch_model.bin"
    )

    assert equal(load_checkpoint(folder).weights, tiny_checkpoint.weights)


def test_a_half_precision_variant_is_used_where_it_is_all_there_is(
    altered_folder, tiny_checkpoint_folder
):
    folder = altered_folder(without=("model.safetensors",))
    tensors = load_file(tiny_checkpoint_folder / "model.safetensors")
    save_file({k: v.half() for k, v in tensors.items()}, folder / "model.fp16.safetensors")

    checkpoint = load_checkpoint(folder)

    assert list(checkpoint.source.sha256) == ["model.fp16.safetensors"]
    assert checkpoint.weights["encoder.conv1.weight"].dtype == torch.float16


def test_encoder_positions_that_are_missing_are_computed_as_openai_whisper_computes_them(
    altered_folder, tiny_openai_pt
):
    def drop(tensors):
        del tensors["model.encoder.embed_positions.weight"]

    found = load_checkpoint(altered_folder(weights=drop)).weights["encoder.positional_embedding"]

    expected = load_checkpoint(tiny_openai_pt).weights["encoder.positional_embedding"]
    # openai-whisper multiplies by a float64 step; one unit in the last place of an angle of up to 100.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pt_file_is_mapped_where_its_form_allows(
    zipped, random_openai_whisper, tmp_path, monkeypatch
):
    model = random_openai_whisper()
    data = {"dims": vars(model.dims), "model_state_dict": model.state_dict()}
    torch.save(data, tmp_path / "any.pt", _use_new_zipfile_serialization=zipped)
    load, asked = torch.load, []
    monkeypatch.setattr(torch, "load", lambda *a, **k: (asked.append(k), load(*a, **k))[1])

    checkpoint = load_checkpoint(tmp_path / "any.pt")

    assert equal(checkpoint.weights, model.state_dict())
    assert [(options["weights_only"], options["mmap"]) for options in asked] == [(True, zipped)]


def test_the_source_names_what_was_loaded_and_fits_into_json(tiny_checkpoint_folder):
    source = load_checkpoint(str(tiny_checkpoint_folder)).source

    data = json.loads(json.dumps(to_json(source)))

    assert data["name"] == str(tiny_checkpoint_folder)
    assert data["kind"] == "huggingface"
    assert len(data["sha256"]["model.safetensors"]) == 64


@pytest.mark.parametrize("name", sorted(set(whisper._MODELS) - {"large", "turbo"}))
def test_alignment_heads_of_openais_own_files_are_openai_whispers(name):
    sizes = {"tiny": (4, 6), "base": (6, 8), "small": (12, 12), "medium": (24, 16)}
    layers, heads = sizes.get(name.removesuffix(".en"), (32, 20))
    layers = 4 if name == "large-v3-turbo" else layers
    digest = whisper._MODELS[name].split("/")[-2]

    found = alignment_heads(digest, n_layers=layers, n_heads=heads)

    model = whisper.model.Whisper.__new__(whisper.model.Whisper)
    torch.nn.Module.__init__(model)
    model.dims = whisper.model.ModelDimensions(80, 1, 1, 1, 1, 1, 1, 1, heads, layers)
    model.set_alignment_heads(whisper._ALIGNMENT_HEADS[name])
    expected = model.alignment_heads.to_dense().numpy()
    assert RELEASES[name].sha256 == digest
    assert found == tuple((int(a), int(b)) for a, b in np.argwhere(expected))

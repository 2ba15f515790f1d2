"""A LoRA adapter is merged with its base as PEFT merges it, and no tensor of it is ignored.

Written once with PEFT 0.21.2, adapters of 17 kinds were merged to the same bits as `merge_and_unload`.
"""

import json
import math

import huggingface_hub
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from whisperport.errors import CheckpointError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.checkpoint.adapter import merged
from whisperport.program.adapter_settings import read_adapter

QUERY = "encoder.layers.0.self_attn.q_proj"
WEIGHT = "encoder.blocks.0.attn.query.weight"
BIAS = "encoder.blocks.0.attn.query.bias"
RANK = 4


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def factors(module=QUERY, rank=RANK, width=64, infix=""):
    """A and B of one module, under the names that PEFT stores."""
    prefix = f"base_model.model.model.{module}"
    return {
        f"{prefix}.lora_A{infix}.weight": drawn(rank, width),
        f"{prefix}.lora_B{infix}.weight": drawn(width, rank),
    }


def product(tensors):
    a, b = (tensors[next(n for n in tensors if f"lora_{side}" in n)] for side in "AB")
    return b @ a


@pytest.fixture
def adapter_folder(tiny_checkpoint_folder, tmp_path):
    """`adapter_folder(tensors, key=value)`: an adapter of the tiny checkpoint with these settings."""

    def write(tensors, **settings):
        folder = tmp_path / "adapter"
        folder.mkdir(exist_ok=True)
        config = {
            "peft_type": "LORA",
            "base_model_name_or_path": str(tiny_checkpoint_folder),
            "r": RANK,
            "lora_alpha": 6,
            "target_modules": ["q_proj"],
            **settings,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "adapter_model.safetensors")
        return folder

    return write


@pytest.fixture
def merge(adapter_folder, tiny_checkpoint):
    """`merge(tensors, key=value)`: the weights of the tiny checkpoint after an adapter is merged."""

    def merge_adapter(tensors, **settings):
        adapter = read_adapter(adapter_folder(tensors, **settings))
        return merged(adapter, tiny_checkpoint, name="mine").weights

    return merge_adapter


def rejection(call, *arguments, **settings):
    with pytest.raises(CheckpointError) as caught:
        call(*arguments, **settings)
    assert caught.value.why
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 6 / 4),
        ({"use_rslora": True}, 6 / 2),
        ({"r": 8, "rank_pattern": {"fc1": 2, "self_attn.q_proj": 4}}, 6 / 4),
        ({"alpha_pattern": {"^model.encoder.layers.0.self_attn.q_proj": 20, "q_proj": 1}}, 20 / 4),
        ({"alpha_pattern": {"_proj": 20}}, 6 / 4),
        ({"target_modules": r".*encoder.*q_proj", "fan_in_fan_out": True}, 6 / 4),
    ],
    ids=["r and alpha", "rslora", "rank pattern", "alpha pattern", "part of a name", "regex"],
)
def test_the_scaled_product_is_added_to_the_weight(settings, scale, merge, tiny_checkpoint):
    # given the factors of one module
    tensors = factors()
    # when they are merged
    weights = merge(tensors, **settings)
    # then only its weight differs, by the scaled product
    expected = tiny_checkpoint.weights[WEIGHT] + product(tensors) * scale
    assert torch.equal(weights[WEIGHT], expected)
    base = tiny_checkpoint.weights
    assert {n for n in weights if not torch.equal(weights[n], base[n])} == {WEIGHT}


def test_a_magnitude_of_dora_is_the_norm_of_the_merged_row(merge):
    # given factors and the norm of each row
    magnitude = drawn(64).abs() + 1
    tensors = factors() | {f"base_model.model.model.{QUERY}.lora_magnitude_vector": magnitude}
    # when they are merged
    weight = merge(tensors, use_dora=True)[WEIGHT]
    # then the rows have these norms
    assert torch.allclose(weight.norm(dim=1), magnitude, rtol=1e-5)


def test_a_kernel_of_a_convolution_is_merged_over_all_its_positions(merge, tiny_checkpoint):
    # given factors of a convolution: A has the kernel, B has none
    name = "base_model.model.model.encoder.conv2"
    a, b = drawn(RANK, 64, 3), drawn(64, RANK, 1)
    # when they are merged
    weight = merge({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b})["encoder.conv2.weight"]
    # then each position of the kernel has its product
    delta = torch.einsum("or,rik->oik", b[:, :, 0], a) * 1.5
    assert torch.allclose(
        weight, tiny_checkpoint.weights["encoder.conv2.weight"] + delta, atol=1e-5
    )


@pytest.mark.parametrize(
    "name", ["bias", "base_layer.bias", "modules_to_save.bias", "modules_to_save.default.bias"]
)
def test_a_tensor_that_was_trained_completely_replaces_the_bases(name, merge):
    tensors = factors(infix=".default") | {f"base_model.model.model.{QUERY}.{name}": drawn(64)}

    weights = merge(tensors)

    assert torch.equal(weights[BIAS], drawn(64))


def test_the_bias_of_b_is_added_scaled(merge, tiny_checkpoint):
    tensors = factors() | {f"base_model.model.model.{QUERY}.lora_B.bias": drawn(64)}

    weights = merge(tensors, lora_bias=True)

    assert torch.equal(weights[BIAS], tiny_checkpoint.weights[BIAS] + drawn(64) * 1.5)


KEY = "base_model.model.model.encoder.layers.0.self_attn.k_proj"
EMBEDDING = "base_model.model.model.decoder.embed_tokens"


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        ({}, {}, "has no tensors"),
        (dict([*factors().items()][:1]), {}, "lora_B.weight (expected (64, 4), found none)"),
        (dict([*factors().items()][1:]), {}, "lora_A.weight (expected (4, 64), found none)"),
        (factors(rank=3), {}, "lora_A.weight (expected (4, 64), found (3, 64))"),
        (factors(width=32), {}, "lora_B.weight (expected (64, 4), found (32, 4))"),
        (factors(), {"r": 2}, "(expected (2, 64), found (4, 64))"),
        (factors("encoder.layers.9.fc1"), {}, "the base has no model.encoder.layers.9.fc1"),
        (factors("encoder.layers.0.dense"), {}, "unexpected: base_model.model.model.encoder"),
        (factors() | {"lora_router": drawn(4)}, {}, "1 unexpected: lora_router"),
        (factors() | factors(infix=".default"), {}, "2 unexpected"),
        (factors(), {"use_dora": True}, "lora_magnitude_vector (expected (64,), found none)"),
        (
            factors() | {f"base_model.model.model.{QUERY}.lora_magnitude_vector": drawn(64)},
            {},
            "lora_magnitude_vector (expected none, found (64,))",
        ),
        (
            factors(KEY.removeprefix("base_model.model.model."))
            | {f"{KEY}.lora_B.bias": drawn(64)},
            {},
            "lora_B.bias (expected none, found (64,))",
        ),
        ({f"{KEY}.bias": drawn(64)}, {}, "key.bias (expected none, found (64,))"),
        ({f"{EMBEDDING}.weight": drawn(9, 64)}, {}, "embedding.weight (expected (51865, 64)"),
        ({f"{EMBEDDING}.lora_embedding_A": drawn(4, 9)}, {}, "1 unexpected"),
        ({f"{EMBEDDING}.weight": drawn(51865, 64)}, {}, "one of the two"),
        ({name: tensor * torch.inf for name, tensor in factors().items()}, {}, "NaN or infinity"),
    ],
)
def test_an_adapter_that_does_not_fit_is_rejected_by_name(tensors, settings, message, merge):
    assert message in rejection(merge, tensors, **settings).why


def test_an_embedding_to_which_the_projection_is_tied_is_merged(merge):
    tensors = {f"{EMBEDDING}.weight": drawn(51865, 64)}

    weights = merge(tensors, ensure_weight_tying=True)

    assert torch.equal(weights["decoder.token_embedding.weight"], drawn(51865, 64))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "'IA3'"),
        ({"peft_type": None}, "None"),
        ({"init_lora_weights": "pissa"}, "'pissa'"),
        ({"layer_replication": [[0, 2]]}, "`layer_replication`"),
        ({"r": 0}, "`r` is 0"),
        ({"r": True}, "`r` is True"),
        ({"lora_alpha": "16"}, "`lora_alpha` is '16'"),
        ({"alpha_pattern": {"q_proj": None}}, "`lora_alpha` is None"),
        ({"alpha_pattern": []}, None),
        ({"alpha_pattern": [1]}, "`alpha_pattern` is [1]"),
        ({"alpha_pattern": {"(a+)+": 3}}, "'(a+)+'"),
        ({"base_model_name_or_path": None}, "`base_model_name_or_path` is None"),
        ({"revision": 3}, "`revision` is 3"),
    ],
)
def test_settings_of_another_method_or_kind_are_rejected(settings, message, adapter_folder):
    folder = adapter_folder({}, **settings)

    if message is None:
        assert read_adapter(folder).alphas == {"": 6}
    else:
        assert message in rejection(read_adapter, folder).why


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
)
KEYS = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "revision", "use_rslora")


@given(settings=st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_any_settings_are_rejected_or_give_a_scale(settings, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "any-adapter"
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": "a/b", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))

    try:
        adapter = read_adapter(folder)
    except CheckpointError:
        return
    assert adapter.scale(f"model.{QUERY}") > 0


def test_the_base_is_read_from_the_path_that_the_adapter_states(
    adapter_folder, tiny_checkpoint, tiny_checkpoint_folder
):
    # given an adapter in older PEFT's format
    folder = adapter_folder({})
    torch.save(factors(), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    # when it is loaded
    checkpoint = load_checkpoint(folder)
    # then the base is merged, and the source names the files of both
    assert not torch.equal(checkpoint.weights[WEIGHT], tiny_checkpoint.weights[WEIGHT])
    assert checkpoint.tokenizer_json == tiny_checkpoint.tokenizer_json
    assert checkpoint.source.name == str(folder)
    files = {"adapter_config.json", "adapter_model.bin", "model.safetensors"}
    assert set(checkpoint.source.sha256) == files


@pytest.mark.parametrize("place", ["adapter/whisper-mine", "whisper-mine"])
def test_a_base_of_another_machine_is_found_beside_the_adapter(
    place, adapter_folder, tiny_checkpoint_folder, tmp_path
):
    folder = adapter_folder(factors(), base_model_name_or_path="/home/someone/whisper-mine")
    (tmp_path / place).symlink_to(tiny_checkpoint_folder)

    assert load_checkpoint(folder).dims.n_vocab == 51865


def test_a_base_that_is_not_there_is_an_error_with_where_to_put_it(adapter_folder, tmp_path):
    folder = adapter_folder(factors(), base_model_name_or_path="/home/someone/whisper-mine")

    error = rejection(load_checkpoint, folder)

    assert "/home/someone/whisper-mine" in error.what
    assert str(folder / "whisper-mine") in error.hint
    assert "`base_model_name_or_path`" in error.hint


def test_an_adapter_that_names_itself_or_another_as_base_is_rejected(adapter_folder):
    folder = adapter_folder(factors(), base_model_name_or_path=".")

    assert "is an adapter, too" in rejection(load_checkpoint, folder).what


def test_an_adapter_without_its_weights_is_rejected(adapter_folder):
    folder = adapter_folder({})
    (folder / "adapter_model.safetensors").unlink()

    assert "adapter_model.bin" in rejection(load_checkpoint, folder).why


def test_of_an_adapter_on_the_hub_only_its_own_files_are_fetched(
    adapter_folder, tiny_checkpoint, monkeypatch
):
    # given a hub that has the adapter
    patterns = []

    def snapshot_download(repo_id, *, revision, allow_patterns):
        patterns.append(set(allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    folder = adapter_folder(factors())
    # when it is loaded by its id
    checkpoint = load_checkpoint("someone/whisper-lora")
    # then its small files are fetched, then its weights
    assert checkpoint.source.name == "someone/whisper-lora"
    assert [sorted(p - patterns[0]) for p in patterns] == [[], ["adapter_model.safetensors"]]

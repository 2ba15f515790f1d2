"""config.json: the values that are read and those that are rejected."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whisperport.errors import CheckpointError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.checkpoint.huggingface import read_config
from whisperport.program.dims import Dims

GOOD = {
    "model_type": "whisper",
    "activation_function": "gelu",
    "scale_embedding": False,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "num_mel_bins": 80,
    "max_source_positions": 100,
    "max_target_positions": 448,
    "vocab_size": 51865,
}


def rejection(folder, config):
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError) as caught:
        read_config(folder)
    assert caught.value.why
    return caught.value


@pytest.mark.parametrize("model_type", ["wav2vec2", "llama", None, 7])
def test_another_architecture_is_rejected_by_its_model_type(model_type, tmp_path):
    error = rejection(tmp_path, {**GOOD, "model_type": model_type})

    assert f"`model_type` is {model_type!r}" in error.why
    assert "expected 'whisper'" in rejection(tmp_path, {"d_model": 64}).why


@pytest.mark.parametrize("activation", ["relu", "gelu_new", None])
def test_another_activation_is_rejected_by_name(activation, tmp_path):
    error = rejection(tmp_path, {**GOOD, "activation_function": activation})

    assert repr(activation) in error.why


def test_a_quantized_checkpoint_is_rejected(tmp_path):
    error = rejection(tmp_path, {**GOOD, "quantization_config": {"quant_method": "gptq"}})

    assert "quantized" in error.what


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", "51865", "`vocab_size` is '51865'; expected a whole number"),
        ("d_model", 64.0, "`d_model` is 64.0; expected a whole number"),
        ("encoder_layers", True, "`encoder_layers` is True; expected a whole number"),
        ("encoder_layers", None, "`encoder_layers` is None; expected a whole number"),
        ("decoder_layers", 0, "`decoder_layers` is 0; expected 1 to 512"),
        ("decoder_layers", -4, "`decoder_layers` is -4; expected 1 to 512"),
        ("encoder_layers", 10**30, f"`encoder_layers` is {10**30}; expected 1 to 512"),
        ("vocab_size", 10**4000, "`vocab_size` is a number of 13288 bits"),
        ("d_model", 65, "encoder width 65 is not a multiple of its 2 heads"),
        ("scale_embedding", True, "scale_embedding"),
    ],
)
def test_an_impossible_value_is_rejected_by_name(key, value, message, tmp_path):
    error = rejection(tmp_path, {**GOOD, key: value})

    assert message in error.why


def test_sizes_that_an_old_config_leaves_out_are_those_of_transformers(tmp_path):
    unstated = ("num_mel_bins", "max_source_positions", "max_target_positions")
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in GOOD.items() if k not in unstated})
    )

    _, dims = read_config(tmp_path)

    assert (dims.n_mels, dims.n_audio_ctx, dims.n_text_ctx) == (80, 1500, 448)


def test_a_config_in_openais_words_is_known_as_a_conversion_for_mlx(tmp_path):
    error = rejection(tmp_path, {"model_type": "whisper", "n_audio_state": 384})

    assert "MLX" in error.hint


@pytest.mark.parametrize("inner", ["checkpoint-500", "snapshots/0123abc"])
def test_a_folder_around_the_checkpoint_is_rejected_with_the_one_inside(inner, tmp_path):
    (tmp_path / inner).mkdir(parents=True)
    (tmp_path / inner / "config.json").write_text("{}")

    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)

    assert f"`{tmp_path / inner}`" in caught.value.hint


def test_every_missing_size_is_listed(tmp_path):
    config = {k: v for k, v in GOOD.items() if k not in ("d_model", "vocab_size")}

    error = rejection(tmp_path, config)

    assert error.why == "missing: d_model, vocab_size"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1, 2]", "found list"),
        (b"null", "found NoneType"),
        (b"[" * 100_000, "not JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not JSON"),
        (b" " * (9 << 20), "the maximum is"),
    ],
    ids=["empty", "cut", "binary", "list", "null", "deep", "endless number", "huge"],
)
def test_a_config_that_is_not_json_is_rejected(text, message, tmp_path):
    error = rejection(tmp_path, text)

    assert message in error.why


def test_a_folder_without_a_config_is_rejected_with_a_pointer_to_its_pt_file(tmp_path):
    (tmp_path / "small.pt").write_bytes(b"")

    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path)

    assert "no config.json" in caught.value.why
    assert "small.pt" in caught.value.hint


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(sorted(GOOD)), JSON, max_size=4))
def test_any_config_is_either_rejected_or_read_as_it_stands(changes, tmp_path):
    config = {**GOOD, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))

    try:
        _, dims = read_config(tmp_path)
    except CheckpointError:
        return
    assert isinstance(dims, Dims)
    assert (dims.n_vocab, dims.n_audio_state) == (config["vocab_size"], config["d_model"])
    assert dims.n_text_layer == config["decoder_layers"]
    assert config["model_type"] == "whisper"


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 400), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_config_is_rejected_or_still_possible(at, byte, cut, tmp_path):
    text = bytearray(json.dumps(GOOD).encode())
    at = min(at, len(text) - 1)
    text[at] = byte
    (tmp_path / "config.json").write_bytes(bytes(text[:at]) if cut else bytes(text))

    try:
        _, dims = read_config(tmp_path)
    except CheckpointError:
        return
    assert isinstance(dims, Dims)

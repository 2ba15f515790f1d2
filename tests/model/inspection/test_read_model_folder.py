"""Folders of models of any architecture, exported from their config.json."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

import whisperport
from whisperport.errors import LoweringError, ProgramError
from whisperport.model.inspection import read_model_folder as reading
from whisperport.model.inspection.read_model_folder import read_model_folder

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 64, "vocab_size": 120}
CONVOLUTIONS = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2)}
WHISPER = {"d_model": 32, "vocab_size": 120, "max_source_positions": 100, "pad_token_id": 0}
WHISPER |= {f"{side}_layers": 1 for side in ("encoder", "decoder")}
WHISPER |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
PATCHES = {"patch_size": 16, "num_mel_bins": 32, "max_length": 64}


def folder(path: Path, config: Any, architecture: str) -> Path:
    config.architectures = [architecture]
    config.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("architecture", "config", "inputs"),
    [
        ("BertModel", lambda: transformers.BertConfig(**SIZES), {"input_ids": (1, 128)}),
        (
            "BertModel",
            lambda: transformers.BertConfig(**SIZES, max_position_embeddings=40),
            {"input_ids": (1, 40)},
        ),
        (
            "ViTForImageClassification",
            lambda: transformers.ViTConfig(**SIZES, image_size=48, num_channels=1),
            {"pixel_values": (1, 1, 48, 48)},
        ),
        (
            "Wav2Vec2ForCTC",
            lambda: transformers.Wav2Vec2Config(
                **SIZES, **CONVOLUTIONS, num_conv_pos_embedding_groups=2
            ),
            {"input_values": (1, 16000)},
        ),
        (
            "ASTForAudioClassification",
            lambda: transformers.ASTConfig(**SIZES, **PATCHES),
            {"input_values": (1, 64, 32)},
        ),
        (
            "WhisperForConditionalGeneration",
            lambda: transformers.WhisperConfig(**WHISPER),
            {"input_features": (1, 80, 200), "decoder_input_ids": (1, 128)},
        ),
        (
            "T5ForConditionalGeneration",
            lambda: transformers.T5Config(
                d_model=32, d_kv=16, d_ff=64, num_layers=1, vocab_size=120
            ),
            {"input_ids": (1, 128), "decoder_input_ids": (1, 128)},
        ),
    ],
)
def test_models_are_exported_with_inputs_of_their_sizes(
    architecture: str, config: Callable[[], Any], inputs: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    graph = read_model_folder(folder(tmp_path, config(), architecture))

    assert graph.name == architecture
    given = {value.name: value.shape for value in graph.inputs}
    assert given == inputs


def test_a_folder_is_checked_as_the_module_is(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SIZES)
    folder(tmp_path, config, "BertModel")

    (found,) = whisperport.check(tmp_path, target="xnnpack").programs

    tokens = transformers.BertModel(config).dummy_inputs["input_ids"].new_zeros(1, 128)
    module = transformers.BertModel(config)
    (expected,) = whisperport.check(module, {"input_ids": tokens}, target="xnnpack").programs
    assert found.to_json() == expected.to_json()
    assert found.rejected_nodes > 0


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("not json", "not JSON"),
        ("{}", "model_type"),
        ('{"model_type": "bert"}', "`architectures` begins with ''"),
        ('{"model_type": "bert", "architectures": ["os"]}', "no such class"),
        (
            '{"model_type": "bert", "architectures": ["BertModel"], "num_attention_heads": 7}',
            "multiple",
        ),
        (
            '{"model_type": "bert", "architectures": ["BertModel"], "auto_map": {"AutoConfig": "x.Y"}, '
            '"hidden_size": "wide"}',
            "hidden_size",
        ),
    ],
)
def test_a_damaged_configuration_is_an_error(config: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)

    with pytest.raises(ProgramError) as raised:
        read_model_folder(tmp_path)

    assert why in str(raised.value.why)


def test_code_in_the_folder_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = {"model_type": "mine", "architectures": ["Mine"], "auto_map": {"AutoConfig": "x.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ProgramError):
        read_model_folder(tmp_path)

    assert not (tmp_path / "ran").exists()


def test_a_model_with_inputs_that_are_not_known_names_them(tmp_path: Path) -> None:
    folder(tmp_path, transformers.SpeechT5HifiGanConfig(), "SpeechT5HifiGan")

    with pytest.raises(ProgramError) as raised:
        read_model_folder(tmp_path)

    assert "SpeechT5HifiGan" in str(raised.value)
    assert "input_ids" in str(raised.value.why)


def test_a_model_that_torch_cannot_export_states_the_inputs(tmp_path: Path) -> None:
    folder(tmp_path, transformers.ClapConfig(), "ClapModel")

    with pytest.raises(LoweringError) as raised:
        read_model_folder(tmp_path)

    assert "input_features (1, 300, 80)" in str(raised.value)
    assert "whisperport.check" in str(raised.value.hint)


def _written(path: Path, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


BERT = {"model_type": "bert", "architectures": ["BertModel"], **SIZES}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000"),
        ({"num_hidden_layers": 50}, "more than 300 modules"),
        ({"depths": [10**9, 2]}, "`depths` is 1000000000"),  # Swin's: a list of all takes minutes
    ],
)
def test_a_model_of_a_billion_parts_is_not_built(
    config: dict[str, int], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_MODULES", 300)
    monkeypatch.setattr(reading, "MOST_BYTES", 200 * 2**20)
    _written(tmp_path, **BERT | config)

    with pytest.raises(ProgramError) as raised:
        read_model_folder(tmp_path)

    assert why in str(raised.value.why)


# In a process of its own: this one may hold much freed memory, which the limit does not count.
FEW_BYTES = """
import sys
from pathlib import Path
from whisperport.errors import ProgramError
from whisperport.model.inspection import read_model_folder as reading

reading.MOST_BYTES = 200 * 2**20
try:
    reading.read_model_folder(Path(sys.argv[1]))
except ProgramError as error:
    print(error.why)
"""


def test_a_model_whose_labels_fill_the_memory_is_not_built(tmp_path: Path) -> None:
    _written(tmp_path, **BERT, num_labels=10**9)

    command = [sys.executable, "-c", FEW_BYTES, str(tmp_path)]
    read = subprocess.run(command, capture_output=True, text=True, check=True)

    assert "not enough memory" in read.stdout


def test_a_large_configuration_is_not_read(tmp_path: Path) -> None:
    _written(tmp_path, **BERT, comment="x" * (9 << 20))

    with pytest.raises(ProgramError, match="cannot read"):
        read_model_folder(tmp_path)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_code_that_a_configuration_names_on_the_hub_is_rejected(key: str, tmp_path: Path) -> None:
    _written(tmp_path, **BERT, text_config={key: "someone/kernel"})

    with pytest.raises(ProgramError) as raised:
        read_model_folder(tmp_path)

    assert "someone/kernel" in raised.value.why


def test_a_model_that_a_configuration_names_is_not_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *names, **_: asked.append(names) or [])
    backbone = {"backbone": "someone/resnet", "use_pretrained_backbone": True}
    _written(tmp_path, model_type="dpt", architectures=["DPTForDepthEstimation"], **backbone)

    with pytest.raises(ProgramError):
        read_model_folder(tmp_path)

    assert not asked


@pytest.mark.parametrize("name", ["Trainer", "BertTokenizer", "BertConfig"])
def test_only_models_are_built(name: str, tmp_path: Path) -> None:
    _written(tmp_path, **BERT | {"architectures": [name]})

    with pytest.raises(ProgramError) as raised:
        read_model_folder(tmp_path)

    assert name in raised.value.why
    assert "no such class" in raised.value.why


@pytest.mark.parametrize("side", [10**9, [224], "wide"])
def test_sizes_of_which_no_input_can_be_made_are_an_error(side: Any, tmp_path: Path) -> None:
    config = transformers.ViTConfig(**SIZES, image_size=48)
    model = transformers.ViTModel(config)
    object.__setattr__(config, "image_size", side)

    with pytest.raises(ProgramError, match="cannot make inputs for ViTModel"):
        reading._exported("ViTModel", config, model)

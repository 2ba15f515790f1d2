"""Model scripts have the commands of the vendor's scripts; no compiler has read them."""

import pytest

from whisperport.errors import UsageError
from whisperport.targets.vendors.hailo.model_script import (
    ScriptOptions,
    model_script,
    samples_needed,
)

CHIPS = ("hailo8", "hailo8l", "hailo10h")

# hailocs/hailo-whisper@ebe7a85, conversion/optimization/tiny/hailo8l/encoder_model_script_tiny.alls,
# and base/hailo8/decoder_model_script_base_matmul_split.alls, without comments; sorted.
TINY_ENCODER = {
    "model_optimization_flavor(optimization_level=2, compression_level=0)",
    "post_quantization_optimization(finetune, policy=enabled, dataset_size=3340, epochs=6, "
    "learning_rate=0.00001, batch_size=8)",
    "pre_quantization_optimization(ew_add_fusing, policy=disabled)",
    "pre_quantization_optimization(matmul_correction, layers={matmul*}, "
    "correction_type=zp_comp_block)",
    "model_optimization_config(calibration, batch_size=8, calibset_size=1024)",
    "quantization_param({ew_add*}, precision_mode=a16_w16)",
    "quantization_param(ew_add1, precision_mode=a8_w8)",
    "pre_quantization_optimization(matmul_equalization, layers={matmul*}, matmul_bias=enabled)",
    "performance_param(optimize_for_batch=1)",
    "model_optimization_config(checker_cfg, policy=enabled)",
}
TINY_CONVS = {4, 6, 8, 10, 12, 14, 16, 18, 5, 9, 13, 17}
BASE_DECODER = {
    "model_optimization_flavor(optimization_level=2, compression_level=0)",
    "model_optimization_config(calibration, batch_size=4, calibset_size=256)",
    "post_quantization_optimization(finetune, policy=enabled, dataset_size=1024, epochs=4, "
    "learning_rate=0.00001)",
    "model_optimization_config(checker_cfg, policy=enabled)",
    "quantization_param({ew_add*}, precision_mode=a16_w16)",
    "performance_param(optimize_for_batch=1)",
    "resources_param(max_utilization=0.8)",
}


def _convs(layers: set[int]) -> set[str]:
    return {f"quantization_param(conv{n}, precision_mode=a16_w16)" for n in layers}


def _lines(*arguments: object, **options: object) -> set[str]:
    lines = model_script(*arguments, **options).splitlines()
    assert len(set(lines)) == len(lines)
    return set(lines)


def test_the_script_of_tinys_encoder_holds_the_vendors_commands_but_for_single_layers():
    assert _lines("hailo8l", 384) == TINY_ENCODER


def test_the_published_layers_are_named_only_if_asked_for():
    options = ScriptOptions(sixteen_bit="published-layers")
    assert _lines("hailo8l", 384, options) == TINY_ENCODER | _convs(TINY_CONVS)
    assert _lines("hailo8l", 512, options) >= _convs(TINY_CONVS | {20, 21, 22, 24, 25, 26})


def test_published_layers_are_refused_for_a_graph_they_were_not_counted_in():
    with pytest.raises(UsageError, match="width 128"):
        model_script("hailo8", 128, ScriptOptions(sixteen_bit="published-layers"))


def test_the_script_of_bases_decoder_holds_the_vendors_commands():
    assert _lines("hailo8", 512, program="uncached_decoder") == BASE_DECODER
    published = ScriptOptions(sixteen_bit="published-layers")
    lines = _lines("hailo8", 512, published, program="uncached_decoder")
    assert lines == BASE_DECODER | _convs(set(range(12, 49, 2)))


@pytest.mark.parametrize("program", ["encoder", "uncached_decoder"])
def test_the_10h_adds_its_own_treatment_of_norms(program):
    ten, eight = (_lines(chip, 512, program=program) for chip in ("hailo10h", "hailo8"))
    assert {line.split("(")[1].split(",")[0] for line in ten - eight} == {
        "layer_norm_decomposition"
    }


def test_the_10h_leaves_tinys_decoder_more_room():
    assert "resources_param(max_utilization=0.7)" in _lines(
        "hailo10h", 384, program="uncached_decoder"
    )
    assert "resources_param(max_utilization=0.8)" in _lines(
        "hailo8", 384, program="uncached_decoder"
    )


@pytest.mark.parametrize("chip", CHIPS)
def test_options_change_what_they_name_and_nothing_else(chip):
    usual = _lines(chip, 384)
    level = _lines(chip, 384, ScriptOptions(compiler_optimization_level="max"))
    assert level - usual == {
        "performance_param(compiler_optimization_level=max, optimize_for_batch=1)"
    }
    without = _lines(chip, 384, ScriptOptions(finetune=False))
    assert {line.split("(")[0] for line in usual - without} == {"post_quantization_optimization"}
    assert not any(
        "a16" in line for line in _lines(chip, 384, ScriptOptions(sixteen_bit="nothing"))
    )


def test_no_more_samples_are_asked_for_than_there_are():
    script = model_script("hailo8", 384, samples=100)
    assert "dataset_size=100," in script
    assert "calibset_size=100)" in script
    assert "batch_size=1, calibset_size=1)" in model_script("hailo8", 384, samples=1)


def test_samples_needed_are_those_of_the_longest_reader():
    assert samples_needed(384) == 3340
    assert samples_needed(512) == 2048
    assert samples_needed(384, ScriptOptions(finetune=False)) == 1024
    assert samples_needed(384, program="uncached_decoder") == 1024

"""Names, options and signatures of targets, and activations that 8 bits ruin."""

import math
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport import targets
from whisperport.errors import BundleError, LoweringError, MissingPackageError, UsageError
from whisperport.program.bundle import Bundle
from whisperport.program.execution_providers import CPU
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.runtime import load_engine
from whisperport.targets import TARGETS, RunOptions, get_target, similar_targets
from whisperport.targets.activations import MIN_SQNR_DB, Activation
from whisperport.targets.quantizing import replace_by_quantized
from whisperport.targets.stated_signature import expect_counts, expect_tensor
from whisperport.targets.target_options import NoOptions, Option, by_target, describe

from ..embedded import default_bundle

# Options of targets have types and ranges, and errors list the allowed names and values.


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    level: Annotated[int, Option("How much", low=0, high=3)] = 1
    epochs: Annotated[int | None, Option("How often", low=1)] = None
    fine_tune: Annotated[bool, Option("Whether")] = True
    effort: Annotated[Literal[0, "max"] | None, Option("How hard")] = None
    tables: Annotated[Path | None, Option("Where")] = None


def test_every_type_is_read():
    given = {"level": "3", "epochs": "12", "fine-tune": "off", "effort": "0", "tables": "a/b"}
    made = by_target({f"a.{name}": text for name, text in given.items()}, {"a": Options})
    assert made == {"a": Options(level=3, epochs=12, fine_tune=False, effort=0, tables=Path("a/b"))}


def test_two_targets_have_options_of_their_own():
    made = by_target({"b.level": "2"}, {"a": Options, "b": Options, "c": NoOptions})
    assert made == {"a": Options(), "b": Options(level=2), "c": NoOptions()}


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("a.level", "4", "expected 0 to 3"),
        ("a.level", "two", "expected 0 to 3"),
        ("a.level", "", "expected 0 to 3"),
        ("a.epochs", "0", "expected 1 or more"),
        ("a.fine-tune", "perhaps", "expected on or off"),
        ("a.effort", "1", "expected 0, max"),
        ("a.tables", "", "expected a path"),
        ("a.fine_tune", "on", "a.level, a.epochs, a.fine-tune, a.effort, a.tables"),
        ("b.level", "1", "a.level, a.epochs, a.fine-tune, a.effort, a.tables"),
        ("level", "1", "a.level, a.epochs, a.fine-tune, a.effort, a.tables"),
    ],
)
def test_what_is_no_option_or_no_value_is_refused_with_those_there_are(name, value, hint):
    with pytest.raises(UsageError) as caught:
        by_target({name: value}, {"a": Options})
    assert hint in caught.value.hint


def test_options_are_described_for_people():
    shown = {one.name: (one.values, one.default, one.help) for one in describe(Options)}
    assert shown == {
        "level": ("0 to 3", "1", "How much"),
        "epochs": ("1 or more", "", "How often"),
        "fine-tune": ("on or off", "on", "Whether"),
        "effort": ("0, max", "", "How hard"),
        "tables": ("a path", "", "Where"),
    }


def test_emulation_has_one_name_and_one_meaning() -> None:
    """In every target: `emulate=on` runs on the CPU, and `compile --option TARGET.emulate` counts clips."""
    for target in TARGETS:
        run = {one.name: one for one in describe(target.run_options)}
        assert target.spec.runs.emulation in ({}, {"emulate": "on"})
        assert ("emulate" in run) == bool(target.spec.runs.emulation)
        compiled = describe(target.compiler.options) if target.compiler else ()
        names = {one.name for one in (*run.values(), *compiled)}
        assert not names & {"emulation", "simulate", "simulation"}
        for one in compiled:
            assert one.name != "emulate" or one.values == "0 to 1000"


@pytest.mark.parametrize("threads", [0, 1025, 2**63])
def test_a_number_of_threads_that_no_runtime_takes_is_a_usage_error(threads: int) -> None:
    with pytest.raises(UsageError, match=f"`threads` is {threads}"):
        RunOptions(threads=threads)


# The run options of the target `onnxruntime` that place programs on an execution provider.


AZURE = "AzureExecutionProvider"  # ONNX Runtime's wheel has it


@pytest.fixture(scope="module")
def entries():
    bundle = Bundle.open(default_bundle())
    return [e for e in bundle.manifest.programs if e.spec.name in ("cross_kv", "step")]


def load(entries, **options):
    named = {f"onnxruntime.{name.replace('_', '-')}": text for name, text in options.items()}
    run = RunOptions(threads=1, options=named)
    return get_target("onnxruntime").load(default_bundle(), entries, run)


def providers(runner):
    return runner._session.get_providers()


def test_only_the_named_programs_run_on_the_provider(entries):
    runners = load(entries, provider=AZURE, provider_programs="cross_kv")

    # then: ONNX Runtime adds the CPU to every other provider
    assert providers(runners["cross_kv"]) == [AZURE, CPU]
    assert providers(runners["step"]) == [CPU]
    plain = load(entries)["cross_kv"]
    features = np.random.default_rng(0).standard_normal(entries[0].spec.inputs[0].shape)
    inputs = {entries[0].spec.inputs[0].name: features.astype(np.float32)}
    found, expected = runners["cross_kv"].run(inputs), plain.run(inputs)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_the_encoder_may_be_named_where_it_is_not_loaded():
    """A command line stays the same if the features come from a device."""
    run = RunOptions(threads=1, options={"onnxruntime.provider-programs": "encoder"})

    engine = load_engine(Bundle.open(default_bundle()), run, encoder=False)

    with pytest.raises(UsageError, match="`encoder` is not loaded"):
        engine.encode(np.zeros((engine.dims.n_mels, engine.dims.n_frames), np.float32))


def test_a_provider_that_declines_all_nodes_is_a_warning(entries, caplog):
    load(entries[:1], provider=AZURE)
    load(entries[:1])

    (record,) = caplog.records
    assert f"`{AZURE}` declined all nodes of onnxruntime/cross_kv.onnx" in record.getMessage()


def test_options_are_passed_to_the_provider(entries, monkeypatch):
    import onnxruntime

    passed = []
    session = onnxruntime.InferenceSession

    def recording(*arguments, providers, **named):
        passed.append(providers)
        return session(*arguments, providers=[providers[0][0]], **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", recording)

    load(entries, provider=AZURE, provider_programs="step", provider_options="A=1; B=--x=2 --y;")

    assert passed == [[(CPU, {})], [(AZURE, {"A": "1", "B": "--x=2 --y"})]]


def test_an_error_of_the_provider_is_not_hidden_by_the_cpu(entries, monkeypatch):
    import onnxruntime

    def raises(*arguments, providers, **named):
        assert named["enable_fallback"] == 0
        raise RuntimeError("unordered_map::at")

    monkeypatch.setattr(onnxruntime, "InferenceSession", raises)

    with pytest.raises(LoweringError, match=f"`{AZURE}` cannot load") as caught:
        load(entries, provider=AZURE)
    assert "--each-program" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"provider_options": "A"}, "cannot contain `A`"),
        ({"provider_options": "=1"}, "cannot contain `=1`"),
        ({"provider_options": "A=1;A=2"}, "cannot contain `A=2`"),
        ({"provider_programs": "encodr"}, "names `encodr`"),
        ({"provider_programs": "step,"}, "names ``"),
    ],
)
def test_wrong_options_are_refused(entries, options, message):
    with pytest.raises(UsageError, match=message):
        load(entries, provider=AZURE, **options)


# A misspelt target, or a general word for a chip or a vendor, is answered with the targets it can mean.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("onxruntime", ["onnxruntime"]),
        ("OnnxRuntime", ["onnxruntime"]),
        ("hailo", ["hailo8", "hailo8l", "hailo10h"]),
        ("openvin", ["openvino", "openvino-npu"]),
        ("cpu", ["onnxruntime", "xnnpack", "litert", "openvino", "genio350"]),
        ("nothing-like-it", []),
    ],
)
def test_a_misspelt_target_has_suggestions(name: str, expected: list[str]) -> None:
    assert sorted(similar_targets(name, TARGETS)) == sorted(expected)


@pytest.mark.parametrize(
    ("word", "member"),
    [
        ("cpu", "onnxruntime"),
        ("snapdragon", "sm8650"),
        ("qualcomm", "sm8650"),
        ("genio", "genio720"),
        ("mediatek", "genio720"),
        ("rockchip", "rk3588"),
        ("inferentia", "aws-neuron"),
    ],
)
def test_a_general_word_names_the_targets_that_it_can_mean(word: str, member: str) -> None:
    with pytest.raises(UsageError) as unknown:
        get_target(word)

    assert member in unknown.value.why
    assert "`whisperport targets`" in unknown.value.hint


# A target is imported with the targets before it, and not with those after it.

SHOW = "import sys, whisperport.targets as t; {}; print(*sorted(sys.modules), sep='\\n')"


def imported(code: str) -> set[str]:
    """Return the modules of targets that a new process has imported after it ran the code."""
    found = subprocess.run(
        [sys.executable, "-c", SHOW.format(code)], capture_output=True, text=True, check=True
    )
    return {name for name in found.stdout.split() if name.startswith("whisperport.targets.")}


def test_the_first_target_is_found_without_the_others() -> None:
    found = imported("t.get_target('onnxruntime')")

    assert "whisperport.targets.cpu.onnxruntime" in found
    assert not [name for name in found if name.endswith(".target")]


def test_a_transcriber_imports_the_targets_of_its_bundle_only() -> None:
    found = imported(
        f"from whisperport.transcription import Transcriber; Transcriber({str(default_bundle())!r})"
    )

    assert "whisperport.targets.cpu.onnxruntime" in found
    assert not [name for name in found if name.endswith(".target")]


def test_each_target_is_found_by_its_name_and_is_the_same_each_time() -> None:
    names = [target.spec.name for target in TARGETS]

    assert len(set(names)) == len(names) > 20
    assert [get_target(name) for name in names] == list(TARGETS)
    assert targets.TARGETS is TARGETS


def test_an_unknown_name_is_an_error_that_lists_all_targets() -> None:
    with pytest.raises(UsageError) as caught:
        get_target("mystery")

    assert all(target.spec.name in caught.value.hint for target in TARGETS)
    with pytest.raises(AttributeError, match="MYSTERY"):
        _ = targets.MYSTERY  # type: ignore[attr-defined]


# A runtime's stated signature is compared with the manifest's.

TENSOR = TensorSpec("mel", (1, 80, 3000))
SPEC = ProgramSpec("encoder", (TENSOR,), (TensorSpec("features", (1, 1500, 8)),))


@pytest.mark.parametrize("shape", [(1, 80, 3000), (1, None, 3000), ("batch", 80, "time")])
def test_an_axis_without_a_number_has_any_size(shape: tuple[int | str | None, ...]) -> None:
    expect_tensor("encoder.bin", TENSOR, shape, "float32", fits=True)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((1, 80, 2999), True),
        ((None, 80, 2999), True),
        ((1, 80), True),
        ((), True),
        ((1, 80, 3000, 1), True),
        ((1, 80, -1), True),
        ((1, 80, 3000), False),
    ],
)
def test_another_shape_or_dtype_is_an_error_that_names_both(
    shape: tuple[int | None, ...], fits: bool
) -> None:
    with pytest.raises(BundleError, match=r"encoder\.bin has another signature") as raised:
        expect_tensor("encoder.bin", TENSOR, shape, "f16", fits=fits)

    assert raised.value.why == f"'mel' is {list(shape)} f16; expected [1, 80, 3000] float32"
    assert raised.value.hint


@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_other_numbers_of_inputs_and_outputs_are_an_error(counts: tuple[int, int]) -> None:
    expect_counts("encoder.bin", SPEC, 1, 1)
    with pytest.raises(BundleError, match="another signature") as raised:
        expect_counts("encoder.bin", SPEC, *counts)

    assert "expected 1 and 1" in raised.value.why


# Activations, and files that are replaced by their quantized form

# Activations that 8 bits ruin are found by their frames, and described by channel and frames.


def activation(*samples: np.ndarray) -> Activation:
    found = Activation("mlp.2")
    for sample in samples:
        found.add(sample)
    return found


def noise(seed: int, frames: int = 200, channels: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, frames, channels)).astype(np.float32)


def massive(value: float, channel: int = 3, frames: tuple[int, ...] = (190, 195)) -> np.ndarray:
    values = noise(0)
    values[:, frames, channel] = value
    return values


def test_a_typical_activation_has_the_noise_of_one_step() -> None:
    values = noise(0)
    step = (values.max() - values.min()) / 255
    rounded = np.round(values / step) * step
    measured = 10 * math.log10(np.mean(values**2) / np.mean((rounded - values) ** 2))

    assert activation(values).sqnr_db() == pytest.approx(measured, abs=0.5)


def test_a_channel_that_is_massive_in_every_frame_is_found() -> None:
    values = noise(0)
    values[..., 3] *= 2000

    assert activation(values).sqnr_db() < 0


def test_16_bits_have_48_db_more() -> None:
    found = activation(noise(0))

    assert found.sqnr_db(16) == pytest.approx(found.sqnr_db(8) + 48.2, abs=0.1)


@pytest.mark.parametrize("value", [-900.0, 900.0])
def test_a_massive_channel_in_few_frames_is_found_although_the_sqnr_of_the_tensor_is_good(
    value: float,
) -> None:
    values = massive(value)
    step = (values.max() - values.min()) / 255
    of_tensor = 10 * math.log10(12 * np.mean(values**2) / step**2)

    found = activation(noise(1), values)

    assert of_tensor > MIN_SQNR_DB
    assert found.sqnr_db() < 0
    assert str(found).startswith(f"mlp.2: channel 3 reaches {value:.4g}, ")
    assert "in 2 of 400 frames" in str(found)


@given(factor=st.floats(1e-6, 1e6), shift=st.integers(0, 15))
def test_scale_and_order_of_channels_change_nothing_but_the_channel(
    factor: float, shift: int
) -> None:
    before = activation(massive(-500.0))
    after = activation(np.roll(massive(-500.0), shift, axis=-1) * np.float64(factor))

    assert after.sqnr_db() == pytest.approx(before.sqnr_db(), abs=1e-3)
    assert f"channel {(3 + shift) % 16} reaches" in str(after)


def test_zeros_are_exact() -> None:
    zeros = np.zeros((1, 4, 2), np.float32)
    spike = zeros.copy()
    spike[0, 0, 0] = 1

    assert activation(zeros).sqnr_db() == activation(spike).sqnr_db() == math.inf


# A file is replaced by its quantized form completely, or not at all.

NAMES = {"failure": "it could not quantize", "missing": "it is absent", "target": "t", "extra": "e"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step.bin"
    path.write_bytes(b"float")
    path.chmod(0o640)
    return path


def test_the_file_is_replaced_and_keeps_its_mode(file: Path) -> None:
    def quantize(source: Path, made: Path) -> None:
        made.with_name("temporary").write_bytes(b"")
        made.write_bytes(source.read_bytes() + b" as integers")

    replace_by_quantized(file, quantize, **NAMES)

    assert file.read_bytes() == b"float as integers"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("error", "expected", "what", "why"),
    [
        (
            KeyError("x"),
            LoweringError,
            "it could not quantize step.bin for `t`",
            "KeyError: 'x'",
        ),
        (RuntimeError(), LoweringError, "for `t`", "RuntimeError: "),
        (RuntimeError("first\nsecond"), LoweringError, "for `t`", "RuntimeError: first"),
        (ImportError("no q"), MissingPackageError, "cannot quantize for `t`: it is absent", "no q"),
    ],
)
def test_after_an_error_the_file_is_unchanged(
    file: Path, error: Exception, expected: Any, what: str, why: str
) -> None:
    def quantize(source: Path, made: Path) -> None:
        made.write_bytes(b"half")
        raise error

    with pytest.raises(expected) as raised:
        replace_by_quantized(file, quantize, **NAMES)

    assert what in raised.value.what
    assert raised.value.why == why
    assert raised.value.hint
    assert file.read_bytes() == b"float"
    assert list(file.parent.iterdir()) == [file]


def test_a_quantizer_that_writes_nothing_is_an_error(file: Path) -> None:
    with pytest.raises(LoweringError):
        replace_by_quantized(file, lambda source, made: None, **NAMES)

    assert file.read_bytes() == b"float"

"""The target `aws-neuron`: exports, transcripts, precisions, errors, and its calls of the SDK."""

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from whisperport.errors import BundleError, LoweringError, MissingPackageError, UsageError
from whisperport.model.trace.program import Program, trace
from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.runtime import DecodeOptions
from whisperport.speech.audio import load_audio
from whisperport.targets import RunOptions, get_target
from whisperport.targets.target_options import parse_options, with_target
from whisperport.targets.vendors.aws_neuron import neuron_modules, runtime
from whisperport.targets.vendors.aws_neuron.chips import (
    CHIPS,
    FIGURES,
    GIB,
    INSTANCES,
    RELEASE,
    machines,
)
from whisperport.targets.vendors.aws_neuron.codes import CODES, code_in, explained
from whisperport.targets.vendors.aws_neuron.flags import CompileOptions, arguments_of
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.verification.clips import shipped_audio

from ....embedded import default_bundle
from ....extent import EVERYTHING

# The target `aws-neuron`: exports, transcripts, precisions, errors, and its calls of the SDK.

NAME = "aws-neuron"
ON_CPU = RunOptions(threads=1, options=with_target({"emulate": "on"}, NAME))
ON_DEVICE = RunOptions()
COLD = (0.0,)
WAYS = {
    "greedy": TranscribeOptions(temperatures=COLD),
    "5 beams": TranscribeOptions(temperatures=COLD, decode=DecodeOptions(beam_size=5)),
    "word timestamps": TranscribeOptions(temperatures=COLD, word_timestamps=True),
    "prompt": TranscribeOptions(temperatures=COLD, initial_prompt="Good evening, Anna."),
}


# Transcripts -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def transcribers(exported: Callable[..., Bundle]) -> dict[str, Transcriber]:
    """The embedded model on this target, emulated, and the embedded bundle, which another target runs."""
    return {
        NAME: Transcriber(exported(NAME, "default"), ON_CPU),
        "embedded": Transcriber(default_bundle(), RunOptions(threads=1, short_windows=False)),
    }


# In the core, test_resident.py decodes windows of a small model in these ways.
@pytest.mark.skipif(not EVERYTHING, reason="an export takes 13 s; see `make test-all`")
@pytest.mark.parametrize("way", WAYS)
def test_transcripts_are_those_of_another_target_token_for_token(
    way: str, transcribers: dict[str, Transcriber]
) -> None:
    for clip in shipped_audio():
        samples = load_audio(clip.path)

        found, expected = (one.transcribe(samples, WAYS[way]) for one in transcribers.values())

        assert [one.tokens for one in found.segments] == [one.tokens for one in expected.segments]
        assert found.text == expected.text
        assert bool(found.text) == bool(clip.text)
        for segment, other in zip(found.segments, expected.segments, strict=True):
            words = [
                [(w.word, round(w.start, 2), round(w.end, 2)) for w in s.words or ()]
                for s in (segment, other)
            ]
            assert words[0] == words[1]
            assert bool(words[0]) == (way == "word timestamps" and bool(segment.tokens))


def test_an_export_is_emulated_and_claims_no_run(exported: Callable[..., Bundle]) -> None:
    manifest = exported(NAME, "one layer").manifest

    assert manifest.verified
    for entry in manifest.programs:
        assert entry.target == NAME
        assert manifest.status(entry.spec.name) == "checked against vendor documentation"
        assert {one.kind for one in entry.evidence} == {"emulated"}
        assert not [file for file in entry.files if file.endswith(".py")]  # a bundle has no code


@pytest.mark.skipif(not EVERYTHING, reason="an export takes 15 s; see `make test-all`")
def test_bfloat16_transcribes_within_its_tolerance(exported: Callable[..., Bundle]) -> None:
    bundle = exported(NAME, "tiny", precision="bf16")

    assert bundle.manifest.verified
    assert {entry.precision for entry in bundle.manifest.programs} == {"bf16"}
    assert (bundle.folder / NAME / "bf16.safetensors").is_file()


# Lowering ----------------------------------------------------------------------------------------


@pytest.fixture
def lowered(micro_programs: tuple[Program, ...], tmp_path: Path) -> tuple[Path, list[ProgramEntry]]:
    return tmp_path, get_target(NAME).lower(micro_programs, tmp_path)


def test_decode_programs_have_resident_state_and_the_encoder_computes_the_cross_attention_k_v(
    lowered: tuple[Path, list[ProgramEntry]],
) -> None:
    description = neuron_modules.read_description(lowered[0] / NAME / "fp32.json")

    programs = description["programs"]
    stateful = {name for name, record in programs.items() if record["state"]}
    assert stateful == {"prefill_4", "prefill_64", "step", "align"}
    assert len(programs["encoder"]["results"]) == 1 + len(programs["cross_kv"]["results"]) == 5


def test_precisions_have_files_of_their_own_and_no_common_graph(
    micro_programs: tuple[Program, ...], tmp_path: Path
) -> None:
    target = get_target(NAME).with_precisions({"encoder": "bf16"})

    entries = target.lower(micro_programs, tmp_path)

    by_name = {entry.spec.name: entry for entry in entries}
    assert by_name["encoder"].files == (f"{NAME}/bf16.json", f"{NAME}/bf16.safetensors")
    assert by_name["step"].files == (f"{NAME}/fp32.json", f"{NAME}/fp32.safetensors")
    runners = target.load(tmp_path, entries, ON_CPU)
    mel = np.zeros(by_name["encoder"].spec.inputs[0].shape, np.float32)
    assert runners["encoder"].run({"mel": mel})["features"].dtype == np.float32


class Various(nn.Module):
    """Constants, slices, an argument of each kind, and an output that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = self.table.index_select(0, index)  # type: ignore[operator]
        first, second = (x + rows).split(1)
        hidden = torch.where(first > 1, first, torch.full_like(second, -torch.inf))
        y = nn.functional.gelu(second, approximate="tanh").to(torch.float16).to(torch.float32)
        z = torch.zeros(1, 3)
        z += y
        return hidden, z, x


def test_a_third_partys_program_is_lowered_as_a_graph(tmp_path: Path) -> None:
    module = Various()
    inputs = torch.randn(2, 3), torch.tensor([1, 0])
    program = trace("various", module, inputs, ["a", "b", "c"])
    target = get_target(NAME)

    entry, facts = target.lower_file(program, tmp_path / "various.json")
    runner = target.load(tmp_path, [entry], ON_CPU)["various"]
    found = runner.run({"x": inputs[0].numpy(), "index": inputs[1].numpy()})

    assert facts["delegated"] > 5
    for one, expected in zip(found.values(), module(*inputs), strict=True):
        np.testing.assert_allclose(one, expected.numpy(), atol=1e-6)


# Errors ------------------------------------------------------------------------------------------


def test_without_the_sdk_the_error_tells_how_to_get_it_or_to_emulate(
    lowered: tuple[Path, list[ProgramEntry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch_neuronx", None)

    with pytest.raises(MissingPackageError) as missing:
        get_target(NAME).load(*lowered, ON_DEVICE)

    assert "torch_neuronx is not installed" in missing.value.what
    assert "aws-neuron.emulate=on" in missing.value.hint


def test_a_placeholder_of_the_sdk_is_recognized(
    lowered: tuple[Path, list[ProgramEntry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch_neuronx", SimpleNamespace(__version__="1.0"))

    with pytest.raises(MissingPackageError, match=r"torch_neuronx 1.0 has no function") as missing:
        get_target(NAME).load(*lowered, ON_DEVICE)

    assert "AWS's own index" in missing.value.hint


def test_without_a_device_the_error_says_so(
    lowered: tuple[Path, list[ProgramEntry]],
    sdk: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(runtime, "DEVICES", tmp_path)

    with pytest.raises(LoweringError, match="no Neuron device") as absent:
        get_target(NAME).load(*lowered, ON_DEVICE)

    assert "neuron-ls" in absent.value.hint
    assert sdk.moved == []


def test_a_program_that_is_not_compiled_is_refused_with_the_command(
    lowered: tuple[Path, list[ProgramEntry]], sdk: Any
) -> None:
    with pytest.raises(BundleError, match="`encoder` is not compiled") as refused:
        get_target(NAME).load(*lowered, ON_DEVICE)

    assert "whisperport compile" in refused.value.hint


@pytest.mark.parametrize("file", ["fp32.json", "fp32.safetensors"])
def test_a_damaged_file_is_named(lowered: tuple[Path, list[ProgramEntry]], file: str) -> None:
    path = lowered[0] / NAME / file
    path.write_bytes(path.read_bytes()[:-10])

    with pytest.raises(BundleError, match="damaged") as refused:
        get_target(NAME).load(*lowered, ON_CPU)

    assert "export" in refused.value.hint


def test_a_missing_file_is_named(lowered: tuple[Path, list[ProgramEntry]]) -> None:
    folder, entries = lowered
    only = [replace(entries[0], files=entries[0].files[1:])]

    with pytest.raises(BundleError, match=r"cannot load `encoder`"):
        get_target(NAME).load(folder, only, ON_CPU)


# On a device: calls of a fake SDK ------------------------------------------------------------------


class Traced:
    """A compiled module as `torch_neuronx` has it: `states` of the aliases, and separate `weights`."""

    def __init__(self, folder: Path, program: str) -> None:
        description = neuron_modules.read_description(folder / NAME / "fp32.json")
        weights = neuron_modules.read_weights(folder / NAME / "fp32.safetensors")
        self.module, _, self.aliases = neuron_modules.build(description, weights, program)
        aliased = {id(state) for state in self.aliases}
        self.states = SimpleNamespace(
            named_parameters=lambda: [(str(i), s) for i, s in enumerate(self.aliases)]
        )
        separate = [
            ("model->" + name.replace(".", "->"), one)
            for name, one in self.module.named_parameters()
            if id(one) not in aliased
        ]
        self.weights = SimpleNamespace(named_parameters=lambda: separate)

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return list(neuron_modules.run(self.module, inputs, self.aliases))


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A `torch_neuronx` with one device. Compiled files are folders' programs, by their names."""
    moved: list[tuple[Any, int]] = []
    fake = SimpleNamespace(
        moved=moved, move_trace_to_device=lambda traced, core: moved.append((traced, core))
    )
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "neuron0").touch()
    monkeypatch.setattr(runtime, "DEVICES", tmp_path / "dev")
    monkeypatch.setitem(sys.modules, "torch_neuronx", fake)
    return fake


@pytest.fixture
def compiled(
    lowered: tuple[Path, list[ProgramEntry]], monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[ProgramEntry]]:
    folder, entries = lowered
    for entry in entries:
        (folder / NAME / f"{entry.spec.name}.pt").write_bytes(b"compiled")
    monkeypatch.setattr(torch.jit, "load", lambda path: Traced(folder, Path(path).stem))
    return folder, [
        replace(entry, files=(f"{NAME}/{entry.spec.name}.pt", *entry.files)) for entry in entries
    ]


@pytest.mark.usefixtures("sdk")
@pytest.mark.parametrize("program", ["encoder", "cross_kv", "prefill_4", "step", "align"])
def test_compiled_programs_get_state_and_inputs_as_on_the_cpu(
    program: str, compiled: tuple[Path, list[ProgramEntry]]
) -> None:
    target = get_target(NAME)
    on_device, on_cpu = (target.load(*compiled, run)[program] for run in (ON_DEVICE, ON_CPU))
    random = np.random.default_rng(0)
    inputs = {t.name: random.standard_normal(t.shape).astype(t.dtype) for t in on_cpu.spec.inputs}
    if "mask" in inputs:
        inputs["mask"] = np.where(inputs["mask"] > 0, 0, -30_000).astype(np.float32)

    found, expected = on_device.run(inputs), on_cpu.run(inputs)

    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_weights_are_moved_once_to_the_core_that_is_asked_for(
    compiled: tuple[Path, list[ProgramEntry]], sdk: Any
) -> None:
    options = RunOptions(options={"aws-neuron.core": "3"})

    runners = get_target(NAME).load(*compiled, options)

    assert [core for _, core in sdk.moved] == [3] * len(runners)
    assert len({id(traced) for traced, _ in sdk.moved}) == len(runners)


@pytest.mark.usefixtures("sdk")
def test_a_compiled_program_without_writable_cross_attention_k_v_is_refused(
    compiled: tuple[Path, list[ProgramEntry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Traced, "weights", None, raising=False)
    monkeypatch.setattr(
        Traced,
        "__setattr__",
        lambda self, name, value: name != "weights" and object.__setattr__(self, name, value),
    )
    runner = get_target(NAME).load(*compiled, ON_DEVICE)["step"]
    inputs = {t.name: np.zeros(t.shape, t.dtype) for t in runner.spec.inputs}

    with pytest.raises(LoweringError, match="no state `cross_k_0`") as refused:
        runner.run(inputs)

    assert "self_k_0" in refused.value.why


def test_an_error_of_the_runtime_is_translated(
    compiled: tuple[Path, list[ProgramEntry]], sdk: Any
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("The PyTorch Neuron Runtime could not be initialized.")

    sdk.move_trace_to_device = fail

    with pytest.raises(LoweringError, match="Neuron runtime reported an error") as refused:
        get_target(NAME).load(*compiled, ON_DEVICE)

    assert "could not be initialized" in refused.value.why


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"torch-compile": "neuron", "emulate": "on"}, "contradicts"),
        ({"torch-compile": "inductor"}, "contradicts"),
        ({"torch-compile": "cuda"}, "torch-compile"),
    ],
)
def test_a_backend_runs_where_it_can(options: dict[str, str], part: str, lowered: Any) -> None:
    with pytest.raises(UsageError, match=part):
        get_target(NAME).load(*lowered, RunOptions(options=with_target(options, NAME)))


WITH_TORCH_NEURON = RunOptions(options=with_target({"torch-compile": "neuron"}, NAME))


def test_without_torch_neuron_or_a_device_the_error_says_what_is_missing(
    lowered: tuple[Path, list[ProgramEntry]], sdk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingPackageError, match="adds no device `neuron`") as refused:
        get_target(NAME).load(*lowered, WITH_TORCH_NEURON)  # the SDK of torch 2.9
    assert "whisperport compile" in refused.value.hint

    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "neuron")
    (runtime.DEVICES / "neuron0").unlink()
    with pytest.raises(LoweringError, match="no Neuron device"):
        get_target(NAME).load(*lowered, WITH_TORCH_NEURON)

    monkeypatch.setitem(sys.modules, "torch_neuronx", None)
    with pytest.raises(MissingPackageError, match="TorchNeuron is not installed"):
        get_target(NAME).load(*lowered, WITH_TORCH_NEURON)


@pytest.mark.usefixtures("sdk")
def test_a_torch_without_the_device_is_an_error_of_the_program(
    lowered: tuple[Path, list[ProgramEntry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "neuron")

    with pytest.raises(LoweringError, match="`encoder` on neuron:0"):
        get_target(NAME).load(*lowered, WITH_TORCH_NEURON)


# Options of the compiler become arguments that AWS's reference has; what is verified cannot be changed.

RECORDED = json.loads(Path(__file__).with_name("signatures.json").read_text(encoding="utf-8"))


def parsed(**given: object) -> CompileOptions:
    texts = {name.replace("_", "-"): str(value) for name, value in given.items()}
    options: CompileOptions = parse_options(CompileOptions, texts, "aws-neuron")
    return options


@pytest.mark.parametrize("chip", CHIPS)
def test_every_choice_becomes_arguments_of_the_compilers_reference(chip):
    known = RECORDED["compiler_arguments"]
    for optlevel, model_type in itertools.product((1, 2, 3), ("transformer", "generic")):
        arguments = arguments_of(parsed(chip=chip, optlevel=optlevel, model_type=model_type))
        pairs = dict(zip(arguments[::2], arguments[1::2], strict=True))
        assert all(value in known[name] for name, value in pairs.items())
        assert pairs["--target"] == chip
        assert pairs["--auto-cast"] == "none"
        assert ("--logical-nc-config" in pairs) == (chip in RECORDED["lnc_targets"])


@pytest.mark.parametrize(("chip", "default"), [("inf2", 1), ("trn1", 1), ("trn2", 2), ("trn3", 2)])
def test_the_size_of_a_logical_core_is_the_chips_default_or_the_users(chip, default):
    assert parsed(chip=chip).chosen_lnc() == default
    assert parsed(chip=chip, lnc=1).chosen_lnc() == 1
    if default == 2:
        assert parsed(chip=chip, lnc=2).chosen_lnc() == 2
        return
    with pytest.raises(UsageError, match="cannot combine 2") as raised:
        arguments_of(parsed(chip=chip, lnc=2))
    assert "trn2, trn3" in raised.value.hint


def test_further_arguments_are_split_as_in_a_shell():
    flags = "--verbose info --implicit-integer-downcast='dot,pow'"
    assert arguments_of(parsed(flags=flags))[-3:] == [
        *("--verbose", "info"),
        "--implicit-integer-downcast=dot,pow",
    ]


@pytest.mark.parametrize(
    "flags",
    [
        *("--target trn2", "--target=trn2", "-lnc 2", "--lnc=2", "--logical-nc-config 1", "-O3"),
        *("--optlevel=1", "--model-type generic", "--auto-cast all", "--auto-cast-type=bf16"),
        *("--verbose 'info", "--logfile /tmp/x", "--output=a.neff", "--framework XLA"),
    ],
)
def test_further_arguments_cannot_set_what_an_option_sets_or_change_what_was_verified(flags):
    with pytest.raises(UsageError, match=r"aws-neuron\.flags"):
        arguments_of(parsed(flags=flags))


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_every_figure_of_a_chip_has_a_source_of_one_commit(chip):
    assert {*FIGURES, "lncs", "compiler_target"} <= set(chip.sources)
    for field, source in chip.sources.items():
        assert hasattr(chip, field)
        assert source.startswith(RELEASE)
    assert "@81ce03a" in RELEASE
    assert chip.compiler_target in RECORDED["compiler_arguments"]["--target"]
    assert chip.cores % max(chip.lncs) == 0


def test_totals_of_instances_are_those_of_awss_tables():
    # Source: inf2-arch.rst, trn1-arch.rst, trn2-arch.rst, trn3-arch.rst; per UltraServer 4 or 36 servers.
    totals = {
        "inf2.48xlarge": (384, 2280, 570),
        "trn1.32xlarge": (512, 3040, 760),
        "trn2.48xlarge": (1536, 10_700, 2900),
        "trn3 server, Gen1": (9216 / 4, 42_944 / 4, 11_712 / 4),
        "trn3 server, Gen2": (20_736 / 36, 96_624 / 36, 26_352 / 36),
    }
    found = {one.name: one for one in INSTANCES}
    for name, (memory, bf16, fp32) in totals.items():
        one = found[name]
        assert one.chips * one.chip.memory_bytes == memory * GIB
        assert one.chips * one.chip.flops["bf16"] / 1e12 == pytest.approx(bf16, rel=0.005)
        assert one.chips * one.chip.flops["fp32"] / 1e12 == pytest.approx(fp32, rel=0.005)


def test_a_logical_core_of_trn2_has_one_bank_of_memory():
    found = {one.name: one for one in machines()}
    assert found["trn2.48xlarge, lnc=2"].cores == 64  # "presents 64 available NeuronCores"
    assert found["trn2.48xlarge, lnc=1"].cores == 128
    assert found["trn2.48xlarge, lnc=2"].memory_bytes == 24 * GIB
    assert found["inf2.xlarge"].cores == 2


def test_every_code_says_what_happened_and_what_to_do():
    for code in CODES:
        assert code_in(f"2026-01-01 ERROR [NCC_{code}] words") == code
        what, hint = explained(code, "step") or ("", "")
        assert what.endswith(f"(NCC_{code})")
        assert hint
        assert "{program}" not in hint


@pytest.mark.parametrize("text", ["", "NCC_", "XNCC_EVRF001", "NCC_EVRF0011", "ncc_evrf001"])
def test_a_text_without_a_code_has_none(text):
    assert code_in(text) == ""
    assert explained("EZZZ999", "step") is None

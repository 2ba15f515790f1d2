"""Tests that every target must pass; a new target is tested as soon as TARGETS lists it.

The dummy vendor of the tests is held to them too, as if it were listed.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from whisperport import targets
from whisperport.build.doctor import extras
from whisperport.errors import BundleError, MissingPackageError, UsageError
from whisperport.model.network.whisper import build_model
from whisperport.model.trace.program import Program, trace
from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.program.masks import MASKED
from whisperport.program.runner import Binding, Runner
from whisperport.program.signatures import LOGSUMEXP
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.runtime import DecodeOptions, Decoder, decode_window, load_engine
from whisperport.runtime.decoding.gbnf import checked_rules
from whisperport.runtime.decoding.grammar import Grammar, Spellings
from whisperport.runtime.decoding.phrases import Phrases, Spelling
from whisperport.targets import RunOptions, Target, get_target
from whisperport.targets.target_options import describe, parse_options, with_target
from whisperport.verification import GATES, compare

from ..dummy_vendor.listed import WITH_DUMMY
from ..extent import core_or_all
from ..shared_exports import SharedExports

ONE_THREAD = RunOptions(threads=1)
RUN_HERE = [target for target in WITH_DUMMY if not target.spec.runs.emulation]
# Chips of one vendor are lowered by the same code: the last chip of each vendor is the core.
SDK_PARTS = {"ethos-u": {"executorch", "torchao", "tosa", "tosa_reference_model"}}
LOWERED = core_or_all(list({type(one): one for one in WITH_DUMMY}.values()), WITH_DUMMY)
# Of the targets whose files the same code writes, the first.
WRITTEN = {(type(one).lower, type(one).lower_file): one for one in reversed(WITH_DUMMY)}


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "TARGETS", WITH_DUMMY)


@pytest.fixture(params=WITH_DUMMY, ids=lambda target: target.spec.name)
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


@pytest.fixture(params=LOWERED, ids=lambda target: target.spec.name)
def lowered(request: pytest.FixtureRequest) -> Target:
    """A target whose lowering is tested."""
    return request.param


@pytest.fixture(params=RUN_HERE, ids=lambda target: target.spec.name)
def here(request: pytest.FixtureRequest) -> Target:
    """A target that can run all programs on this machine."""
    return request.param


@pytest.fixture
def bundle(here: Target, exported: SharedExports) -> Bundle:
    return exported(here.spec.name)


@pytest.fixture
def runners(here: Target, bundle: Bundle) -> dict[str, Runner]:
    return here.load(bundle.folder, bundle.manifest.programs, ONE_THREAD)


def run_options(target: Target) -> RunOptions:
    """Return run options with emulation, if the target has one."""
    return RunOptions(threads=1, options=with_target(target.spec.runs.emulation, target.spec.name))


@pytest.fixture(scope="module")
def plain() -> Program:
    """A linear of random weights, the same for all tests."""
    torch.manual_seed(0)
    return linear()


@pytest.fixture(scope="module")
def lowered_once(
    plain: Program, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Target, Path], ProgramEntry]:
    """`lowered_once(target, folder)`: the entry of `plain`, whose files it copies to the folder."""
    made: dict[str, tuple[Path, ProgramEntry]] = {}

    def copied(target: Target, folder: Path) -> ProgramEntry:
        name = target.spec.name
        if name not in made:
            own = tmp_path_factory.mktemp(name)
            made[name] = own, *target.lower([plain], own)
        shutil.copytree(made[name][0], folder, dirs_exist_ok=True)
        return made[name][1]

    return copied


def linear(width: int = 8) -> Program:
    return trace("plain", nn.Linear(width, 4), (torch.zeros(1, width),), ["y"])


def random_inputs(spec: ProgramSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Return noise, and a mask that hides half of the positions, as the runtime's masks do."""
    random = np.random.default_rng(seed)

    def of(tensor: TensorSpec) -> np.ndarray:
        if tensor.name == "mask":
            hidden = np.where(random.random(tensor.shape) < 0.5, MASKED, 0)
            return hidden.astype(tensor.dtype)
        return random.standard_normal(tensor.shape).astype(tensor.dtype)

    return {tensor.name: of(tensor) for tensor in spec.inputs}


# The spec ----------------------------------------------------------------------------------------


def test_names_are_unique_and_found() -> None:
    names = [target.spec.name for target in WITH_DUMMY]

    assert len(set(names)) == len(names) > 0
    assert all(get_target(name) is target for name, target in zip(names, WITH_DUMMY, strict=True))


def test_an_unknown_name_lists_those_that_are_known() -> None:
    with pytest.raises(UsageError, match="hailo9000") as unknown:
        get_target("hailo9000")

    assert all(target.spec.name in unknown.value.hint for target in WITH_DUMMY)


def test_every_limit_has_a_source(target: Target) -> None:
    limits = {"dtypes", "max_rank", "formats", "domains", "static"}
    limits |= {"operators"} if target.spec.supports.operators is not None else set()
    limits |= {"windows_s"} if target.spec.runs.windows_s else set()
    limits |= {"precisions"} if target.spec.runs.precisions != ("fp32",) else set()
    limits |= {"folds_constants"} if not target.spec.supports.folds_constants else set()

    assert {name for name, source in target.spec.sources.items() if source} == limits
    assert all(limit.source for limit in target.spec.supports.limits)


def test_its_extras_are_known_to_the_doctor(target: Target) -> None:
    assert {target.spec.software.extra, target.spec.software.run_extra} <= set(extras())


def test_its_summary_is_one_line(target: Target) -> None:
    assert 0 < len(target.spec.summary) < 90
    assert "\n" not in target.spec.summary


@pytest.mark.parametrize("kind", ["compiler", "importer"])
def test_its_compiler_and_its_importer_describe_their_options(target: Target, kind: str) -> None:
    described = getattr(target, kind)
    if described is None:
        return

    for one in describe(described.options):
        assert one.values
        assert 0 < len(one.help) < 320  # four lines of 80 columns
        assert not one.help.endswith(".")
    assert parse_options(described.options, {}, target.spec.name) == described.options()
    assert described.suffix.startswith(".")


def test_the_script_of_its_compiler_stands_alone(target: Target) -> None:
    if target.compiler is None:
        return

    tree = ast.parse(target.compiler.script.read_text(encoding="utf-8"), feature_version=(3, 9))
    nodes = list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    found = {name.split(".")[0] for name in names} - sys.stdlib_module_names

    # onnxruntime may be a part of an SDK: providers are plugins of it.
    parts = SDK_PARTS.get(target.compiler.toolchain, set())
    assert found <= {target.compiler.sdk, "numpy", "onnxruntime", "torch", *parts}
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    settings = target.compiler.settings()
    assert "version" in defined
    assert "check" in defined or "requires" in settings  # the kit compares the version with it
    json.dumps(settings)


# The check ---------------------------------------------------------------------------------------


def test_check_accepts_a_plain_linear(target: Target) -> None:
    assert target.check(linear()) == []


def test_check_accepts_our_programs_once_rewritten(target: Target, rewritten: Any) -> None:
    for program in rewritten(target.spec.lowering.rewrites):
        if target.unsupported(program.name, target.spec.runs.precisions[0]):
            continue  # a placement there is an error
        if not target.spec.runs.programs or program.name in target.spec.runs.programs:
            assert target.check(program) == [], program.name


def test_check_refuses_a_rank_above_the_limit(target: Target) -> None:
    limit = target.spec.supports.max_rank

    class TooDeep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.reshape((1,) * limit + (8,)) + 1).reshape(1, 8)

    rejections = target.check(trace("deep", TooDeep(), (torch.zeros(1, 8),)))

    assert {refusal.rule for refusal in rejections} == {"WP201"}
    assert {refusal.reason for refusal in rejections} == {
        f"rank {limit + 1} is above the limit of {limit}; fold axes"
    }
    assert all(refusal.node for refusal in rejections)


def test_check_refuses_an_input_of_another_dtype(target: Target) -> None:
    assert "complex64" not in target.spec.supports.dtypes
    program = trace("odd", nn.ReLU(), (torch.zeros(1, 8, dtype=torch.float64),))

    rejections = target.check(program)

    assert rejections[0].rule == "WP202"
    assert "float64" in rejections[0].reason
    assert all(dtype in rejections[0].reason for dtype in target.spec.supports.dtypes)


# Lowering ----------------------------------------------------------------------------------------


def test_lowering_writes_what_it_lists_inside_the_folder_and_nothing_on_stdout(
    lowered: Target, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    program = linear()

    (entry,) = lowered.lower([program], folder)

    assert capfd.readouterr().out == ""
    assert list(tmp_path.iterdir()) == [folder]
    written = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert set(entry.files) == written
    assert entry.spec == program.spec
    assert entry.target == lowered.spec.name
    assert entry.evidence == ()  # lowering runs nothing
    facts = entry.facts
    assert None not in (facts.delegated, facts.undelegated, facts.subgraphs)


def test_a_strangers_program_runs_as_in_torch(
    lowered: Target,
    plain: Program,
    lowered_once: Callable[[Target, Path], ProgramEntry],
    tmp_path: Path,
) -> None:
    x = np.random.default_rng(0).standard_normal((1, 8)).astype(np.float32)
    expected = plain.exported.module(check_guards=False)(torch.from_numpy(x))

    entries = [lowered_once(lowered, tmp_path)]
    outputs = lowered.load(tmp_path, entries, run_options(lowered))["plain"].run({"input": x})

    # A sum of eight products in float32.
    np.testing.assert_allclose(outputs["y"], expected.detach(), atol=rounded(lowered, 1e-6))


def rounded(target: Target, error: float) -> float:
    """Return the error in float32, or that of a target whose lowered files have weights in float16."""
    precision = target.emulated_precision(target.spec.runs.precisions[0])
    return 1e-3 if precision == "fp16" else error


@pytest.mark.parametrize(
    "lowered", core_or_all([*WRITTEN.values()], WITH_DUMMY), ids=lambda target: target.spec.name
)
def test_two_programs_with_one_weight_keep_it_apart_from_others(
    lowered: Target, tmp_path: Path
) -> None:
    """Programs share weights: equal tensors may be stored once, different tensors must not be merged."""
    torch.manual_seed(0)
    first, second = nn.Linear(600, 2), nn.Linear(600, 2)
    x = torch.randn(1, 600)
    programs = [
        trace(name, m, (x,), ["y"]) for name, m in [("a", first), ("b", second), ("c", first)]
    ]

    loaded = lowered.load(tmp_path, lowered.lower(programs, tmp_path), run_options(lowered))
    a, b, c = (loaded[name].run({"input": x.numpy()})["y"] for name in "abc")

    np.testing.assert_array_equal(a, c)
    error = rounded(lowered, 1e-5)  # of a sum of 600 products
    np.testing.assert_allclose(a, first(x).detach(), atol=error)
    np.testing.assert_allclose(b, second(x).detach(), atol=error)


# Loading and running -----------------------------------------------------------------------------


def links_out(file: Path) -> None:
    file.rename(file.parents[2] / "outside")
    file.symlink_to(file.parents[2] / "outside")


def is_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("becomes", [links_out, is_a_pipe])
def test_only_a_regular_file_of_the_bundle_is_loaded(
    lowered: Target,
    lowered_once: Callable[[Target, Path], ProgramEntry],
    tmp_path: Path,
    becomes: Callable[[Path], None],
) -> None:
    folder = tmp_path / "bundle"
    entry = lowered_once(lowered, folder)
    becomes(folder / entry.files[0])

    with pytest.raises(BundleError, match=entry.files[0]):
        lowered.load(folder, [entry], run_options(lowered))


def test_a_program_of_another_signature_than_listed_is_not_loaded(
    lowered: Target, lowered_once: Callable[[Target, Path], ProgramEntry], tmp_path: Path
) -> None:
    entry = lowered_once(lowered, tmp_path)
    spec = ProgramSpec("plain", entry.spec.inputs, (TensorSpec("y", (1, 5)),))

    with pytest.raises(BundleError, match="another signature"):
        lowered.load(tmp_path, [replace(entry, spec=spec)], run_options(lowered))


def test_our_programs_run_as_in_torch(
    here: Target,
    runners: Mapping[str, Runner],
    bundle: Bundle,
    exported: SharedExports,
    eager_runners: Any,
) -> None:
    heads = bundle.manifest.generation.alignment_heads
    eager = eager_runners(build_model(exported.checkpoint(here.spec.name)), (4, 64), heads)

    assert set(runners) == set(eager)
    for name, runner in runners.items():
        inputs = random_inputs(runner.spec)
        actual, expected = runner.run(inputs), eager[name].run(inputs)
        if LOGSUMEXP in actual:
            logits, *others = expected.items()
            sums = np.logaddexp.reduce(logits[1].astype(np.float64), axis=1, keepdims=True)
            expected = dict([logits, (LOGSUMEXP, sums.astype(np.float32)), *others])
        assert list(actual) == list(expected)
        for output in expected:
            found = compare(output, actual[output], expected[output], GATES["fp32"])
            assert found, f"{name}: {output}: {found.reason}"


def test_inputs_are_not_written_to_and_outputs_are_not_overwritten(
    runners: Mapping[str, Runner],
) -> None:
    for runner in runners.values():
        inputs, others = random_inputs(runner.spec, seed=1), random_inputs(runner.spec, seed=2)
        given = {name: array.copy() for name, array in inputs.items()}
        outputs = runner.run(inputs)
        kept = {name: array.copy() for name, array in outputs.items()}

        runner.run(others)

        for name, array in kept.items():
            np.testing.assert_array_equal(outputs[name], array)
        for name, array in given.items():
            np.testing.assert_array_equal(inputs[name], array)


def test_bound_arrays_give_the_results_of_given_ones_bit_for_bit(
    runners: Mapping[str, Runner],
) -> None:
    """Two bindings run in turn with changing state; later runs must not overwrite earlier outputs."""
    for runner in runners.values():
        calls = [random_inputs(runner.spec, seed) for seed in (1, 2)]
        bindings = [bound(runner, inputs) for inputs in calls]
        for part in (None, np.s_[:, 1:3], np.s_[:, :, 2:]):
            if part is not None:
                for binding, inputs in zip(bindings, calls, strict=True):
                    change(binding, inputs, part)

            expected = [runner.run(inputs) for inputs in calls]
            found = [binding.run(inputs) for binding, inputs in zip(bindings, calls, strict=True)]

            for outputs, right in zip(found, expected, strict=True):
                for name, array in right.items():
                    np.testing.assert_array_equal(outputs[name], array)

        bind(bindings[0], calls[1])

        for name, array in bindings[0].run(calls[1]).items():
            np.testing.assert_array_equal(array, expected[1][name])


def bound(runner: Runner, inputs: Mapping[str, np.ndarray]) -> Binding:
    """Make a binding for the constants and the state among these inputs."""
    binding = runner.binding()
    bind(binding, inputs)
    return binding


def bind(binding: Binding, inputs: Mapping[str, np.ndarray]) -> None:
    for name, role in binding.runner.roles.items():
        if role != "input":
            binding.bind(name, inputs[name])


def change(binding: Binding, inputs: Mapping[str, np.ndarray], part: Any) -> None:
    """Write to a part of every state, as the cache does."""
    for name, role in binding.runner.roles.items():
        if role == "state":
            inputs[name][part] += 1
            binding.changed(name, part)


def test_arrays_in_another_memory_order_are_read_right(runners: Mapping[str, Runner]) -> None:
    runner = runners["cross_kv"]
    inputs = random_inputs(runner.spec)
    strided = {name: np.asfortranarray(array) for name, array in inputs.items()}

    expected, actual = runner.run(inputs), runner.run(strided)

    for name, output in expected.items():
        np.testing.assert_array_equal(output, actual[name])


def test_what_was_heard_before_leaves_no_trace(bundle: Bundle) -> None:
    options = DecodeOptions(language="en", max_tokens=6)
    random = np.random.default_rng(0)
    shape = bundle.manifest.dims.n_mels, bundle.manifest.dims.n_frames
    first, second = (random.standard_normal(shape).astype(np.float32) for _ in range(2))
    engine, fresh = load_engine(bundle, ONE_THREAD), load_engine(bundle, ONE_THREAD)
    decoder = Decoder(engine)

    decode_window(decoder, engine.encode(first), options)
    after = decode_window(decoder, engine.encode(second), options)
    alone = decode_window(Decoder(fresh), fresh.encode(second), options)

    assert after == alone


@pytest.mark.parametrize("beams", [None, 2])
def test_a_phrase_is_preferred_and_a_grammar_obeyed_on_every_target(
    bundle: Bundle, beams: int | None
) -> None:
    phrase = (1000, 2000, 3000)
    grammar = Grammar(
        checked_rules('root ::= "abc"'), Spellings({1000: b"a", 2000: b"b", 3000: b"c"})
    )
    phrases = Phrases([Spelling(phrase, 20.0, True)], lambda _: False)
    options = DecodeOptions(language="en", max_tokens=6, beam_size=beams, without_timestamps=True)
    shape = bundle.manifest.dims.n_mels, bundle.manifest.dims.n_frames
    engine = load_engine(bundle, ONE_THREAD)
    features = engine.encode(np.random.default_rng(0).standard_normal(shape).astype(np.float32))

    plain = decode_window(Decoder(engine), features, options)
    listed = decode_window(Decoder(engine), features, replace(options, phrases=phrases))
    ruled = decode_window(Decoder(engine), features, replace(options, grammar=grammar))

    assert listed.tokens == phrase * 2
    assert listed.avg_logprob < plain.avg_logprob
    assert ruled.tokens == phrase
    assert [verdict.end for verdict in ruled.verdicts] == [len(phrase)]


def test_two_threads_say_what_one_says(here: Target, bundle: Bundle) -> None:
    entries = [entry for entry in bundle.manifest.programs if entry.spec.name == "encoder"]
    inputs = random_inputs(entries[0].spec)
    one = here.load(bundle.folder, entries, ONE_THREAD)["encoder"].run(inputs)

    two = here.load(bundle.folder, entries, RunOptions(threads=2))["encoder"].run(inputs)

    assert compare("features", two["features"], one["features"], GATES["fp32"])


# What is missing, what is damaged ----------------------------------------------------------------

COMPILERS = dict.fromkeys((target.spec.name for target in WITH_DUMMY), "onnx")
COMPILERS |= {"xnnpack": "executorch", "litert": "litert_torch"}
COMPILERS |= {name: "litert_torch" for name in COMPILERS if name.startswith("genio")}
COMPILERS |= {
    "aws-neuron": "torch",
    "ethos-u85": "torch",
    "ethos-u65": "torch",
    "ethos-u55": "torch",
}
RUNTIMES = {
    "onnxruntime": "onnxruntime",
    "xnnpack": "executorch",
    "litert": "ai_edge_litert",
    "openvino": "openvino",
}


def block(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make `package` appear not installed, even if it was imported before."""
    for name in [package, *sys.modules]:
        if name.split(".")[0] == package:
            monkeypatch.setitem(sys.modules, name, None)
    for name in ("onnx", "onnx_file"):
        monkeypatch.delitem(sys.modules, f"whisperport.model.trace.{name}", raising=False)


def test_a_missing_compiler_says_what_to_install(
    lowered: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = linear()
    block(monkeypatch, COMPILERS[lowered.spec.name])

    with pytest.raises(MissingPackageError) as missing:
        lowered.lower([program], tmp_path)

    assert lowered.spec.name in missing.value.what
    assert f"whisperport[{lowered.spec.software.extra}]" in missing.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_missing_runtime_says_what_to_install(
    here: Target, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    block(monkeypatch, RUNTIMES[here.spec.name])

    with pytest.raises(MissingPackageError) as missing:
        here.load(bundle.folder, bundle.manifest.programs, ONE_THREAD)

    assert here.spec.name in missing.value.what
    assert "pip install" in missing.value.hint


# In a process of its own: a runtime written in C++ may well abort.
LOAD_DAMAGED = """
import random, shutil, sys
from pathlib import Path
from whisperport.program.bundle import Bundle
from whisperport.errors import BundleError
from whisperport.targets import RunOptions, get_target

bundle, folder = Bundle.open(sys.argv[1]), Path(sys.argv[2])
target = get_target(bundle.manifest.programs[0].target)
entries = bundle.manifest.programs
noise = random.Random(0).randbytes
for file in entries[0].files:
    whole = (bundle.folder / file).read_bytes()
    for name, data in {
        "empty": b"",
        "short": whole[:3],
        "half": whole[: len(whole) // 2],
        "noise": noise(4000),
        "text": b"no program at all\\n" * 99,
        "zeros": bytes(4000),
        "noise behind a right beginning": whole[:32] + noise(4000),
        "missing": None,
    }.items():
        shutil.rmtree(folder, ignore_errors=True)
        for kept in {f for entry in entries for f in entry.files}:
            (folder / kept).parent.mkdir(parents=True, exist_ok=True)
            (folder / kept).symlink_to(bundle.folder / kept)
        (folder / file).unlink()
        if data is not None:
            (folder / file).write_bytes(data)
        print(file, name, end=": ", flush=True)
        try:
            target.load(folder, entries, RunOptions(threads=1))
            print("loaded", flush=True)
        except BundleError as error:
            print("BundleError", flush=True)
"""


def test_a_damaged_file_is_refused_and_never_crashes(bundle: Bundle, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD_DAMAGED, bundle.folder, tmp_path / "damaged"],
        capture_output=True,
        text=True,
        timeout=240,
    )

    lines = done.stdout.strip().splitlines()
    assert done.returncode == 0, lines[-1:] + done.stderr.splitlines()[-3:]
    assert len(lines) == 8 * len(bundle.manifest.programs[0].files)
    assert [line for line in lines if not line.endswith(": BundleError")] == []

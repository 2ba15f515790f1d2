"""Calls of the Neuron runtime library, with a fake library that is compiled here."""

import ctypes
import ctypes.util
import gc
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.errors import BundleError, LoweringError, MissingPackageError, UsageError
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets.mediatek.chips import CHIPS
from whisperport.targets.mediatek.options import RunOptions
from whisperport.targets.mediatek.runtime import load_dlas

HERE = Path(__file__).parent
CHIP = CHIPS[0]
# Roles: `x` is an input, `cross_k_0` a constant of the window, `self_k_0` a state.
SPEC = ProgramSpec(
    "step",
    (TensorSpec("x", (1, 4)), TensorSpec("self_k_0", (3, 2)), TensorSpec("cross_k_0", (2, 5))),
    (TensorSpec("logits", (2, 3)), TensorSpec("key_0", (1,))),
)
SIZES = "3 16 24 40 2 24 4"


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("neuron") / "libneuron_runtime.so"
    source = HERE / "fake_neuron_library.c"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(path), str(source)]
    subprocess.run(command, check=True)
    return path


def load(library: Path, tmp_path: Path, content: str = f"none {SIZES}", **options: Any) -> Any:
    dla = tmp_path / "step.dla"
    dla.write_text(content)
    chosen = RunOptions(api="library", library=library, **options)
    return load_dlas(CHIP, [SPEC], {"step": dla}, chosen)["step"]


def arrays(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        tensor.name: random.integers(-9, 9, tensor.shape).astype(np.float32)
        for tensor in SPEC.inputs
    }


def expected(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As the fake computes; all numbers are small integers, so that float32 is exact."""
    total = sum(
        (n + 1)
        * float((inputs[tensor.name].ravel() * np.arange(1, inputs[tensor.name].size + 1)).sum())
        for n, tensor in enumerate(SPEC.inputs)
    )
    return {
        tensor.name: (np.arange(np.prod(tensor.shape)) + k + total).reshape(tensor.shape)
        for k, tensor in enumerate(SPEC.outputs)
    }


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(
        np.array_equal(found[name], wanted[name]) for name in wanted
    )


def test_every_run_reads_its_own_inputs(library, tmp_path):
    program = load(library, tmp_path)

    found = [program.run(arrays(seed)) for seed in range(3)]

    # then: also the outputs of the first run are still its own
    assert all(same(outputs, expected(arrays(seed))) for seed, outputs in enumerate(found))


def test_two_bindings_of_one_program_do_not_mix(library, tmp_path):
    program = load(library, tmp_path)
    assert set(program.roles.values()) == {"input", "constant", "state"}
    inputs = [arrays(seed) for seed in range(2)]
    bindings = [program.binding() for _ in inputs]
    for binding, own in zip(bindings, inputs, strict=True):
        binding.bind("self_k_0", own["self_k_0"])
        binding.bind("cross_k_0", own["cross_k_0"])

    # when: each writes to its state between runs, in an order that alternates irregularly
    for turn, index in enumerate([0, 0, 1, 0, 1, 1, 1, 0]):
        own = inputs[index]
        part = (slice(turn % 3, turn % 3 + 1), slice(None))
        own["self_k_0"][part] = turn
        bindings[index].changed("self_k_0", part)
        found = bindings[index].run({"x": own["x"]})

        assert same(found, expected(own)), turn


def test_an_array_bound_again_and_a_plain_run_between_are_seen(library, tmp_path):
    program = load(library, tmp_path)
    first, second = arrays(0), arrays(1)
    binding = program.binding()
    for name in ("self_k_0", "cross_k_0"):
        binding.bind(name, first[name])
    binding.run(first)

    binding.bind("cross_k_0", second["cross_k_0"])
    rebound = binding.run(first)
    program.run(second)
    after = binding.run(first)

    wanted = expected({**first, "cross_k_0": second["cross_k_0"]})
    assert same(rebound, wanted)
    assert same(after, wanted)


def test_a_change_that_no_one_reports_is_not_seen(library, tmp_path):
    """The copy is what `changed` is for: without this, the tests above could pass without it."""
    program = load(library, tmp_path)
    own = arrays(0)
    binding = program.binding()
    for name in ("self_k_0", "cross_k_0"):
        binding.bind(name, own[name])
    before = binding.run(own)

    own["self_k_0"][0] += 1

    assert same(binding.run(own), before)


@pytest.mark.parametrize(
    ("content", "kind", "what", "why"),
    [
        ("not a dla", BundleError, "cannot load", "BAD_DATA.*version 8.2.16"),
        ("none 3 16 24 40 2 24 1", BundleError, "other outputs", r"\[24, 1\]"),
        ("none 2 16 24 2 24 4", BundleError, "other inputs", r"\[16, 24\]"),
        (f"latch {SIZES}", LoweringError, "same outputs for different inputs", "first run only"),
        (f"zeros {SIZES}", LoweringError, "only zeros", "nothing was executed"),
    ],
)
def test_a_program_that_does_not_work_is_refused_when_it_is_loaded(
    library, tmp_path, content, kind, what, why
):
    with pytest.raises(kind, match=what) as caught:
        load(library, tmp_path, content)
    assert re.search(why, caught.value.why)
    assert caught.value.hint


def test_a_run_that_fails_is_an_error(library, tmp_path):
    program = load(library, tmp_path, f"fails {SIZES}")

    with pytest.raises(LoweringError, match="reported an error") as caught:
        program.run(arrays(0))
    assert "RUNTIME_ERROR" in caught.value.why


def test_a_program_is_released_with_its_runner(library, tmp_path):
    gc.collect()
    alive = ctypes.CDLL(str(library)).fake_alive
    before = alive()
    program = load(library, tmp_path)
    assert alive() == before + 1

    del program
    gc.collect()

    assert alive() == before


def test_a_library_that_is_missing_or_too_old_is_an_error(tmp_path):
    with pytest.raises(MissingPackageError, match="not installed or cannot be loaded"):
        load(tmp_path / "libabsent.so", tmp_path)
    with pytest.raises(LoweringError, match="has no function `NeuronRuntimeV2_create`"):
        load(Path(ctypes.util.find_library("c") or "libc.so.6"), tmp_path)


def test_an_option_without_effect_is_refused(tmp_path):
    for option in ({"boost": 3}, {"files": tmp_path}):
        with pytest.raises(UsageError, match=f"{next(iter(option))}` has no effect"):
            load(tmp_path / "x.so", tmp_path, **option)

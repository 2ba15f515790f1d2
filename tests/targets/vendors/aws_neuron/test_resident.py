"""Runners with resident state give the results of stateless ones, and copy no cache for each token."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.program import Program
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.runner import Array, Binding, Runner
from whisperport.runtime import DecodeOptions, Decoder, Engine, decode_window
from whisperport.targets import RunOptions, get_target
from whisperport.targets.target_options import with_target
from whisperport.targets.vendors.aws_neuron.resident import ResidentRunner
from whisperport.verification.array_comparison import compare
from whisperport.verification.tolerances import LOWERED

from ....extent import core_or_all
from ....micro import DIMS, GENERATION

TARGET = "aws-neuron"
ON_CPU = RunOptions(threads=1, options=with_target({"emulate": "on"}, TARGET))
HEADS = [(0, 1), (1, 0), (1, 1)]
NAMES = ("encoder", "cross_kv", "prefill_4", "prefill_64", "step", "align")


@pytest.fixture(scope="module")
def programs(micro: Whisper) -> tuple[Program, ...]:
    return tuple(whisper_programs(Parts(micro, HEADS), (*NAMES, "step_4")))


@pytest.fixture(scope="module")
def load(
    programs: tuple[Program, ...], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """`load(options)`: new runners of the micro model's programs, on the CPU."""
    folder: Path = tmp_path_factory.mktemp("modules")
    target = get_target(TARGET)
    entries = target.lower(programs, folder)
    return lambda options=ON_CPU: target.load(folder, entries, options)


@pytest.fixture
def runners(load: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return load()


def inputs_of(runner: Runner, seed: int = 0) -> dict[str, Array]:
    """Noise, and a mask that hides half of the positions, not only the last ones."""
    random = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for tensor in runner.spec.inputs:
        noise = random.standard_normal(tensor.shape).astype(tensor.dtype)
        hidden = np.where(random.random(tensor.shape) < 0.5, -30_000, 0).astype(tensor.dtype)
        found[tensor.name] = hidden if tensor.name == "mask" else noise
    return found


def bound(runner: Runner, inputs: Mapping[str, Array]) -> Binding:
    binding = runner.binding()
    for name, role in runner.roles.items():
        if role != "input":
            binding.bind(name, inputs[name])
    return binding


class Spy:
    """Records the states that a module is given."""

    def __init__(self, runner: ResidentRunner) -> None:
        self._module, self.written = runner.module, list[str]()
        self.runs = 0
        runner.module = self

    def write(self, name: str, array: Array) -> None:
        self.written.append(name)
        self._module.write(name, array)

    def run(self, inputs: Any) -> Any:
        self.runs += 1
        return self._module.run(inputs)

    def taken(self) -> set[str]:
        """Kinds of state written since the last call."""
        found = {name.rpartition("_")[0] for name in self.written}
        self.written.clear()
        return found


# The same results --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, "step_4"])
def test_a_program_computes_what_torch_computes(
    name: str, runners: dict[str, Any], programs: tuple[Program, ...]
) -> None:
    import torch

    program = next(one for one in programs if one.name == name)
    inputs = inputs_of(runners[name])
    given = [torch.from_numpy(array) for array in inputs.values()]
    takes = torch.utils._pytree.tree_unflatten(given, program.exported.call_spec.in_spec)

    outputs = runners[name].run(inputs)

    expected = program.exported.module(check_guards=False)(*takes[0], **takes[1])
    expected = expected if isinstance(expected, tuple) else (expected,)
    for (output, found), wanted in zip(outputs.items(), expected, strict=True):
        compared = compare(output, found, wanted.detach().numpy(), LOWERED["float32"])
        assert compared, compared.reason


@pytest.mark.parametrize("name", ["step", "step_4", "prefill_4", "align"])
def test_bound_arrays_give_the_results_of_given_ones_bit_for_bit(
    name: str, load: Callable[..., dict[str, Any]]
) -> None:
    """Two bindings run in turn, twice without a change, and then with changes of a part of the state."""
    runner, other = load()[name], load()[name]
    calls = [inputs_of(runner, seed) for seed in (1, 2)]
    bindings = [bound(runner, inputs) for inputs in calls]
    for part in (None, None, np.s_[:, 1:3], np.s_[:, :, 2:]):
        for binding, inputs in zip(bindings, calls, strict=True):
            for state, role in runner.roles.items():
                if part is not None and role == "state":
                    inputs[state][part] += 1
                    binding.changed(state, part)
        for binding, inputs in zip(bindings, calls, strict=True):
            expected = other.run(inputs)
            for again in range(2):
                found = binding.run(inputs)
                for output, right in expected.items():
                    np.testing.assert_array_equal(found[output], right, err_msg=f"{part} {again}")


def test_a_constant_that_is_bound_again_with_other_numbers_is_copied(
    runners: dict[str, Any],
) -> None:
    runner = runners["step"]
    inputs = inputs_of(runner)
    binding = bound(runner, inputs)
    before = binding.run(inputs)["logits"]

    inputs["cross_k_0"] += 1
    binding.bind("cross_k_0", inputs["cross_k_0"])

    after = binding.run(inputs)["logits"]
    assert not np.array_equal(before, after)
    np.testing.assert_array_equal(after, runner.run(inputs)["logits"])


def engine_of(micro: Whisper, runners: dict[str, Any]) -> Engine:
    embedding = micro.decoder.token_embedding.weight.numpy()
    positions = micro.decoder.positional_embedding.numpy()
    chosen = {name: runners[name] for name in runners if name in (*NAMES, "step_4")}
    return Engine(DIMS, GENERATION, chosen, embedding, positions)


@pytest.mark.parametrize(
    "options",
    [
        DecodeOptions(language="en"),
        DecodeOptions(language="en", beam_size=3),
        DecodeOptions(beam_size=2, without_timestamps=True),
        DecodeOptions(language="en", prompt=tuple(range(9))),
    ],
    ids=["greedy", "3 beams", "2 beams and a detected language", "prompt"],
)
def test_windows_are_decoded_to_the_tokens_of_stateless_programs(
    options: DecodeOptions,
    micro: Whisper,
    runners: dict[str, Any],
    eager_runners: Callable[..., Any],
) -> None:
    engines = [engine_of(micro, r) for r in (runners, eager_runners(micro, (4, 64), HEADS))]
    decoders = [Decoder(engine) for engine in engines]
    for seed in range(3):
        mel = np.random.default_rng(seed).standard_normal((DIMS.n_mels, DIMS.n_frames), np.float32)
        found, expected = (
            decode_window(decoder, engine.encode(mel), options)
            for engine, decoder in zip(engines, decoders, strict=True)
        )
        assert found.tokens == expected.tokens
        assert len(found.tokens) > 2


def test_a_window_has_its_own_audio_while_bindings_of_the_window_before_exist(
    micro: Whisper, runners: dict[str, Any], eager_runners: Callable[..., Any]
) -> None:
    """Another target may write each window's K/V to the same arrays; an error keeps bindings alive."""
    on_host = eager_runners(micro, (4, 64), HEADS)["cross_kv"]
    on_host.writes_in_place = True
    engine = engine_of(micro, {**runners, "cross_kv": on_host})
    used, kept = Decoder(engine), list[Binding]()

    def decoded(decoder: Decoder, seed: int) -> np.ndarray:
        random = np.random.default_rng(seed)
        decoder.start_window(random.standard_normal((DIMS.n_audio_ctx, 16), np.float32))
        decoder.prefill([50, 51, 53])
        return decoder.step(1)

    first = decoded(used, 0)
    kept.extend(used.cache.bindings.values())
    second = decoded(used, 1)

    assert kept
    np.testing.assert_array_equal(second, decoded(Decoder(engine), 1))
    assert not np.array_equal(first, second)


# Compiled by torch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", core_or_all(["aot_eager"], ["aot_eager", "inductor"]))
def test_torch_compile_takes_each_program_whole_and_once_and_decodes_the_same_tokens(
    backend: str, micro: Whisper, load: Callable[..., dict[str, Any]]
) -> None:
    """As TorchNeuron runs them, with other backends: no graph break, and no second compilation."""
    from torch import _dynamo
    from torch._dynamo.utils import counters

    counters.clear()
    names = ("encoder", "cross_kv", "prefill_4", "step", "step_4", "align")
    options = with_target({"emulate": "on", "torch-compile": backend}, TARGET)
    compiled, plain = (
        {name: runners[name] for name in names}
        for runners in (load(RunOptions(threads=1, options=options)), load())
    )
    engines = [engine_of(micro, runners) for runners in (compiled, plain)]
    decoders = [Decoder(engine) for engine in engines]
    longest = DecodeOptions(language="en", suppress_tokens=(GENERATION.end_of_text,))

    with _dynamo.config.patch(error_on_recompile=True):
        for seed in range(core_or_all(3, 30)):
            random = np.random.default_rng(seed)
            mel = random.standard_normal((DIMS.n_mels, DIMS.n_frames), np.float32)
            for way in (longest, replace(longest, beam_size=3), replace(longest, prompt=(1,) * 9)):
                found, expected = (
                    decode_window(decoder, engine.encode(mel), way)
                    for engine, decoder in zip(engines, decoders, strict=True)
                )
                assert found.tokens == expected.tokens
                assert len(found.tokens) > 5
        for name in names:
            inputs = inputs_of(plain[name])
            outputs = compiled[name].run(inputs)
            for output, expected_array in plain[name].run(inputs).items():
                compared = compare(output, outputs[output], expected_array, LOWERED["float32"])
                assert compared, compared.reason

    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == len(names)


def test_torch_keeps_the_compiled_graphs_of_several_bundles(
    load: Callable[..., dict[str, Any]],
) -> None:
    """It keeps a limited number for each function, here 1."""
    from torch import _dynamo

    options = with_target({"emulate": "on", "torch-compile": "aot_eager"}, TARGET)
    runners = [load(RunOptions(threads=1, options=options))["cross_kv"] for _ in range(2)]
    inputs = inputs_of(runners[0])

    with _dynamo.config.patch(recompile_limit=1):
        first, second = (runner.run(inputs) for runner in runners)

    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


# What is copied ----------------------------------------------------------------------------------


def test_after_the_first_token_of_a_window_nothing_is_copied(
    micro: Whisper, runners: dict[str, Any]
) -> None:
    spy = Spy(runners["step"])
    decoder = Decoder(engine_of(micro, runners))
    for seed in range(2):
        features = np.random.default_rng(seed).standard_normal((DIMS.n_audio_ctx, 16), np.float32)
        decoder.start_window(features)
        decoder.prefill([50, 51, 53])
        found = []
        for token in range(5):
            decoder.step(token)
            found.append(spy.taken())
        assert found == [{"self_k", "self_v", "cross_k", "cross_v"}, set(), set(), set(), set()]


def test_beams_copy_the_cross_attention_k_v_once(micro: Whisper, runners: dict[str, Any]) -> None:
    spy = Spy(runners["step"])
    decoder = Decoder(engine_of(micro, runners))
    decoder.start_window(
        np.random.default_rng(0).standard_normal((DIMS.n_audio_ctx, 16), np.float32)
    )
    decoder.prefill([50, 51, 53])
    beams = [decoder.cache, decoder.cache.copy(), decoder.cache.copy()]
    found = []
    for token in range(3):
        for beam in beams:
            decoder.step(token, beam)
            found.append(spy.taken())

    assert found[0] == {"self_k", "self_v", "cross_k", "cross_v"}
    assert all(kinds == {"self_k", "self_v"} for kinds in found[1:])  # one state, three caches


def test_a_step_of_a_batch_copies_nothing_for_rows_that_the_host_stores_or_hides(
    runners: dict[str, Any],
) -> None:
    """Rows 0 and 2 are in use, row 1 waits with tokens in its cache, and row 3 is empty."""
    runner = runners["step_4"]
    spy, inputs = Spy(runner), inputs_of(runner)
    inputs["mask"][...] = -30_000
    inputs["mask"][..., -1] = 0
    lengths = [3, 5, 2, 0]
    for row, length in enumerate(lengths):
        inputs["mask"][row, 0, :length] = 0
    binding = bound(runner, inputs)
    found = []
    for _ in range(4):
        expected = load_equal(runner, inputs)
        outputs = binding.run(inputs)
        np.testing.assert_array_equal(outputs["logits"], expected["logits"])
        found.append(spy.taken())
        for row in (0, 2):
            store(binding, inputs, outputs, row, lengths[row])
            lengths[row] += 1

    assert found[0] == {"self_k", "self_v", "cross_k", "cross_v"}
    assert found[1:] == [set(), set(), set()]


def load_equal(runner: ResidentRunner, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs for these inputs, from the same weights with a state of their own."""
    import copy

    spied = runner.module
    twin = copy.copy(runner)
    twin.module = copy.deepcopy(spied._module)  # type: ignore[attr-defined]
    twin.held, twin.owner = {}, None
    return twin.run(inputs)


def store(
    binding: Binding, inputs: Mapping[str, Array], outputs: Mapping[str, Array], row: int, at: int
) -> None:
    """Append the new token of a row of the batch, as the host's cache does."""
    heads = DIMS.n_text_head
    for name, role in binding.runner.roles.items():
        if role == "state" and name.startswith("self"):
            axis = 2 if name.startswith("self_k") else 1
            part = [slice(row * heads, (row + 1) * heads), slice(None), slice(None)]
            new = outputs[f"new_{name.removeprefix('self_')}"][tuple(part)]
            part[axis] = slice(at, at + 1)
            inputs[name][tuple(part)] = new
            binding.changed(name, tuple(part))
    inputs["mask"][row, 0, at] = 0


def test_rows_are_written_after_the_last_visible_one(runners: dict[str, Any]) -> None:
    rows = DIMS.n_text_ctx
    mask = np.full((1, 4, rows + 4), -30_000, np.float32)
    mask[0, :, :5] = 0

    assert runners["prefill_4"].positions(mask).tolist() == [[5, 6, 7, 8]]
    mask[0, :, rows - 2] = 0
    assert runners["prefill_4"].positions(mask).tolist() == [[rows - 1, -1, -1, -1]]
    mask[0] = -30_000
    assert runners["prefill_4"].positions(mask).tolist() == [[0, 1, 2, 3]]
    assert runners["step"].positions(mask[:, :1, : rows + 1]).tolist() == [[-1]]


# The encoder and the cross-attention K/V -----------------------------------------------------------


def test_cross_kv_takes_what_the_encoder_computed_once(runners: dict[str, Any]) -> None:
    spy = Spy(runners["cross_kv"])
    mels = [inputs_of(runners["encoder"], seed) for seed in (1, 2)]
    features = [runners["encoder"].run(mel)["features"] for mel in mels]
    expected = [runners["cross_kv"].run({"features": one.copy() + 0}) for one in features[:1]]
    assert spy.runs == 1  # the encoder's last features were others

    taken = runners["cross_kv"].run({"features": features[1].copy()})
    assert spy.runs == 1
    computed = runners["cross_kv"].run({"features": features[1]})
    assert spy.runs == 2  # handed out once, so that the K/V of a window are not kept longer than it

    for name in taken:
        np.testing.assert_array_equal(taken[name], computed[name])
        assert not np.array_equal(taken[name], expected[0][name])


def test_the_encoder_computes_no_cross_attention_k_v_for_another_target(
    programs: tuple[Program, ...], tmp_path: Path
) -> None:
    target = get_target(TARGET)
    entries = target.lower(programs[:1], tmp_path)

    runner = target.load(tmp_path, entries, ON_CPU)["encoder"]

    assert type(runner) is ResidentRunner
    assert list(runner.run(inputs_of(runner))) == ["features"]

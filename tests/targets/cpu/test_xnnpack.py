"""What of Whisper XNNPACK takes: everything, read off the file that is written."""

import copy
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Any

import executorch
import numpy as np
import pytest
import torch
from executorch.exir._serialize._program import deserialize_pte_binary
from ruamel.yaml import YAML
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from whisperport.build.check import check
from whisperport.errors import BundleError
from whisperport.model.network.decoder import Decode
from whisperport.model.network.whisper import Whisper
from whisperport.model.rewrites import run_rewrites
from whisperport.model.trace.program import Program, trace
from whisperport.model.trace.shared_copies import shared_weights
from whisperport.program.bundle import Bundle
from whisperport.targets import RunOptions, get_target
from whisperport.targets.cpu.xnnpack import runtime
from whisperport.targets.cpu.xnnpack.lowering import (
    SMALLEST,
    Delegation,
    _yaml_read_by_libyaml,
    lower_to_pte,
    read_delegation,
    weights_on_disk,
)
from whisperport.targets.cpu.xnnpack.target import FILE

from ...extent import EVERYTHING
from ...micro import whisper_dims

XNNPACK = get_target("xnnpack")

LAYERS = 4
TINY = whisper_dims(384, LAYERS)


@pytest.fixture(scope="module")
def tiny() -> list[Program]:
    """whisper-tiny's two programs that matter most, in its true widths; the others are in every bundle.

    Weights are zeros: no node depends on them.
    """
    with torch.device("meta"):
        model = Whisper(TINY)
    model = model.to_empty(device="cpu").eval()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    x, mask = torch.zeros(1, 1, 384), torch.zeros(1, 1, 449)
    shapes = [(6, 64, 448), (6, 448, 64), (6, 64, 1500), (6, 1500, 64)]
    caches = tuple([torch.zeros(shape) for _ in range(LAYERS)] for shape in shapes)
    return [
        trace("encoder", model.encoder, (torch.zeros(1, 80, 3000),)),
        trace("step", Decode(model.decoder), (x, mask, *caches)),
    ]


@pytest.fixture(scope="module")
def delegation(
    request: pytest.FixtureRequest,
    exported: Callable[[str], Bundle],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Delegation]:
    """Of the programs of the tests' bundle; in `make test-all`, of whisper-tiny in its true widths."""
    if not EVERYTHING:
        bundle = exported("xnnpack")
        found = read_delegation((bundle.folder / FILE).read_bytes())
        assert {entry.method: entry.facts.undelegated for entry in bundle.manifest.programs} == {
            name: of.undelegated for name, of in found.items()
        }
        return found
    tiny: list[Program] = request.getfixturevalue("tiny")
    folder = tmp_path_factory.mktemp("tiny")
    rewritten = [run_rewrites(program, XNNPACK.spec.lowering.rewrites)[0] for program in tiny]
    entries = XNNPACK.lower(rewritten, folder)
    found = read_delegation((folder / FILE).read_bytes())
    (folder / FILE).unlink()  # 240 MB
    assert {entry.method: entry.facts.undelegated for entry in entries} == {
        name: of.undelegated for name, of in found.items()
    }
    return found


@pytest.mark.parametrize("program", ["encoder", "step"])
def test_a_program_of_whisper_is_one_subgraph_and_nothing_else(
    delegation: dict[str, Delegation], program: str
) -> None:
    assert delegation[program] == Delegation(program, subgraphs=1, undelegated=())


def test_the_list_of_operators_is_read_alike_in_c() -> None:
    text = (Path(executorch.__path__[0]) / "exir/dialects/edge/edge.yaml").read_text()
    text = text[: text.index("\n- func", 3000)]
    in_python = YAML(typ="safe").load(text)

    with _yaml_read_by_libyaml():
        assert YAML.load.__name__ == "in_c"
        in_c = YAML(typ="safe").load(text)

    assert YAML.load.__name__ == "load"
    assert in_c == in_python
    assert len(in_c) > 5


def test_without_the_rewrite_layer_norms_stay_outside(tmp_path: Any) -> None:
    """The reading above can fail."""
    block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
    naive = trace("naive", block, (torch.zeros(1, 7, 64),))

    (entry,) = XNNPACK.lower([naive], tmp_path)

    found = read_delegation((tmp_path / FILE).read_bytes())["naive"]
    assert found.subgraphs == 1  # linear and GELU, between the two
    assert len([name for name in found.undelegated if "layer_norm" in name]) == 2
    assert entry.facts.undelegated == found.undelegated


def test_the_check_foresees_what_stays_outside() -> None:
    naive = trace("naive", nn.LayerNorm(64), (torch.zeros(1, 7, 64),))
    rewritten, _ = run_rewrites(naive, XNNPACK.spec.lowering.rewrites)

    before, after = XNNPACK.check(naive), XNNPACK.check(rewritten)

    assert [(refusal.node, refusal.rule) for refusal in before] == [("layer_norm", "WP101")]
    assert after == []


def test_an_operator_that_it_cannot_lower_is_refused_beforehand() -> None:
    class Sorted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sort(x).values

    rejections = XNNPACK.check(trace("sorted", Sorted(), (torch.zeros(1, 8),)))

    assert [refusal.reason for refusal in rejections] == [
        "sort is not in the list of supported operators"
    ]


@pytest.mark.parametrize("threads", [1, 2])
def test_as_many_threads_as_asked_for(exported: Callable[[str], Bundle], threads: int) -> None:
    from executorch.extension.pybindings import portable_lib

    bundle = exported("xnnpack")

    XNNPACK.load(bundle.folder, bundle.manifest.programs, RunOptions(threads=threads))

    assert portable_lib._threadpool_get_thread_count() == threads


def test_a_method_that_is_not_in_the_file_is_refused(exported: Callable[[str], Bundle]) -> None:
    bundle = exported("xnnpack")
    entry = replace(bundle.manifest.program("step"), method="no_such_method")

    with pytest.raises(BundleError, match="no_such_method"):
        XNNPACK.load(bundle.folder, [entry], RunOptions(threads=1))


def test_a_program_of_which_nothing_is_delegated_still_runs(tmp_path: Any) -> None:
    program = trace("norm", nn.LayerNorm(8), (torch.zeros(1, 8),), ["y"])
    x = np.array([[3, 1, 2, 0, 7, 6, 5, 4]], np.float32)

    entries = XNNPACK.lower([program], tmp_path)
    y = XNNPACK.load(tmp_path, entries, RunOptions(threads=1))["norm"].run({"input": x})["y"]

    assert entries[0].facts.subgraphs == 0
    assert len(entries[0].facts.undelegated) == 1
    np.testing.assert_allclose(y, (x - 3.5) / np.sqrt(5.25), atol=1e-5)  # 1e-5 in its root, too


def test_inputs_have_no_memory_in_the_file(exported: Callable[[str], Bundle]) -> None:
    # a method with memory for its inputs copies them in every run: a fifth of the time of tiny's step
    pte = (exported("xnnpack").folder / FILE).read_bytes()
    plans = deserialize_pte_binary(pte).program.execution_plan
    assert plans
    for plan in plans:
        inputs = [plan.values[number].val for number in plan.inputs]
        assert inputs
        assert all(value.allocation_info is None for value in inputs)


def test_an_input_at_the_end_of_readable_memory_is_copied(
    exported: Callable[[str], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a hidden state behind which no memory can be read
    bundle = exported("xnnpack")
    entry = bundle.manifest.program("step")
    runner = XNNPACK.load(bundle.folder, [entry], RunOptions())["step"]
    rng = np.random.default_rng(0)
    inputs = {t.name: rng.normal(size=t.shape).astype(np.float32) for t in entry.spec.inputs}
    x = inputs["x"]
    pages = mmap(-1, 2 * runtime.PAGE)
    last = ctypes.addressof((ctypes.c_char * len(pages)).from_buffer(pages)) + runtime.PAGE
    assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(last), runtime.PAGE, 0)
    at_end = np.frombuffer(pages, np.float32, x.size, runtime.PAGE - x.nbytes).reshape(x.shape)
    at_end[...] = x
    # when a program runs on it
    given: list[Any] = []
    readable = runtime._readable_behind
    monkeypatch.setattr(
        runtime, "_readable_behind", lambda a: given.append(readable(a)) or given[-1]
    )
    passed = inputs | {"x": at_end}
    outputs = runner.run(passed)
    # then it reads a copy of this input alone, and the outputs are the same
    assert [array is value for array, value in zip(given, passed.values(), strict=True)] == [
        name != "x" for name in passed
    ]
    monkeypatch.undo()
    expected = runner.run(inputs)
    assert all(np.array_equal(outputs[name], expected[name]) for name in expected)


def test_one_program_of_a_process_runs_at_a_time(exported: Callable[[str], Bundle]) -> None:
    """Methods of one file share its memory, and all files share the thread pool."""
    bundle = exported("xnnpack")
    entries = bundle.manifest.programs

    loads = [XNNPACK.load(bundle.folder, entries, RunOptions(threads=1)) for _ in range(2)]

    assert len({id(runner.run_lock) for runners in loads for runner in runners.values()}) == 1


# While programs are lowered, weights are neither copied with graphs nor kept in memory twice.


def test_a_copy_shares_its_weights_within_the_block_only() -> None:
    module = nn.Linear(3, 3)

    with shared_weights():
        inside = copy.deepcopy(module)
    outside = copy.deepcopy(module)

    assert inside is not module
    assert inside.weight is module.weight
    assert outside.weight is not module.weight
    assert torch.equal(outside.weight, module.weight)


def test_a_fake_tensor_is_copied_as_before() -> None:
    with FakeTensorMode():
        fake = torch.empty(3)

    with shared_weights():
        assert copy.deepcopy(fake) is not fake


def test_an_error_ends_the_block_too() -> None:
    before = torch.Tensor.__deepcopy__
    with pytest.raises(RuntimeError), shared_weights():
        raise RuntimeError

    assert torch.Tensor.__deepcopy__ is before


def test_equal_data_is_one_file_and_its_content_is_the_same(tmp_path: Path) -> None:
    from executorch.exir._serialize._named_data_store import NamedDataStore

    large, small = bytes(range(256)) * (SMALLEST // 256), b"small"
    with weights_on_disk(tmp_path):
        first, second = NamedDataStore(), NamedDataStore()
        for store in (first, second):
            store.add_named_data("a", large)
        first.add_named_data("b", small)
        (folder,) = tmp_path.iterdir()
        (file,) = folder.iterdir()
        assert file.read_bytes() == large
        assert first.buffers[0] is second.buffers[0]
        assert len(first.buffers[0]) == len(large)
        assert first.buffers[1] == small

    assert not list(tmp_path.iterdir())
    store = NamedDataStore()
    store.add_named_data("a", large)
    assert store.buffers == [large]


def test_the_files_are_deleted_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), weights_on_disk(tmp_path):
        raise RuntimeError

    assert not list(tmp_path.iterdir())


class Vision(nn.Module):
    """Operators that torch decomposes into others which XNNPACK computes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16)
        self.shuffle, self.unshuffle = nn.PixelShuffle(2), nn.PixelUnshuffle(2)
        self.alone = nn.BatchNorm2d(16)  # not behind a convolution

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.convolution(x))
        x = self.unshuffle(self.shuffle(x))
        return self.alone(nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear"))


def test_what_check_does_not_reject_is_delegated_and_the_method_is_forward(tmp_path: Path) -> None:
    program = trace("vision", Vision().eval(), (torch.rand(1, 3, 8, 8),), ["y"])
    target = get_target("xnnpack")

    entry, facts = target.lower_file(program, tmp_path / "vision.pte")

    assert entry.method == "forward"
    assert facts["undelegated"] == []
    assert not check(program, "xnnpack").programs[0].rejected


# Methods of one process share the packed copies of equal weights, and compute the same.


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
WIDTH = 1024  # 4.2 MB of float32 weights, in each of METHODS
METHODS = ("a", "b")
LOAD = """
import hashlib, json, sys
from pathlib import Path
import torch
from whisperport.targets.cpu.xnnpack import runtime

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

share = runtime.share_packed_weights
x = torch.linspace(-1, 1, 2 * 1024).reshape(2, 1024)
kept, found = [], {}
for how in ("unshared", "shared"):  # in this order: sharing stays switched on
    runtime.share_packed_weights = share if how == "shared" else lambda: False
    program = runtime.load_program(runtime.start_runtime(1), Path(sys.argv[1]))
    before = anonymous()
    methods = [program.load_method(name) for name in program.method_names]
    outputs = [method.execute([x])[0].numpy().tobytes() for method in methods]
    found[how] = {
        "bytes": anonymous() - before,
        "outputs": [hashlib.sha256(output).hexdigest() for output in outputs],
    }
    kept += [program, methods]  # memory that is freed would be taken again
found["exporter"] = [name for name in sys.modules if name.startswith("executorch.exir")]
print(json.dumps(found))

from whisperport.targets import get_target

get_target("xnnpack").lower([], Path(sys.argv[2]))  # imports the exporter
"""


@pytest.fixture(scope="module")
def pte(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with the same weights."""
    torch.manual_seed(0)
    module = nn.Linear(WIDTH, WIDTH)
    programs = [trace(name, module, (torch.zeros(2, WIDTH),), ["y"]) for name in METHODS]
    path = tmp_path_factory.mktemp("shared") / "model.pte"
    lower_to_pte({one.name: one for one in programs}, path)
    return path


@pytest.fixture(scope="module")
def ran(pte: Path, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A process that loads and runs all methods, and then lowers nothing."""
    command = [sys.executable, "-c", LOAD, str(pte), str(tmp_path_factory.mktemp("lowered"))]
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def loaded(ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """`unshared`, `shared` -> bytes that loading and running all methods took, SHA-256 of their outputs.

    `exporter` -> the modules of ExecuTorch's exporter that this imported.
    """
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@ON_LINUX
def test_running_imports_no_exporter(loaded: dict[str, Any]) -> None:
    assert loaded["exporter"] == []


@ON_LINUX
def test_what_executorch_prints_when_it_is_imported_stays_off_the_screen(
    ran: subprocess.CompletedProcess[str],
) -> None:
    assert len(ran.stdout.splitlines()) == 1  # what the test itself prints
    assert "Failed to load" not in ran.stderr
    assert "deprecated" not in ran.stderr


@ON_LINUX
def test_equal_weights_are_packed_once(loaded: dict[str, Any]) -> None:
    shared, unshared = loaded["shared"], loaded["unshared"]

    assert shared["outputs"] == unshared["outputs"]
    packed = 4 * WIDTH * WIDTH
    assert int(str(unshared["bytes"])) > 1.8 * packed  # two copies: the test can tell
    assert int(str(shared["bytes"])) < 1.5 * packed


def test_the_file_holds_the_weights_once(pte: Path) -> None:
    assert pte.stat().st_size < 1.2 * 4 * WIDTH * WIDTH


def test_another_version_of_executorch_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "version", lambda _: "1.6.0")

    assert not runtime.share_packed_weights()


def test_a_library_without_the_function_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "SYMBOL", "no_such_function")

    assert not runtime.share_packed_weights()

"""Methods of one process share the packed copies of equal weights, and compute the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from whisperport.model.trace.program import trace
from whisperport.targets.cpu.xnnpack import runtime
from whisperport.targets.cpu.xnnpack.lowering import lower_to_pte

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
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def pte(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with the same weights."""
    torch.manual_seed(0)
    module = nn.Linear(WIDTH, WIDTH)
    programs = [trace(name, module, (torch.zeros(2, WIDTH),), ["y"]) for name in METHODS]
    path = tmp_path_factory.mktemp("shared") / "model.pte"
    lower_to_pte({one.name: one for one in programs}, path, lambda _: None)
    return path


def loaded(pte: Path) -> dict[str, dict[str, object]]:
    """`unshared`, `shared` -> bytes that loading and running all methods took, SHA-256 of their outputs."""
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, str(pte)], capture_output=True, text=True, check=True
    )
    found: dict[str, dict[str, object]] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the weights cache is used on Linux only")
def test_equal_weights_are_packed_once(pte: Path) -> None:
    found = loaded(pte)
    shared, unshared = found["shared"], found["unshared"]

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

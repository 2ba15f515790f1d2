"""The fuzzer: its seeds, a few mutated inputs of every format, and one input of each kind it found.

`make fuzz` runs thousands. The formats that need XNNPACK's compiler for their seeds are only run there.
"""

import errno
import fcntl
import io
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from fuzz.campaign import Campaign
from fuzz.formats import all_formats
from fuzz.mutators import archives, folders, json_values, onnx_graphs, raw, wire
from fuzz.mutators.archives import bomb, members, written
from fuzz.mutators.pickles import hours_to_hash
from fuzz.seeds import GENERATION, _checkpoint
from fuzz.supervisor import Supervisor
from fuzz.system_calls import (
    KILL,
    KILL_CALLER,
    SECOND,
    Call,
    Fault,
    Second,
    Watched,
    run_together,
    watched,
    why_not,
)
from fuzz.writers import all_writers
from onnx import TensorProto, helper
from tokenizers.models import BPE

from fuzz import campaign, faults, seeds
from whisperport.errors import BundleError, CheckpointError, ProgramError, TokenizerError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.inspection.inputs import read_inputs
from whisperport.model.inspection.read import read_graphs
from whisperport.speech.text import Tokenizer
from whisperport.targets.vendors.hailo.hef import read_hef

from ..embedded import default_bundle
from ..extent import core_or_all

MANY = 10**11
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def micro_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a Hugging Face folder of a few kilobytes; tests must not write into it."""
    folder = tmp_path_factory.mktemp("micro")
    _checkpoint(folder)
    return folder


@pytest.fixture
def folder(micro_folder: Path, tmp_path: Path) -> Path:
    """Make a copy of the folder with the tokenizer in the older files."""
    copy = Path(shutil.copytree(micro_folder, tmp_path / "checkpoint"))
    (copy / "tokenizer.json").unlink()
    for part in (copy / "parts").iterdir():
        shutil.copyfile(part, copy / part.name)
    return copy


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """Make a pipe that nobody writes to."""
    path = tmp_path / "program.onnx"
    os.mkfifo(path)
    return path


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Make a reader that waits for a pipe fail instead of waiting permanently."""

    def stop(*_: Any) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_the_checkpoint_that_is_damaged_below_is_loaded(folder: Path) -> None:
    assert load_checkpoint(folder).generation.end_of_text == GENERATION.end_of_text


def test_merges_on_which_the_tokenizers_library_panics_are_rejected(folder: Path) -> None:
    with pytest.raises(BaseException) as panic:  # noqa: PT011 (its class cannot be imported)
        BPE({"a": 0, "b": 1}, [("a", "b")])
    assert not isinstance(panic.value, Exception)
    (folder / "merges.txt").write_text("a b\n")

    with pytest.raises(TokenizerError, match="does not match vocab"):
        load_checkpoint(folder)


def test_merges_in_a_tokenizer_json_that_would_panic_are_rejected(micro_folder: Path) -> None:
    data = json.loads((micro_folder / "tokenizer.json").read_text())
    data["model"]["merges"] = [["a", "b"]]

    with pytest.raises(TokenizerError, match="does not fit its merges"):
        Tokenizer.from_json(json.dumps(data), GENERATION)


@pytest.mark.parametrize(
    ("id_", "content"),
    [("49", {}), ("49", []), ("49", None), ("49", 7), ("4" * 5000, "<|x|>")],
    ids=["dict", "list", "none", "number", "an id of thousands of digits"],
)
def test_an_added_token_without_text_or_id_is_rejected(
    folder: Path, id_: str, content: Any
) -> None:
    settings = {"added_tokens_decoder": {id_: {"content": content}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    with pytest.raises(TokenizerError, match="does not map ids to tokens"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_json_that_is_not_utf_8_is_rejected(
    micro_folder: Path, tmp_path: Path, name: str, encoding: str
) -> None:
    copy = Path(shutil.copytree(micro_folder, tmp_path / "checkpoint"))
    text = (copy / name).read_text()
    (copy / name).write_bytes(text.encode(encoding))

    with pytest.raises((CheckpointError, TokenizerError), match="not JSON"):
        load_checkpoint(copy)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_a_checkpoint_that_unpacks_to_gigabytes_is_not_unpacked(tmp_path: Path) -> None:
    data = members(saved({"dims": {}, "model_state_dict": {"a": torch.zeros(3)}}))
    name = next(name for name in data if name.endswith("/data/0"))
    (tmp_path / "tiny.pt").write_bytes(bomb(list(data.items()), name))

    with pytest.raises(CheckpointError, match="unpacks to"):
        load_checkpoint(tmp_path / "tiny.pt")


@pytest.mark.parametrize("shape", [(MANY,), (70, 16)])
def test_a_tensor_larger_than_what_is_stored_is_rejected(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    state = {"encoder.conv1.weight": torch.zeros(1).expand(shape), "decoder.ln.bias": torch.ones(1)}
    (tmp_path / "tiny.pt").write_bytes(saved({"model_state_dict": state}))

    with pytest.raises(CheckpointError, match="storage holds fewer numbers"):
        load_checkpoint(tmp_path / "tiny.pt")


def test_example_inputs_that_unpack_to_gigabytes_are_not_unpacked(tmp_path: Path) -> None:
    from whisperport.model.trace.pt2 import read_pt2

    data = [("x/models/model.json", b"{}"), ("x/data/sample_inputs/model.pt", b"1")]
    path = tmp_path / "program.pt2"
    path.write_bytes(bomb(data, data[1][0]))

    with pytest.raises(ProgramError, match="unpacks to"):
        read_pt2(path)


def test_arrays_that_unpack_to_gigabytes_are_not_unpacked(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.savez(file, x=np.zeros(3))
    path = tmp_path / "inputs.npz"
    path.write_bytes(bomb(list(members(file.getvalue()).items()), "x.npy"))

    with pytest.raises(ProgramError, match="unpacks to"):
        read_inputs(path)


READERS: dict[str, Callable[[Path], Any]] = {
    "check": read_graphs,
    "import-hef": read_hef,
    "--inputs": read_inputs,
}


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_in_place_of_a_file_is_rejected(pipe: Path, reader: str) -> None:
    with pytest.raises((ProgramError, BundleError, TokenizerError), match="is a pipe"):
        READERS[reader](pipe)


@pytest.mark.usefixtures("no_waiting")
def test_a_pipe_in_place_of_a_program_is_not_loaded(pipe: Path) -> None:
    from whisperport.model.inspection.lowered import inspect_lowered
    from whisperport.model.trace.pt2 import read_pt2
    from whisperport.program.profiling import ProfileOptions

    with pytest.raises(ProgramError, match="is a pipe"):
        inspect_lowered(pipe, ProfileOptions(), lambda _: [])
    with pytest.raises(ProgramError, match="is a pipe"):
        read_pt2(pipe)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "/etc/hostname", "../x"])
def test_external_data_with_an_impossible_name_is_missing(tmp_path: Path, name: str) -> None:
    tensor = TensorProto(name="w", dims=[4], data_type=TensorProto.FLOAT)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=name)
    node = helper.make_node("Add", ["x", "w"], ["y"])
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, [4]) for end in "xy"]
    model = helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:], [tensor]))
    (tmp_path / "program.onnx").write_bytes(model.SerializeToString())

    with pytest.raises(ProgramError, match=r"external data of .* is missing"):
        read_graphs(tmp_path / "program.onnx")


def test_a_constant_of_a_huge_shape_is_not_computed_by_check(tmp_path: Path) -> None:
    shape = helper.make_tensor("shape", TensorProto.INT64, [1], [2**40])
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["big"]),
        helper.make_node("Add", ["big", "big"], ["y"]),
    ]
    end = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [], [end], [shape])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    (tmp_path / "program.onnx").write_bytes(model.SerializeToString())

    (read,) = read_graphs(tmp_path / "program.onnx")

    assert [value.shape for value in read.outputs] == [(2**40,)]


@pytest.mark.usefixtures("no_waiting")
def test_sizes_that_would_take_hours_to_print_are_rejected(tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(60):
        nested = [nested, nested]
    state = {"encoder.conv1.weight": torch.zeros(1), "decoder.ln.bias": torch.ones(1)}
    (tmp_path / "tiny.pt").write_bytes(saved({"dims": nested, "model_state_dict": state}))

    with pytest.raises(CheckpointError, match="impossible sizes"):
        load_checkpoint(tmp_path / "tiny.pt")


@pytest.mark.parametrize("archived", [True, False])
def test_a_name_that_takes_hours_to_hash_is_rejected(tmp_path: Path, archived: bool) -> None:
    path = tmp_path / "tiny.pt"
    if archived:
        data = members(saved({})) | {"archive/data.pkl": hours_to_hash()}
        path.write_bytes(written(list(data.items())))
    else:
        path.write_bytes(hours_to_hash())

    with pytest.raises(CheckpointError, match="represents more than"):
        load_checkpoint(path)


def test_example_inputs_with_such_a_name_are_rejected() -> None:
    from whisperport.model.trace.pt2 import _check_plain

    with pytest.raises(ProgramError, match="contains code"):
        _check_plain(Path("program.pt2"), hours_to_hash())


def test_a_table_that_states_a_shape_of_terabytes_is_an_error_of_import_hef(tmp_path: Path) -> None:
    from whisperport.targets.vendors.hailo.importer import _table

    header = np.lib.format.header_data_from_array_1_0(np.zeros((2, 16), np.float32))
    with (tmp_path / "table.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header | {"shape": (2**40, 16)})

    with pytest.raises(BundleError, match="cannot read table"):
        _table(tmp_path / "table.npy")


@pytest.mark.parametrize("token", [{"a": 2**31}, {"a": -1}, {"a": True}, {"\ud800": 5}])
def test_a_vocabulary_that_the_tokenizers_library_cannot_write_is_rejected(
    folder: Path, token: dict[str, Any]
) -> None:
    data = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(data | token))

    with pytest.raises(TokenizerError, match=r"vocab\.json has the token"):
        load_checkpoint(folder)


@pytest.mark.parametrize("token", [{"\ud800": 69}, {"x": 2**31}])
def test_an_added_token_that_the_tokenizers_library_cannot_write_is_rejected(
    folder: Path, token: dict[str, int]
) -> None:
    (folder / "added_tokens.json").write_text(json.dumps(token))

    with pytest.raises(TokenizerError, match="no text or no id"):
        load_checkpoint(folder)


@pytest.mark.parametrize("inputs", [["", "w"], ["x", ""]], ids=str)
def test_an_operator_without_a_required_input_is_damage(inputs: list[str], tmp_path: Path) -> None:
    x, w, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 2]) for n in "xwy")
    node = helper.make_node("MatMul", inputs, ["y"], name="logits")
    (tmp_path / "a.onnx").write_bytes(
        helper.make_model(helper.make_graph([node], "a", [x, w], [y])).SerializeToString()
    )

    with pytest.raises(ProgramError) as rejected:
        read_graphs(tmp_path / "a.onnx")

    assert "the operator MatMul `logits` lacks input" in rejected.value.why


def test_an_operator_whose_name_is_not_utf_8_is_damage(tmp_path: Path) -> None:
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, [4]) for end in "xy"]
    node = helper.make_node("Reshape", ["x", "x"], ["y"])
    model = helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:]))
    data = model.SerializeToString().replace(b"Reshape", b"Resh\xffpe")
    (tmp_path / "program.onnx").write_bytes(data)

    with pytest.raises(ProgramError, match="not UTF-8"):
        read_graphs(tmp_path / "program.onnx")


def test_a_tensor_of_more_elements_than_can_be_counted_is_damage(tmp_path: Path) -> None:
    """The operations of such a program are more than a float can hold."""
    path = tmp_path / "program.onnx"
    for n_axes in (24, 1):
        ends = [
            helper.make_tensor_value_info(end, TensorProto.FLOAT, [2**62] * n_axes) for end in "xy"
        ]
        graph = helper.make_graph([helper.make_node("Erf", ["x"], ["y"])], "g", ends[:1], ends[1:])
        path.write_bytes(helper.make_model(graph).SerializeToString())
        if n_axes == 1:
            assert len(read_graphs(path)) == 1
            continue
        with pytest.raises(ProgramError) as rejected:
            read_graphs(path)
        assert "the tensor 'x' has more elements than 63 bits can count" in rejected.value.why


COMPILED = ("bundle-xnnpack", "layouts-pte", "pte")
QUICK = {
    name: entry
    for name, entry in all_formats().items()
    if not set(entry.groups) & set(COMPILED) and not name.endswith("run")
}


@pytest.fixture(scope="module")
def seeds_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the seeds of the quick formats; the shipped bundle replaces an exported one."""
    folder = tmp_path_factory.mktemp("seeds")
    shutil.copytree(default_bundle(), folder / "bundle-onnxruntime" / "bundle")
    for group in sorted({group for entry in QUICK.values() for group in entry.groups}):
        seeds.folder_of(group, folder)
    return folder


@pytest.fixture
def nothing_mutated(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(data: bytes, *_: Any, **__: Any) -> bytes:
        return data

    for module in (raw, wire, onnx_graphs, json_values, archives):
        monkeypatch.setattr(module, "mutated", same)
    monkeypatch.setattr(folders, "mutate", lambda *_, **__: None)


@pytest.mark.usefixtures("nothing_mutated")
@pytest.mark.parametrize("name", [name for name in QUICK if "bundle" not in name])
def test_an_input_that_is_not_mutated_is_accepted(
    name: str, seeds_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted = 0
    for number in range(12):  # some inputs are hostile without a mutation, such as pickles
        folder = tmp_path / str(number)
        folder.mkdir()
        QUICK[name].make(Random(number), seeds_folder, folder, str(tmp_path / "outside"))
        try:
            QUICK[name].run(folder)
        except Exception:
            continue
        accepted += 1
        break

    assert accepted


def test_a_few_mutated_inputs_of_every_format_are_handled(
    seeds_folder: Path, tmp_path: Path
) -> None:
    formats = [
        replace(entry, share=1 if entry.reader == "transcribe" else core_or_all(2, 5))
        for entry in QUICK.values()
    ]
    campaign = Campaign(
        formats=formats,
        count=sum(entry.share for entry in formats),
        seed=7,
        jobs=1,
        seeds=seeds_folder,
        work=tmp_path / "work",
        findings=tmp_path / "findings",
        progress=lambda _: None,
    )

    campaign.run()

    assert campaign.found == {}
    assert all(tally.inputs for tally in campaign.tallies.values())


JOBS_IN_FORKS = """
import json, os, sys
from pathlib import Path
from fuzz import processes
from fuzz.case import Format
from fuzz.worker import Worker
from whisperport.system.child import Limits, run_limited

work, imported = Path(sys.argv[1]), []
(work / "outside").mkdir(parents=True)
(work / "outside" / "mine").touch()
worker = Worker(work, work)

def outcome(job, **arguments):
    def read(_):
        result = run_limited(f"tests.system.limited_jobs:{job}", arguments, Limits(2**28, 20))
        imported.extend(result or ())
    return worker.run(Format(job, "", (), None, read, 1))

outcomes = [outcome("opens", path=str(work / "outside" / "mine")), outcome("aborts"),
            outcome("asks_for", size=2**30), outcome("loaded_modules"), outcome("leaves_a_process")]
processes.kill(processes.tree(os.getpid())[1:])
print(json.dumps([[each.kind, each.detail] for each in outcomes] + ["fuzz.worker" in imported]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the fuzzer needs Linux")
def test_what_a_job_does_is_found_when_it_runs_in_a_fork(tmp_path: Path) -> None:
    # given jobs that touch a file, crash, ask for too much memory, and leave a process
    command = [sys.executable, "-c", JOBS_IN_FORKS, str(tmp_path / "work")]
    # when the fuzzer runs them in forks
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, check=True, timeout=60, env=environment)
    *outcomes, is_fork = json.loads(done.stdout)
    # then each is found, as in a new interpreter
    kinds, details = zip(*outcomes, strict=True)
    assert kinds == ("outside touched", "exception", "exception", "accepted", "process left")
    assert "SIGABRT" in details[1]
    assert "MemoryError" in details[2]
    assert is_fork


def test_a_replay_in_the_folder_of_a_running_campaign_is_rejected(tmp_path: Path) -> None:
    running = Supervisor(tmp_path / "work", tmp_path / "seeds")
    with pytest.raises(SystemExit, match="is running in"):
        Supervisor(tmp_path / "work", tmp_path / "seeds")
    assert (tmp_path / "work").is_dir()

    running.close()
    Supervisor(tmp_path / "work", tmp_path / "seeds").close()


def test_results_of_other_campaigns_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "RESULTS", tmp_path / "results.json")
    same = {"formats": {"HEF": {}}, "seed": 0}
    further = {"formats": {"HEF": {}, "audio": {}}, "seed": 0}
    earlier = [{"what": "faults"}, further, {**same, "seed": 1}, same]
    (tmp_path / "results.json").write_text(json.dumps(earlier))
    done = Campaign([], 0, 0, 0, *[tmp_path] * 3, print)
    done.tallies = {"HEF": campaign.Tally()}

    campaign.save(done, 1.0, "a command")

    assert json.loads((tmp_path / "results.json").read_text())[:-1] == earlier[:-1]


# Each system call of a command that changes files fails once, and is the last before SIGKILL or Ctrl-C.


@pytest.fixture
def watchable() -> None:
    """Skip the test where the kernel hands on no system calls."""
    if why := why_not():
        pytest.skip(why)


@pytest.mark.usefixtures("watchable")
@pytest.mark.parametrize(
    "name", ["transcribe srt", *core_or_all((), ("transcribe json", "transcribe, new folder"))]
)
def test_a_call_that_fails_costs_no_file_and_its_error_says_so(
    name: str, exported: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in faults.environment(tmp_path).items():
        monkeypatch.setenv(variable, value)
    for module in ("whisperport.apps.cli.transcribe", "onnxruntime", "av"):  # not in each fork
        import_module(module)
    bundle = tmp_path / "seeds/bundle-onnxruntime/bundle"
    shutil.copytree(exported("onnxruntime", "micro").folder, bundle)
    (writer,) = (each for each in all_writers(tmp_path) if each.name == name)

    for planned, per_call in ((faults.plan, 3), (faults.schedules, 1)):
        tally = faults.disturb(writer, tmp_path, math.inf, planned=planned)

        assert tally.calls >= 7
        assert tally.repetitions == tally.planned >= per_call * tally.calls
        assert tally.missed == 0
        assert tally.findings == {}

    tally = faults.disturb(writer, tmp_path, math.inf, planned=partial(faults.orders, count=2))
    assert (tally.repetitions, tally.findings) == (2, {})


@pytest.mark.usefixtures("watchable")
def test_the_calls_of_several_commands_happen_in_random_orders(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"

    def write() -> None:
        text = path.read_text() if path.exists() else ""
        mine = tmp_path / f"{socket.gethostname()}-{os.getpid()}"
        mine.write_text(f"{text}x")
        mine.replace(path)

    def lock() -> None:
        with (tmp_path / "notes.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            write()

    def texts(command: Callable[[], None], count: int) -> set[str]:
        found = set()
        for seed in range(count):
            path.unlink(missing_ok=True)
            statuses = tmp_path / "statuses"
            together = partial(run_together, [command] * 3, Random(seed), statuses, 0.03)
            run = watched(together, tmp_path, order=Random(seed))
            assert not run.hung
            assert statuses.read_text() == "[0, 0, 0]"
            found.add(path.read_text())
            if len(found) > 1:
                break
        return found

    assert len(texts(write, 100)) > 1  # some orders lose what others wrote
    assert texts(lock, 4) == {"xxx"}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can do that")
def test_commands_run_as_on_several_machines(tmp_path: Path) -> None:
    class First(Random):
        """Of the order, the first number says that the commands run apart."""

        def random(self) -> float:
            return 0.0

    def note(number: int) -> None:
        (tmp_path / str(number)).write_text(f"{socket.gethostname()} {os.getpid()}")
        sys.exit(number)

    commands = [partial(note, number) for number in range(3)]
    run = watched(partial(run_together, commands, First(0), tmp_path / "statuses", 0.0), tmp_path)

    assert not run.hung
    assert (tmp_path / "statuses").read_text() == "[0, 1, 2]"
    assert [(tmp_path / str(n)).read_text() for n in range(3)] == [
        f"machine-{n} 1" for n in range(3)
    ]


@pytest.mark.parametrize(
    ("printed", "is_wrong"),
    [
        ("error: cannot write `out/page.html`", False),
        ("error: cannot write `out/a`", True),
        ("error: x; nothing was changed", True),
        ("error: x", False),
    ],
)
def test_a_message_must_not_deny_what_was_written(
    printed: str, is_wrong: bool, tmp_path: Path
) -> None:
    # given a command with two outputs, of which it wrote the first
    place = object.__new__(faults.Place)
    place.writer = replace(all_writers(tmp_path)[0], outputs=("out/a", "out/page.html"))
    place.work, place.status, place.followed = tmp_path, 0, {}
    place.old = {"out": "", "out/page.html": "old"}
    place.new = place.again = {**place.old, "out/a": "new", "out/page.html": "new"}
    place.followed[frozenset({**place.old, "out/a": "new"}.items())] = []
    tree = {**place.old, "out/a": "new"}
    # when what it printed is judged, then only a message about the first, or about all, is wrong
    run = faults.Run(Watched(met=True, status=1), f"{printed}\nwhy: b\nhint: c", tree)
    found = list(faults.judge(place, Fault(Call("link", "out/b", 0), errno.ENOSPC), run))
    assert any("the message is wrong" in finding for finding in found) == is_wrong


@pytest.mark.usefixtures("watchable")
def test_the_process_with_the_highest_rank_goes_first(tmp_path: Path) -> None:
    class LastFirst(Random):
        """No process loses its turn, and each has a higher rank than those before."""

        n = 0

        def random(self) -> float:
            self.n += 1
            return 1 + self.n

    begin = time.monotonic() + 0.3

    def make(name: str) -> None:
        time.sleep(max(0.0, begin - time.monotonic()))
        for number in range(10):
            (tmp_path / f"{name}-{number}").mkdir()

    commands = [partial(make, name) for name in "ab"]
    together = partial(run_together, commands, Random(0), tmp_path / "statuses", 0.0)
    run = watched(together, tmp_path, order=LastFirst())

    names = [call.path[0] for call in run.calls if call.kind == "mkdir"]
    assert sorted(names) == [*"a" * 10, *"b" * 10]
    turns = sum(one != other for one, other in pairwise(names))
    assert turns < 8, "19 if each waited for the other"


def test_what_several_commands_leave_is_judged(tmp_path: Path) -> None:
    place = object.__new__(faults.Place)
    place.writer = replace(all_writers(tmp_path)[0], outputs=("out/a",))
    place.work, place.status = tmp_path, 0
    place.old = {"out": "", "notes.txt": "mine"}
    place.new = place.again = {**place.old, "out/a": "new"}
    error = "error: a\nwhy: b\nhint: c"

    def findings(tree: dict[str, str], *ended: tuple[int | None, str]) -> list[str]:
        run = faults.Run(Watched(met=True, status=ended[0][0] or 0), ended[0][1], tree, ended[1:])
        return list(faults.judge_all(place, run))

    done = 0, ""
    assert findings(place.new, done, (2, error), done) == []
    assert findings(place.new, done, (2, "usage: a"), done) == []
    assert findings(place.new, done, (None, "")) == ["hang"]
    assert findings(place.new, (2, error), (2, error)) == [
        "none succeeds: error: a / why: b; error: a / why: b"
    ]
    assert "without `error`" in findings(place.new, done, (2, "Killed"))[0]
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a").touch()
    assert findings({**place.new, "out/a": "other"}, done, done) == ["the output is broken: out/a"]
    assert findings({**place.new, "notes.txt": "other"}, done, done) == ["changed: notes.txt"]
    assert findings({**place.new, "out/b.tmp": "other"}, done, done) == ["left: out/b.tmp"]


def test_the_tallies_of_parts_are_added_and_others_replaced() -> None:
    def tally(part: str, repetitions: int, calls: int = 7) -> dict[str, Any]:
        counts = {"calls": calls, "planned": 10, "missed": 0, "seconds": 1.0, "findings": {}}
        return {"parts": [part], "repetitions": repetitions, **counts}

    first, second, whole = tally("1/2", 5), tally("2/2", 4), tally("1/1", 10)

    both = faults.added(first, second)
    assert (both["parts"], both["repetitions"], both["seconds"]) == (["1/2", "2/2"], 9, 2.0)
    assert faults.added(both, first) is first  # it was done again
    for before in ({}, whole, tally("1/2", 5, calls=8), tally("1/4", 3)):
        assert faults.added(before, second) is second
    assert faults.added(both, whole) is whole


@pytest.mark.usefixtures("watchable")
def test_a_second_command_runs_while_the_first_waits(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"

    def write() -> None:
        path.write_text(f"{path.read_text() if path.exists() else ''}x")

    def lock() -> None:
        with (tmp_path / "notes.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            write()

    for command, text in ((write, "x"), (lock, "xx")):
        path.unlink(missing_ok=True)
        (call,) = (c for c in watched(command, tmp_path).calls if str(c) == "write notes.txt")
        path.unlink()
        second = Second(command, tmp_path / "printed")
        run = watched(command, tmp_path, Fault(call, SECOND), second=second)

        assert run.met
        assert (run.status, second.status) == (0, 0)
        assert path.read_text() == text


@pytest.mark.usefixtures("watchable")
def test_a_write_that_is_not_atomic_is_found(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"

    def write() -> None:
        path.write_text("new")

    calls = watched(write, tmp_path).calls
    assert [str(call) for call in calls] == ["open notes.txt", "write notes.txt"]
    for what in (errno.ENOSPC, KILL):
        path.write_text("old")
        run = watched(write, tmp_path, Fault(calls[1], what))
        assert run.met
        assert run.status
        assert path.read_text() == ""


@pytest.mark.usefixtures("watchable")
def test_the_calls_of_child_processes_are_seen_and_fail(tmp_path: Path) -> None:
    def move() -> None:
        subprocess.run(["/bin/sh", "-c", "echo a > a && mv a b"], cwd=tmp_path, check=True)

    run = watched(move, tmp_path)
    assert [str(call) for call in run.calls] == ["open a", "write a", "rename a -> b"]
    assert all(run.callers)
    assert (tmp_path / "b").read_text() == "a\n"

    (tmp_path / "b").unlink()
    for what in (errno.EACCES, KILL_CALLER):
        run = watched(move, tmp_path, Fault(run.calls[-1], what))
        assert run.met
        assert run.status == 1
        assert not (tmp_path / "b").exists()

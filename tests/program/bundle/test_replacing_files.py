"""Files that belong together are replaced together, at whatever moment the writer is killed."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from whisperport.errors import WhisperportError
from whisperport.program.bundle import replacing_files
from whisperport.program.bundle.replacing_files import put_files_in_place
from whisperport.program.bundle.staging import Staging, staging

NAMES = ("p.bin", "p.host.json", "p.onnx")  # the output is the last
OLD = {"p.bin": "old weights", "p.onnx": "old program"}
NEW = {name: f"new {name}" for name in NAMES}
ALONE = {"p.txt": "the user's own"}


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> Callable[[], int]:
    """Kill the writer at its `step`-th change of the disk; return how many changes there were."""
    count = 0

    def counted(change: Any) -> Any:
        def run(*arguments: Any, **settings: Any) -> Any:
            nonlocal count
            count += 1
            if count == step:
                raise Killed
            return change(*arguments, **settings)

        return run

    monkeypatch.setattr(replacing_files, "rename_if_free", counted(replacing_files.rename_if_free))
    monkeypatch.setattr(replacing_files, "write_atomic", counted(replacing_files.write_atomic))
    for module, name in ((os, "rename"), (os, "unlink"), (os, "mkdir"), (os, "rmdir")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    return lambda: count


def prepared(folder: Path) -> Staging:
    for name, text in (OLD | ALONE).items():
        (folder / name).write_text(text)
    staged = Staging(folder / "p.onnx", "0123456789abcdef")
    staged.partial.mkdir()
    for name, text in NEW.items():
        (staged.partial / name).write_text(text)
    return staged


def put(staged: Staging) -> None:
    put_files_in_place(staged.partial, staged.files, staged.out, NAMES)


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def next_writer(out: Path) -> None:
    with staging(out):
        pass


def steps_of(folder: Path) -> int:
    folder.mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        staged = prepared(folder)
        count = kill_at(monkeypatch, 0)
        put(staged)
        return count()


def killed(folder: Path, step: int) -> Staging:
    """What a writer leaves in a new folder that is killed at a step; nothing happens after the last one."""
    folder.mkdir()
    staged = prepared(folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        kill_at(monkeypatch, step)
        with suppress(Killed):
            put(staged)
    return staged


def test_a_killed_writer_leaves_the_old_files_or_the_new_ones_to_the_next(tmp_path: Path) -> None:
    results = []

    for step in range(1, steps_of(tmp_path / "counted") + 2):
        folder = tmp_path / f"killed-{step}"
        staged = killed(folder, step)
        next_writer(staged.out)
        results.append(texts(folder))
        assert not staged.exists()

    assert OLD | ALONE in results
    assert NEW | ALONE in results
    assert all(found in (OLD | ALONE, NEW | ALONE) for found in results)


def test_a_kill_while_the_old_files_are_moved_back_loses_none(tmp_path: Path) -> None:
    last = steps_of(tmp_path / "counted") - 1

    for step in range(1, 40):
        folder = tmp_path / f"killed-{step}"
        folder.mkdir()
        staged = prepared(folder)
        with pytest.MonkeyPatch.context() as monkeypatch:
            kill_at(monkeypatch, last)
            with pytest.raises(Killed):
                put(staged)
        with pytest.MonkeyPatch.context() as monkeypatch:
            count = kill_at(monkeypatch, step)
            with suppress(Killed):
                replacing_files.restore_files(staged.partial, staged.files, staged.out)
        next_writer(staged.out)
        assert texts(folder) == OLD | ALONE
        if count() < step:
            return

    pytest.fail("moving back has no end")


def test_files_that_cannot_be_moved_back_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    staged = prepared(tmp_path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        kill_at(monkeypatch, steps_of(tmp_path / "counted") - 1)
        with pytest.raises(Killed):
            put(staged)
    (tmp_path / "p.onnx").write_text("made by the user meanwhile")

    next_writer(staged.out)
    next_writer(staged.out)

    kept = {path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert {*OLD.values(), "made by the user meanwhile"} <= kept
    assert str(staged.files) in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_the_user_has_put_in_place_of_a_new_one_is_kept(
    tmp_path: Path, name: str
) -> None:
    for step in range(1, steps_of(tmp_path / "counted") + 2):
        folder = tmp_path / f"killed-{step}"
        staged = killed(folder, step)
        replaced = folder / "by the user"
        replaced.write_text("the user's")
        replaced.replace(folder / name)

        next_writer(staged.out)

        assert (folder / name).read_text() == "the user's"
        kept = {path.read_text() for path in folder.rglob("*") if path.is_file()}
        others = {text for one, text in OLD.items() if one != name}
        assert others <= kept or set(NEW.values()) - {NEW[name]} <= kept


def test_no_file_is_lost_with_the_folder_of_the_new_ones(tmp_path: Path) -> None:
    for step in range(1, steps_of(tmp_path / "counted") + 2):
        folder = tmp_path / f"killed-{step}"
        staged = killed(folder, step)
        shutil.rmtree(staged.partial)

        next_writer(staged.out)

        assert texts(folder) in (OLD | ALONE, NEW | ALONE)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_or_a_pipe_at_one_of_the_places_is_not_replaced(tmp_path: Path, name: str) -> None:
    for make in (Path.mkdir, os.mkfifo):
        staged = prepared(tmp_path)
        (tmp_path / name).unlink(missing_ok=True)
        make(tmp_path / name)
        before = (tmp_path / name).stat().st_ino

        with pytest.raises(WhisperportError, match="cannot write"):
            put(staged)

        next_writer(staged.out)
        assert (tmp_path / name).stat().st_ino == before
        if (tmp_path / name).is_dir():
            (tmp_path / name).rmdir()
        else:
            (tmp_path / name).unlink()


@pytest.mark.parametrize(
    "names",
    [
        "nojson",
        "[]",
        "{}",
        '{"victim.txt": [24, 0], "p.onnx": [1, 0]}',
        '{"p.bin": [3]}',
        "[" * 10**5,
    ],
)
def test_a_list_of_files_that_is_not_ours_moves_and_deletes_nothing(
    tmp_path: Path, names: str, caplog: pytest.LogCaptureFixture
) -> None:
    staged = prepared(tmp_path)
    (staged.files / replacing_files.OLD).mkdir(parents=True)
    (staged.files / replacing_files.NAMES).write_text(names)
    (tmp_path / "victim.txt").write_text("the user's own too")
    before = texts(tmp_path)

    next_writer(staged.out)

    assert texts(tmp_path) == before
    assert "is damaged" in caplog.text

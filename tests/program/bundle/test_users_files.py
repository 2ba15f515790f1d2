"""Files of the user at an output are never deleted, whenever they appear there."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whisperport.build.export.export import export
from whisperport.errors import BundleError
from whisperport.program.bundle import Bundle, replacing
from whisperport.program.bundle.ownership import delete_listed
from whisperport.program.bundle.writing import check_writable, writing_bundle
from whisperport.system import atomic

from .conftest import program_of

Write = Callable[..., Bundle]


def _git(folder: Path) -> Path:
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("mine")
    return folder / ".git" / "HEAD"


def _env(folder: Path) -> Path:
    (folder / ".env").write_text("mine")
    return folder / ".env"


def _link_to_a_folder(folder: Path) -> Path:
    (folder.parent / "elsewhere").mkdir()
    (folder.parent / "elsewhere" / "file").write_text("mine")
    (folder / "link").symlink_to(folder.parent / "elsewhere")
    return folder / "link" / "file"


def _link_in_place_of_a_file(folder: Path) -> Path:
    (folder.parent / "elsewhere").write_bytes((folder / "embedding.npy").read_bytes())
    (folder / "embedding.npy").unlink()
    (folder / "embedding.npy").symlink_to(folder.parent / "elsewhere")
    return folder / "embedding.npy"


def _link_in_place_of_a_folder(folder: Path) -> Path:
    (folder / "programs").rename(folder.parent / "elsewhere")
    (folder / "programs").symlink_to(folder.parent / "elsewhere")
    return folder / "programs" / "encoder.bin"


def _empty_folder(folder: Path) -> Path:
    (folder / "later").mkdir()
    return folder / "later"


def _note(folder: Path) -> Path:
    (folder / "programs" / "notes.txt").write_text("mine")
    return folder / "programs" / "notes.txt"


THINGS = {
    ".git": _git,
    ".env": _env,
    "link": _link_to_a_folder,
    "embedding.npy": _link_in_place_of_a_file,
    "programs": _link_in_place_of_a_folder,
    "later": _empty_folder,
    "programs/notes.txt": _note,
}


@pytest.mark.parametrize("name", THINGS)
def test_a_bundle_with_something_of_the_users_in_it_is_not_replaced(
    tmp_path: Path, write: Write, name: str
) -> None:
    write(tmp_path / "nano", b"old")
    mine = THINGS[name](tmp_path / "nano")

    for attempt in (check_writable, lambda out: writing_bundle(out).__enter__()):
        with pytest.raises(BundleError, match=name) as refused:
            attempt(tmp_path / "nano")

    assert refused.value.what.endswith(f"did not write: {name}")
    assert "move it to another folder" in refused.value.hint
    assert mine.exists()


@pytest.mark.parametrize("name", THINGS)
def test_what_is_added_to_a_bundle_while_the_next_is_written_stays_with_it(
    tmp_path: Path, write: Write, way: str, name: str
) -> None:
    write(tmp_path / "nano", b"old")
    added: list[Path] = []

    with pytest.raises(BundleError, match="was not moved to") as refused:
        write(tmp_path / "nano", b"new", lambda _: added.append(THINGS[name](tmp_path / "nano")))

    assert name in refused.value.why
    assert str(tmp_path / "nano.new") in refused.value.hint
    assert added[0].exists()
    assert (tmp_path / "nano" / "programs" / "encoder.bin").read_bytes() == b"old"
    assert program_of(tmp_path / "nano.new") == b"new"
    assert sorted(set(os.listdir(tmp_path)) - {"elsewhere"}) == ["nano", "nano.new"]


def test_a_folder_that_appears_at_the_output_stays_there(
    tmp_path: Path, write: Write, way: str
) -> None:
    def appears(_: Path) -> None:
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis" / "thesis.tex").write_text("mine")

    with pytest.raises(BundleError, match="was not moved to") as refused:
        write(tmp_path / "thesis", b"new", appears)

    assert "not a bundle" in refused.value.why
    assert (tmp_path / "thesis" / "thesis.tex").read_text() == "mine"
    assert program_of(tmp_path / "thesis.new") == b"new"
    assert sorted(os.listdir(tmp_path)) == ["thesis", "thesis.new"]


def test_an_empty_folder_that_appears_at_the_output_is_used(
    tmp_path: Path, write: Write, way: str
) -> None:
    write(tmp_path / "nano", b"new", lambda _: (tmp_path / "nano").mkdir())

    assert program_of(tmp_path / "nano") == b"new"
    assert os.listdir(tmp_path) == ["nano"]


def test_a_file_or_link_that_appears_at_the_output_stays_there(
    tmp_path: Path, write: Write, way: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    for appears in (
        lambda out: out.write_text("mine"),
        lambda out: out.symlink_to(tmp_path / "elsewhere"),
        lambda out: out.symlink_to(tmp_path / "nowhere"),
    ):
        with pytest.raises(BundleError, match="was not moved to"):
            write(tmp_path / "nano", b"new", lambda _, appears=appears: appears(tmp_path / "nano"))

        assert (tmp_path / "nano").is_file() or (tmp_path / "nano").is_symlink()
        (tmp_path / "nano").unlink()

    kept = ["nano.new", "nano.new-2", "nano.new-3"]
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", *kept]
    assert [program_of(tmp_path / name) for name in kept] == [b"new"] * 3


def _before_the(
    number: int, renames: str, happens: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Call a function right before a rename."""
    owner: Any = os if renames == "rename" else replacing
    real, calls = getattr(owner, renames), 0

    def call(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            happens()
        return real(*args)

    monkeypatch.setattr(owner, renames, call)


def test_what_is_added_in_the_moment_before_the_exchange_stays_too(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    write(tmp_path / "nano", b"old")
    moment = (1, "exchange") if way == "one step" else (2, "rename")
    _before_the(*moment, lambda: _git(tmp_path / "nano"), monkeypatch)

    with pytest.raises(BundleError, match="was not moved to") as refused:
        write(tmp_path / "nano", b"new")

    assert str(tmp_path / "nano") in refused.value.why
    assert ".git" in refused.value.why
    assert (tmp_path / "nano" / ".git" / "HEAD").read_text() == "mine"
    assert (tmp_path / "nano" / "programs" / "encoder.bin").read_bytes() == b"old"
    assert program_of(tmp_path / "nano.new") == b"new"
    assert sorted(os.listdir(tmp_path)) == ["nano", "nano.new"]


def test_a_folder_that_appears_between_the_two_renames_stays_and_so_do_both_bundles(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "nano", b"old")
    monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)

    def appears() -> None:
        (tmp_path / "nano").mkdir()
        _env(tmp_path / "nano")

    _before_the(2, "rename_if_free", appears, monkeypatch)
    with pytest.raises(BundleError, match="was not moved to") as refused:
        write(tmp_path / "nano", b"new")

    assert "has appeared" in refused.value.why
    assert (tmp_path / "nano" / ".env").read_text() == "mine"
    assert program_of(tmp_path / "nano.replaced") == b"old"
    assert program_of(tmp_path / "nano.new") == b"new"


def test_what_appears_in_a_bundle_while_it_is_deleted_is_kept_and_its_place_is_named(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "nano", b"old")
    real = os.unlink

    def unlink(path: Any, **kwargs: Any) -> None:
        if "discarded" in str(path) and str(path).endswith("encoder.bin"):
            Path(path).with_name("saved.txt").write_text("mine")  # by an editor that has it open
        real(path, **kwargs)

    monkeypatch.setattr(os, "unlink", unlink)
    write(tmp_path / "nano", b"new")

    kept = tmp_path / "nano.replaced"
    assert (kept / "programs" / "saved.txt").read_text() == "mine"
    assert str(kept) in caplog.text
    assert program_of(tmp_path / "nano") == b"new"
    assert sorted(os.listdir(tmp_path)) == ["nano", "nano.replaced"]


def test_a_hostile_manifest_deletes_nothing_outside_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "manifest.json").write_text(
        '{"format": "whisperport bundle", "files": {"../thesis.tex": {}, "%s": {}, "..": {}}}'
        % (tmp_path / "thesis.tex")
    )

    delete_listed(tmp_path / "old")

    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("inside", ["", "programs"])
def test_the_current_folder_is_not_replaced(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    write(tmp_path / "nano", b"old")
    monkeypatch.chdir(tmp_path / "nano" / inside)

    for out in (tmp_path / "nano", Path(".") if not inside else Path("..")):
        with pytest.raises(BundleError, match="cannot write") as refused:
            check_writable(out)

    assert "the current folder" in refused.value.why
    assert str(tmp_path / "nano" / "bundle") in refused.value.hint
    assert program_of(tmp_path / "nano") == b"old"


def test_an_export_into_the_current_folder_is_an_error_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(BundleError, match="cannot write") as refused:
        export("no such checkpoint", "onnxruntime", ".")

    assert "the current folder" in refused.value.why


def test_an_output_is_checked_where_the_current_folder_was_deleted(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    write(tmp_path / "nano")

    assert program_of(tmp_path / "nano") == b"program"

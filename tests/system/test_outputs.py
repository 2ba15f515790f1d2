"""No output replaces an input, another output, or something that whisperport did not write."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from whisperport.errors import UsageError
from whisperport.system import outputs
from whisperport.system.outputs import Kind, Output, check_outputs, write_page
from whisperport.system.page import html_page

FILES: tuple[Kind, ...] = ("page", "file", "transcript")
KINDS: tuple[Kind, ...] = (*FILES, "folder", "bundle")


def rejected(*wanted: Output, inputs: list[Path] | None = None) -> str:
    with pytest.raises(UsageError) as error:
        check_outputs(wanted, inputs or [])
    assert error.value.hint
    return error.value.why


def a_link(path: Path, to: Path) -> Path:
    path.symlink_to(to)
    return path


def a_hard_link(path: Path, to: Path) -> Path:
    os.link(to, path)
    return path


def another_spelling(path: Path, to: Path) -> Path:
    (to.parent / "folder").mkdir()
    return to.parent / "folder" / ".." / to.name


@pytest.mark.parametrize("alias", [a_link, a_hard_link, another_spelling])
@pytest.mark.parametrize("kind", FILES)
def test_an_input_is_no_output_under_any_name(
    kind: Kind, alias: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    program = tmp_path / "program.pt2"
    program.write_text(html_page("", ""))  # even if it is a page of whisperport

    found = rejected(Output(alias(tmp_path / "alias", program), "--out", kind), inputs=[program])

    assert found == f"it is the input `{program}`, which would be replaced"


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_exist_yet_may_be_written(kind: Kind, tmp_path: Path) -> None:
    check_outputs([Output(tmp_path / "new", "--out", kind)], [tmp_path / "other", tmp_path])


@pytest.mark.parametrize("kind", ["file", "transcript"])
def test_a_file_of_an_input_folder_is_not_replaced(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    manifest = tmp_path / "in" / "deep" / "manifest.json"
    manifest.touch()

    found = rejected(Output(manifest, "--out", kind), inputs=[tmp_path / "in"])

    assert found == f"it is a file of the input `{tmp_path / 'in'}`"


def test_a_folder_that_is_replaced_contains_no_input(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    out.mkdir()
    link = a_link(tmp_path / "link.hef", out / "encoder.hef")
    (out / "encoder.hef").touch()

    for given in (out / "encoder.hef", link):
        assert "is in this folder" in rejected(Output(out, "--out", "bundle"), inputs=[given])
    check_outputs([Output(out, "--out", "folder")], [out / "encoder.hef"])


def test_a_page_replaces_only_a_page_of_whisperport(tmp_path: Path) -> None:
    mine, page = tmp_path / "report.html", tmp_path / "page.html"
    mine.write_text("<!doctype html><title>mine</title>")
    write_page(page, html_page("first", ""))

    why = rejected(Output(mine, "--html", "page"))
    write_page(page, html_page("second", ""))

    assert why == "a file that is not an HTML page of whisperport is there; it was not changed"
    assert "second" in page.read_text()
    with pytest.raises(UsageError, match="cannot write"):
        write_page(mine, html_page("", ""))
    assert "mine" in mine.read_text()


@pytest.mark.parametrize("kind", FILES)
def test_a_file_replaces_no_folder_and_no_pipe(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")

    assert rejected(Output(tmp_path / "folder", "--out", kind)) == "it is a folder"
    assert rejected(Output(tmp_path / "pipe", "--out", kind)) == "it is a pipe"
    assert rejected(Output(Path("/dev/null"), "--out", kind)) == "it is a device"


@pytest.mark.parametrize("kind", ["folder", "bundle"])
def test_a_folder_replaces_no_file(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert rejected(Output(tmp_path / "file", "--out", kind)) == "it is not a folder"


@pytest.mark.parametrize("kind", ["page", "file"])
def test_a_missing_folder_is_named_before_the_work(kind: Kind, tmp_path: Path) -> None:
    assert rejected(Output(tmp_path / "no" / "x", "--out", kind)) == "its folder does not exist"


@pytest.mark.parametrize("name", ["x\0y", "n" * 300, "loop"])
def test_a_path_that_cannot_be_is_an_error_with_its_reason(name: str, tmp_path: Path) -> None:
    a_link(tmp_path / "loop", tmp_path / "loop")

    for kind in FILES:
        assert rejected(Output(tmp_path / name, "--out", kind), inputs=[tmp_path, tmp_path / "a"])


def test_a_deleted_working_directory_is_an_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()

    for kind in FILES:
        with pytest.raises(FileNotFoundError):  # which the command line explains
            check_outputs([Output(Path("x"), "--out", kind)], [Path("input")])


def test_two_outputs_are_not_one_file(tmp_path: Path) -> None:
    a_link(tmp_path / "link", tmp_path / "x.html")
    page, out = Output(tmp_path / "link", "--html", "page"), tmp_path / "x.html"

    assert "is the same path" in rejected(page, Output(out, "--out", "file"))
    inside = Output(out / "page.html", "--html", "page")
    out.mkdir()
    assert "is in the other" in rejected(inside, Output(out, "--out", "bundle"))
    assert "is in the other" in rejected(Output(out, "--out", "bundle"), inside)
    check_outputs([inside, Output(out, "--out", "folder")])


def test_letter_case_is_compared_as_the_file_system_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower, upper = (
        Output(tmp_path / name, "--out", "file") for name in ("straße.TXT", "STRASSE.txt")
    )

    check_outputs([lower, upper])  # this file system takes them as two files
    monkeypatch.setattr(outputs, "_ignores_case", lambda _: True)

    assert "is the same path" in rejected(lower, upper)

"""Every verb says in its options what it writes; none of it replaces what the verb reads."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from whisperport.apps.cli.given import Given
from whisperport.apps.cli.main import cli
from whisperport.apps.cli.paths import OutputPath, check_paths, input_paths
from whisperport.build.export.model_bundle import VARIABLE
from whisperport.errors import UsageError

VERBS: dict[str, click.Command] = dict(cli.commands)
# Options that name a place to write to. A new one that is not declared as an output fails a test below.
WRITES = {"out", "html", "output", "work", "write_inputs"}


def outputs_of(verb: click.Command) -> list[click.Parameter]:
    return [option for option in verb.params if isinstance(option.type, OutputPath)]


def takes_path(option: click.Parameter) -> bool:
    """Whether a text of the user reaches the verb through this parameter."""
    is_text = isinstance(option.type, click.Path | click.types.StringParamType | Given)
    return is_text and not isinstance(option.type, OutputPath)


def cases() -> Iterator[Any]:
    for name, verb in VERBS.items():
        for output in outputs_of(verb):
            if output.type.kind is not None:  # type: ignore[attr-defined]
                for given in filter(takes_path, verb.params):
                    yield pytest.param(verb, output, given, id=f"{name}-{output.name}-{given.name}")


@pytest.mark.parametrize(("verb", "output", "given"), list(cases()))
@pytest.mark.parametrize("named", ["alone", "after an equals sign", "through a link"])
def test_no_output_of_a_verb_is_one_of_its_inputs(
    verb: click.Command, output: Any, given: Any, named: str, tmp_path: Path
) -> None:
    path = written = tmp_path / "given"
    is_folder = output.type.kind in ("folder", "bundle")
    path.mkdir() if is_folder else path.write_text("the user's own")
    if named == "through a link":
        written = tmp_path / "link"
        written.symlink_to(path)
    text = f"NAME={path}" if named == "after an equals sign" else str(path)
    many = given.multiple if isinstance(given, click.Option) else given.nargs == -1
    context = click.Context(verb)
    context.params = {output.name: written, given.name: (text,) if many else text}

    with pytest.raises(UsageError, match="cannot write"):
        check_paths(context)


def test_every_place_to_write_to_is_declared_as_an_output() -> None:
    declared = {option.name for verb in VERBS.values() for option in outputs_of(verb)}
    paths = {option.name for verb in VERBS.values() for option in filter(takes_path, verb.params)}

    assert declared == WRITES
    assert not paths & WRITES


def test_inputs_are_all_that_exists_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("bundle", "talk.wav", "-x", "a=b.npy")
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    context = click.Context(VERBS["transcribe"])
    context.params = {
        "bundle": Path("bundle"),
        "files": ("talk.wav", "missing.wav", "n" * 300, "nul\0", "", "-"),
        "chosen": ["NAME=-x", "a=b.npy"],
        "output": Path("bundle"),
        "threads": 2,
    }

    assert input_paths(context) == [Path(name) for name in ("bundle", "talk.wav", "-x", "a=b.npy")]
    assert input_paths(context, "files")[0] == Path("bundle")


@pytest.mark.parametrize("link", [False, True])
def test_the_bundle_that_the_environment_names_is_an_input(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: bool
) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "manifest.json").write_text("of the bundle")
    (tmp_path / "link").symlink_to(bundle)
    (tmp_path / "talk.wav").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "link" if link else bundle))
    output = str(bundle / "manifest.json")

    ran = run("transcribe", str(tmp_path / "talk.wav"), "-o", output, "--overwrite")

    assert ran.code != 0
    assert "it is a file of the input" in ran.err
    assert (bundle / "manifest.json").read_text() == "of the bundle"


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "bundle", "talk.wav", "--html", "talk.wav"),
        ("bench", "bundle", "talk.wav", "--transcript", "talk.txt", "--html", "talk.txt"),
        ("sensitivity", "model.onnx", "--html", "model.onnx"),
        ("sensitivity", "model.onnx", "--inputs", "in", "--html", "in/0.npz"),
        ("verify", "bundle", "--html", "bundle/manifest.json"),
        ("inspect", "model.onnx", "--html", "weights.bin"),
        ("check", "model.onnx", "--target", "xnnpack", "--html", "weights.bin"),
        ("fix", "p.pt2", "-t", "xnnpack", "-o", "new.pt2", "--html", "new.pt2"),
        ("fix", "p.pt2", "-t", "xnnpack", "-o", "in/0.npz", "--inputs", "in/0.npz"),
        ("export", "model.pt", "--target", "onnxruntime", "-o", "new", "--html", "model.pt"),
        ("export", "model.pt", "--target", "onnxruntime", "-o", "new", "--html", "new/page.html"),
        ("export", "bundle/x.pt", "--target", "onnxruntime", "-o", "bundle"),
        ("import", "bundle/x.hef", "--checkpoint", "tiny", "-o", "bundle"),
        ("lower", "p.pt2", "--target", "onnxruntime", "-o", "pipe.onnx"),
        ("lower", "p.pt2", "--target", "onnxruntime", "--inputs", "in/0.npz", "-o", "in/0.npz"),
        ("compile", "model.onnx", "--target", "rk3588", "--inputs", "in", "--work", "in"),
        ("diagnose", "bundle", "--write-inputs", "bundle"),
        ("demo", "-o", "talk.wav"),
        ("archive", "in", "--model", "default", "-o", "in"),
    ],
)
def test_a_file_of_the_user_is_as_it_was(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "in").mkdir()
    files = ("talk.wav", "talk.txt", "model.onnx", "model.pt", "weights.bin", "p.pt2", "in/0.npz")
    for name in (*files, "bundle/manifest.json", "bundle/x.pt", "bundle/x.hef"):
        (tmp_path / name).write_text(f"the user's {name}")
    os.mkfifo(tmp_path / "pipe.onnx")
    before = {path: path.lstat() for path in tmp_path.rglob("*")}
    monkeypatch.chdir(tmp_path)

    ran = run(*command)

    assert ran.code != 0
    for part in ("cannot write", "why:", "hint:"):
        assert part in ran.err
    after = {path: path.lstat() for path in tmp_path.rglob("*")}
    assert {path: (one.st_ino, one.st_mtime_ns) for path, one in after.items()} == {
        path: (one.st_ino, one.st_mtime_ns) for path, one in before.items()
    }

"""The command line, called as the shell calls it, and a small bundle to call it on."""

import io
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.apps.cli import main

from ...wav import write_wav


@dataclass(frozen=True)
class Ran:
    """What a command left: its exit code, its result, and what it printed on stderr."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.err.splitlines()


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("verify", folder, stdin=b"…")`: what `whisperport verify folder` would do."""

    def run(*arguments: object, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "argv", ["whisperport", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def talk(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder has `talk.wav` and a folder `talks`: a verb looks at its inputs first."""
    folder = tmp_path_factory.mktemp("talk")
    write_wav(folder / "talk.wav", np.zeros(1600))
    (folder / "talks").mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture(scope="session")
def bundle(exported: Callable[..., Any]) -> Path:
    """A bundle of the tiny random checkpoint on onnxruntime; made once, so do not write in it."""
    folder: Path = exported("onnxruntime").folder
    return folder


@pytest.fixture
def any_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle is chosen, which a test with a transcription of its own does not open."""
    monkeypatch.setenv("WHISPERPORT_BUNDLE", "any")


@pytest.fixture(autouse=True)
def four_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model never emits the end token: stop it early, and use one temperature only."""
    import whisperport.apps.cli.transcribe_options as options
    from whisperport.runtime import TEMPERATURES

    values_of = options.field_values

    def few(options: type[Any], chosen: dict[str, Any]) -> dict[str, Any]:
        values = values_of(options, chosen)
        if values.get("temperatures") == TEMPERATURES:
            values["temperatures"] = (0.0,)
        return values | ({"max_tokens": 4} if "max_tokens" in values else {})

    monkeypatch.setattr(options, "field_values", few)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own takes seconds to start; watching has tests of its own."""
    import whisperport.apps.cli.compile
    import whisperport.apps.cli.export
    import whisperport.apps.cli.import_
    import whisperport.apps.cli.lower

    def run_here(job: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        return job(*arguments)

    cli = whisperport.apps.cli
    for verb in (cli.compile, cli.export, cli.import_, cli.lower):
        monkeypatch.setattr(verb, "run_watched", run_here)


@pytest.fixture
def copied_bundle(bundle: Path, tmp_path: Path) -> Path:
    """The same bundle, to be damaged."""
    return shutil.copytree(bundle, tmp_path / "bundle")


@pytest.fixture
def wav(tmp_path: Path) -> Path:
    """A second of a 440 Hz tone: 16 kHz, mono, 16 bit."""
    tone = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    return write_wav(tmp_path / "tone.wav", tone / 4)

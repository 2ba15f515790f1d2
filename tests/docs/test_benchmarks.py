"""Each benchmark is named where a reader looks for it, can be started, and keeps one short result."""

import ast
import datetime
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.apps import layouts

from whisperport.verification.machine import machine

from .pages import ROOT

BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
SCRIPTS = sorted(
    path.relative_to(BENCHMARKS).as_posix()
    for path in BENCHMARKS.glob("*/*.py")
    if path.parent.name != "peers" or path.name == "__main__.py"
)
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in BENCHMARKS.rglob("*.py"))
LARGEST = 600_000  # bytes of all results
OURS = {"whisperport": ROOT / "src", "tests": ROOT, "fuzz": ROOT, "benchmarks": ROOT}


def imported(path: Path) -> list[tuple[str, str]]:
    """Return each module of ours that a file imports from, with each name."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            module = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            if module.split(".")[0] in OURS:
                found += [(module, alias.name) for alias in node.names]
    return found


def defines(module: str, name: str) -> bool:
    """Say whether a module has a name, without importing it."""
    path = OURS[module.split(".")[0]].joinpath(*module.split("."))
    if (path / f"{name}.py").exists() or (path / name).is_dir():
        return True
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return False
    stub = file.with_suffix(
        ".pyi"
    )  # lists the names of a module that loads them when they are used
    text = (stub if stub.exists() else file).read_text(encoding="utf-8")
    if "def __getattr__" in text:  # names that are loaded when they are used
        return re.search(rf"\b{name}\b", text) is not None
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return name in names


def test_the_readme_names_each_script_and_only_those():
    table = (BENCHMARKS / "README.md").read_text(encoding="utf-8").partition("## The scripts")[2]
    rows = [line for line in table.partition("\n## ")[0].splitlines() if line.startswith("| [")]

    named = [link for row in rows for link in re.findall(r"\]\((\w+/\w+\.py)\)", row)]

    assert sorted(named) == SCRIPTS


@pytest.mark.parametrize("module", MODULES)
def test_what_a_benchmark_imports_exists(module):
    lost = [pair for pair in imported(ROOT / module) if not defines(*pair)]

    assert lost == []


def test_a_name_that_does_not_exist_is_found():
    assert defines("whisperport.speech.audio.load", "AUDIO_SUFFIXES")
    assert not defines("whisperport.speech.audio.load", "SUFFIXES")
    assert not defines("whisperport.speech.audio.no_module", "SUFFIXES")


def test_the_results_are_short_and_each_is_cited():
    pages = [path.read_text(encoding="utf-8") for path in ROOT.glob("docs/**/*.md")]
    pages += [(BENCHMARKS / "README.md").read_text(encoding="utf-8")]
    questions = {Path(script).parent.name for script in SCRIPTS}
    files = list(RESULTS.iterdir())

    cited = {file.name for file in files if any(f"results/{file.name}" in page for page in pages)}

    assert {file.name for file in files} == cited == {f"{question}.json" for question in questions}
    assert sum(file.stat().st_size for file in files) <= LARGEST


def test_a_result_has_one_line_per_record_and_its_circumstances(tmp_path):
    from benchmarks.record import record, recorded

    rows = [{"program": f"program {n}", "ms": 1.23456789, "runs": n} for n in range(20)]

    record("speed", "batch", {"rows": rows[:1]}, tmp_path)
    record("speed", "batch", {"rows": rows}, tmp_path)
    path = record("speed", "chunks", {"wer": 0.0123456789}, tmp_path)

    lines = path.read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith('   {"program": ') for line in lines) == len(rows)
    assert recorded("speed", "batch", tmp_path)["rows"][3] == {**rows[3], "ms": 1.2346}
    assert recorded("speed", "chunks", tmp_path)["wer"] == 0.012346
    assert {"measured_on", "command", "machine"} <= set(recorded("speed", "batch", tmp_path))
    assert recorded("words", "batch", tmp_path) == {}


def test_the_command_of_a_result_names_no_folder_of_the_machine(tmp_path, monkeypatch):
    from benchmarks.record import record, recorded

    # given: folders outside of the project, one inside it, and a name
    outside = [f"--work={tmp_path}/work", "--eval", str(tmp_path / "eval")]
    inside = [str(ROOT / "build" / "small"), "training/work/eval", "default"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *outside, *inside])

    record("words", "compare", {}, tmp_path)

    # then: the command says which is which, and the stored results do the same
    words = shlex.split(recorded("words", "compare", tmp_path)["command"])
    assert words[3:6] == ["--work=DIR/work", "--eval", "DIR/eval"]
    assert words[6:] == ["build/small", "training/work/eval", "default"]
    for path in RESULTS.iterdir():
        for result in json.loads(path.read_text(encoding="utf-8")).values():
            assert not re.search(r"(^|[\s='\"])/\w", result.get("command", "")), path.name


def test_the_measured_files_of_apps_are_within_their_limits():
    from benchmarks.models import TINY
    from benchmarks.record import recorded

    from whisperport.build.layouts import layout_of
    from whisperport.targets.preflight import weight_bytes

    # given: what was measured in the precisions of the apps
    rows, usual = recorded("apps", "layouts")["rows"], recorded("apps", "usual")["apps"]
    for row in rows:
        layout, precision = layout_of(row["app"]), row["precision"]
        sizes = next((usual[app]["bytes"] for app in layout.apps if app in usual), {})

        # then: every clip is equal, or 95 % of 400 words
        assert row["verified"]
        if layout.apps[row["app"]].compared == "words":
            assert row["emitted"] >= 400
            assert row["differ"] <= 0.05 * row["emitted"]
        elif precision != "w8":
            assert row["equal"] == row["clips"]

        # and: the files are as small as the usual ones, and cheap to write
        assert row["bytes"] <= sizes.get(precision, row["bytes"]), (row["app"], precision)
        assert row["tiny"]["cpu_s"] <= 10
        assert row["tiny"]["peak_bytes"] <= 2 * weight_bytes(TINY) + 600e6


def test_a_row_of_the_table_of_apps_keeps_its_own_date(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # given a row of an app that is not measured again
    old = {"app": "optimum", "precision": "fp32", "measured_on": "2020-01-02", "cpu": "another"}
    saved: dict[str, Any] = {}
    monkeypatch.setattr(layouts, "recorded", lambda *_: {"rows": [old]})
    monkeypatch.setattr(layouts, "record", lambda *arguments: saved.update(arguments[-1]))
    # when another app is measured
    layouts.save({"app": "whisper.cpp", "precision": "w8"})
    # then each row has its own date and processor, and the command measures all
    assert saved["rows"][0] == old
    assert saved["rows"][1]["measured_on"] == datetime.date.today().isoformat()
    assert saved["rows"][1]["cpu"] == machine()["cpu"]
    assert "--apps" not in saved["command"]

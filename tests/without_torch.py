"""`make test-fast`: run what needs neither torch nor another package of the build side, and skip the rest.

A test file or a test that imports a package which is not installed is skipped, and says what it needs.
Nothing is listed by hand. `tests/conftest.py` loads these hooks only where torch is not installed.
"""

from collections.abc import Generator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from whisperport.errors import MissingPackageError

IS_ABSENT = find_spec("torch") is None
# Packages that the core installation does not need; a missing module of another one is a failure.
OPTIONAL = {
    *("torch", "onnx", "onnx_ir", "onnxscript", "transformers", "whisper", "safetensors", "tflite"),
    *("executorch", "openvino", "ai_edge_litert", "litert_torch", "ai_edge_quantizer", "requests"),
    *("google", "sounddevice", "onnxruntime_qnn", "onnxslim", "filelock", "pyarrow"),
    *("starlette", "sympy", "uvicorn", "wyoming"),
}

ignored: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Make warnings of deprecation that calls in our own modules cause errors."""
    for category in ("DeprecationWarning", "PendingDeprecationWarning"):
        config.addinivalue_line("filterwarnings", f"error::{category}:whisperport")


def needed(error: BaseException | None) -> str:
    """The optional package that an error, or one of its causes, asks for; empty if there is none."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            name = error.name.split(".")[0]
            return name if name in OPTIONAL else ""
        if isinstance(error, MissingPackageError):
            return "a package of the build side"
        error = error.__cause__ or error.__context__
    return ""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore a folder whose conftest.py, which is loaded before its tests, needs a package."""
    if not (collection_path / "conftest.py").is_file():
        return None
    folders = collection_path.relative_to(Path(__file__).parents[1]).parts
    try:
        import_module(".".join((*folders, "conftest")))
    except (ImportError, MissingPackageError) as error:
        if not (name := needed(error)):
            raise
        ignored.append(f"{collection_path.name} (needs {name})")
        return True
    return None


def pytest_runtest_setup(item: Any) -> None:
    for marker in item.iter_markers("needs"):
        if find_spec(marker.args[0]) is None:
            pytest.skip(f"needs {marker.args[0]}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"folders without tests here: {', '.join(sorted(set(ignored)))}")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: Any) -> Generator[None, Any, Any]:
    report = yield
    error = report.call.excinfo.value if report.failed else None
    if name := needed(error):
        report.outcome, report.result = "skipped", []
        report.longrepr = (str(collector.path), 0, f"Skipped: needs {name}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and call.excinfo and (name := needed(call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: needs {name}")
    return report

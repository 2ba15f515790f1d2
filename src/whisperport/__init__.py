"""Port a Whisper checkpoint to an accelerator, and verify that it still transcribes.

    checkpoint ─► model ─► programs ─► rewrites ─► targets ─► bundle ─► runtime ─► transcription
                                                                 └────► verification

Each verb of the command line is one function here: `export`, `compile`, `import_artifact`, `verify`,
`diagnose`, `transcribe`, `live` and `serve`; for single programs `check`, `fix`, `lower`, `inspect`,
`compare` and `sensitivity`; and `plan`. All errors are in `whisperport.errors`. The public names are listed
once, in `__init__.pyi`. Each is imported when it is first used, so that importing the package is fast.
Importing it, transcribing and verifying do not need torch.
"""

import ast
import os
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from whisperport import errors

# ONNX Runtime 1.29 and later sends usage reports to Microsoft unless this is set before its import. It
# sends them from a thread that a forked process waits for permanently at exit. Set the variable to 0 before
# the import to keep the reports.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


@cache
def _modules() -> dict[str, str]:
    """Read the public names from the stub: name -> module."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    names = {alias.name: node.module or "" for node in imports for alias in node.names}
    return {name: module for name, module in names.items() if module != __name__}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("whisperport")
    elif name == "__all__":
        value = list(_modules())
    elif name in _modules():
        value = getattr(_module(name), name)
    else:
        raise AttributeError(f"module 'whisperport' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*_modules(), "__version__", "errors"]


def _module(name: str) -> Any:
    """The module that defines a public name.

    Raises:
        MissingPackageError: the module needs torch, which is not installed.
    """
    module = _modules()[name]
    try:
        return import_module(module)
    except ImportError as error:
        if module != "whisperport.model.checkpoint":
            raise
        raise errors.MissingPackageError(
            f"cannot use `whisperport.{name}`: torch is not installed",
            why=str(error),
            hint='pip install "whisperport[export]"',
        ) from error

"""Take any Whisper checkpoint to an accelerator, and prove that it still transcribes.

    checkpoint ─► model ─► programs ─► rewrites ─► targets ─► bundle ─► runtime ─► transcription
                                                                 └────► verification

Four verbs: `load_checkpoint`, `export`, `verify`, `transcribe`. Importing the package, transcribing
and verifying need no torch. Each name is imported when it is first used, so that importing the package
takes no time.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whisperport.bundle import Bundle
    from whisperport.checkpoint import Checkpoint, load_checkpoint
    from whisperport.errors import (
        AudioError,
        BundleError,
        CheckpointError,
        ForkError,
        IncompleteError,
        Interrupted,
        LoweringError,
        MissingPackageError,
        NumericalError,
        TokenizerError,
        UsageError,
        VerificationError,
        WhisperportError,
    )
    from whisperport.exporting import ExportOptions, export
    from whisperport.runtime import DecodeOptions, Thresholds
    from whisperport.targets import RunOptions
    from whisperport.transcription import TranscribeOptions, Transcriber, Transcript, transcribe
    from whisperport.verification import Report
    from whisperport.verification.bundle_check import verify

    __version__: str

__all__ = [
    "AudioError",
    "Bundle",
    "BundleError",
    "Checkpoint",
    "CheckpointError",
    "DecodeOptions",
    "ExportOptions",
    "ForkError",
    "IncompleteError",
    "Interrupted",
    "LoweringError",
    "MissingPackageError",
    "NumericalError",
    "Report",
    "RunOptions",
    "Thresholds",
    "TokenizerError",
    "TranscribeOptions",
    "Transcriber",
    "Transcript",
    "UsageError",
    "VerificationError",
    "WhisperportError",
    "export",
    "load_checkpoint",
    "transcribe",
    "verify",
]


# ONNX Runtime from 1.29 on reports its use to Microsoft unless this is set before it is imported, from a
# thread for which a fork waits permanently when it exits. Set it to 0 beforehand to keep the reports.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Where the names are that are not errors.
_MODULES = {
    "Bundle": "bundle",
    "Checkpoint": "checkpoint",
    "DecodeOptions": "runtime",
    "ExportOptions": "exporting",
    "Report": "verification",
    "RunOptions": "targets",
    "Thresholds": "runtime",
    "TranscribeOptions": "transcription",
    "Transcriber": "transcription",
    "Transcript": "transcription",
    "export": "exporting",
    "load_checkpoint": "checkpoint",
    "transcribe": "transcription",
    "verify": "verification.bundle_check",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("whisperport")
    elif name in __all__:
        value = getattr(_module(name), name)
    else:
        raise AttributeError(f"module 'whisperport' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _module(name: str) -> Any:
    """That which has a name of `__all__`."""
    module = _MODULES.get(name, "errors")
    try:
        return import_module(f"whisperport.{module}")
    except ImportError as error:
        if module != "checkpoint":
            raise
        from whisperport.errors import MissingPackageError

        raise MissingPackageError(
            f"cannot use `whisperport.{name}`: torch is not installed",
            why=str(error),
            hint='pip install "whisperport[export]"',
        ) from error

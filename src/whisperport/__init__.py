"""Take any Whisper checkpoint to an accelerator, and prove that it still transcribes.

    checkpoint ─► model ─► programs ─► rewrites ─► targets ─► bundle ─► runtime ─► transcription
                                                                 └────► verification

Four verbs: `load_checkpoint`, `export`, `verify`, `transcribe`. Importing the package, transcribing
and verifying need no torch.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from whisperport.bundle import Bundle
from whisperport.errors import (
    AudioError,
    BundleError,
    CheckpointError,
    IncompleteError,
    Interrupted,
    LoweringError,
    MissingPackageError,
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

if TYPE_CHECKING:
    from whisperport.checkpoint import Checkpoint, load_checkpoint

__version__ = version("whisperport")

__all__ = [
    "AudioError",
    "Bundle",
    "BundleError",
    "Checkpoint",
    "CheckpointError",
    "DecodeOptions",
    "ExportOptions",
    "IncompleteError",
    "Interrupted",
    "LoweringError",
    "MissingPackageError",
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


def __getattr__(name: str) -> Any:
    """`Checkpoint` and `load_checkpoint` need torch, so they are imported when first asked for."""
    if name in ("Checkpoint", "load_checkpoint"):
        try:
            from whisperport import checkpoint
        except ImportError as error:
            raise MissingPackageError(
                f"cannot use `whisperport.{name}`: torch is not installed",
                why=str(error),
                hint='pip install "whisperport[export]"',
            ) from error
        return getattr(checkpoint, name)
    raise AttributeError(f"module 'whisperport' has no attribute {name!r}")

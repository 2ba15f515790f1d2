"""Port a Whisper checkpoint to an accelerator, and verify that it still transcribes.

    checkpoint ─► model ─► programs ─► rewrites ─► targets ─► bundle ─► runtime ─► transcription
                                                                 └────► verification

Each verb of the command line is one function here: `export`, `compile`, `import_artifact`, `verify` and
`transcribe`; `serve`; for single programs `check`, `fix`, `lower`, `inspect`, `compare` and `sensitivity`;
and `plan`. Importing the package, transcribing and verifying do not need torch. Each name is imported when
it is first used, so that importing the package is fast.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whisperport.archive import (
        ArchiveOptions,
        ArchiveProgress,
        ArchiveSummary,
        transcribe_archive,
    )
    from whisperport.bundle import Bundle
    from whisperport.checkpoint import Checkpoint, load_checkpoint
    from whisperport.commands.attempts import Searched
    from whisperport.commands.check import Checked, check
    from whisperport.commands.compare import CompareOptions, compare
    from whisperport.commands.fetch import fetch
    from whisperport.commands.fix import Fixed, fix
    from whisperport.commands.inspect import InspectOptions, inspect
    from whisperport.commands.lower import Lowered, LowerOptions, lower
    from whisperport.commands.plan import Plan, PlanOptions, plan
    from whisperport.commands.search import export_best
    from whisperport.commands.sensitivity import sensitivity
    from whisperport.compilation.compile import compile
    from whisperport.compilation.importing import ImportOptions, import_artifact
    from whisperport.compilation.options import CompileOptions
    from whisperport.compilation.source import Compiled
    from whisperport.diagnosis.device_inputs import DeviceInputs, write_device_inputs
    from whisperport.diagnosis.diagnosing import DiagnoseOptions, diagnose
    from whisperport.diagnosis.divergence import ComparedPrograms
    from whisperport.diagnosis.expected_outputs import expected_outputs
    from whisperport.diagnosis.result import Diagnosis
    from whisperport.errors import (
        AudioError,
        BundleError,
        CheckpointError,
        ForkError,
        IncompleteError,
        Interrupted,
        LongAudioError,
        LoweringError,
        MissingPackageError,
        NumericalError,
        ProgramError,
        QueueFullError,
        TokenizerError,
        UsageError,
        VerificationError,
        WhisperportError,
    )
    from whisperport.exporting.export import ExportOptions, export
    from whisperport.providers import ProviderReport, verify_each_program
    from whisperport.runtime import DecodeOptions, Thresholds
    from whisperport.serving.options import ServeOptions
    from whisperport.serving.serve import serve
    from whisperport.targets import RunOptions
    from whisperport.transcription import (
        FeatureOptions,
        FeatureStorage,
        TranscribeOptions,
        Transcriber,
        Transcript,
        transcribe,
        transcribe_features,
        transcribe_files,
    )
    from whisperport.transcription.live import live
    from whisperport.transcription.live_options import LiveOptions
    from whisperport.transcription.live_transcriber import LiveTranscriber, LiveUpdate
    from whisperport.verification import Report
    from whisperport.verification.bundle_check import verify
    from whisperport.verification.record_evidence import verify_and_record

    __version__: str

__all__ = [
    "ArchiveOptions",
    "ArchiveProgress",
    "ArchiveSummary",
    "AudioError",
    "Bundle",
    "BundleError",
    "Checked",
    "Checkpoint",
    "CheckpointError",
    "CompareOptions",
    "ComparedPrograms",
    "CompileOptions",
    "Compiled",
    "DecodeOptions",
    "DeviceInputs",
    "DiagnoseOptions",
    "Diagnosis",
    "ExportOptions",
    "FeatureOptions",
    "FeatureStorage",
    "Fixed",
    "ForkError",
    "ImportOptions",
    "IncompleteError",
    "InspectOptions",
    "Interrupted",
    "LiveOptions",
    "LiveTranscriber",
    "LiveUpdate",
    "LongAudioError",
    "LowerOptions",
    "Lowered",
    "LoweringError",
    "MissingPackageError",
    "NumericalError",
    "Plan",
    "PlanOptions",
    "ProgramError",
    "ProviderReport",
    "QueueFullError",
    "Report",
    "RunOptions",
    "Searched",
    "ServeOptions",
    "Thresholds",
    "TokenizerError",
    "TranscribeOptions",
    "Transcriber",
    "Transcript",
    "UsageError",
    "VerificationError",
    "WhisperportError",
    "check",
    "compare",
    "compile",
    "diagnose",
    "expected_outputs",
    "export",
    "export_best",
    "fetch",
    "fix",
    "import_artifact",
    "inspect",
    "live",
    "load_checkpoint",
    "lower",
    "plan",
    "sensitivity",
    "serve",
    "transcribe",
    "transcribe_archive",
    "transcribe_features",
    "transcribe_files",
    "verify",
    "verify_and_record",
    "verify_each_program",
    "write_device_inputs",
]


# ONNX Runtime 1.29 and later sends usage reports to Microsoft unless this is set before its import. It
# sends them from a thread that a forked process waits for permanently at exit. Set the variable to 0 before
# the import to keep the reports.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Name -> module; all other public names are errors, in `whisperport.errors`.
_MODULES = {
    "ArchiveOptions": "archive",
    "ArchiveProgress": "archive",
    "ArchiveSummary": "archive",
    "Bundle": "bundle",
    "Checked": "commands.check",
    "Checkpoint": "checkpoint",
    "CompareOptions": "commands.compare",
    "ComparedPrograms": "diagnosis.divergence",
    "CompileOptions": "compilation.options",
    "Compiled": "compilation.source",
    "DecodeOptions": "runtime",
    "DeviceInputs": "diagnosis.device_inputs",
    "DiagnoseOptions": "diagnosis.diagnosing",
    "Diagnosis": "diagnosis.result",
    "ExportOptions": "exporting.export",
    "FeatureOptions": "transcription",
    "FeatureStorage": "transcription",
    "Fixed": "commands.fix",
    "ImportOptions": "compilation.importing",
    "InspectOptions": "commands.inspect",
    "LiveOptions": "transcription.live_options",
    "LiveTranscriber": "transcription.live_transcriber",
    "LiveUpdate": "transcription.live_transcriber",
    "LowerOptions": "commands.lower",
    "Lowered": "commands.lower",
    "Plan": "commands.plan",
    "PlanOptions": "commands.plan",
    "ProviderReport": "providers",
    "Report": "verification",
    "RunOptions": "targets",
    "Searched": "commands.attempts",
    "ServeOptions": "serving.options",
    "Thresholds": "runtime",
    "TranscribeOptions": "transcription",
    "Transcriber": "transcription",
    "Transcript": "transcription",
    "check": "commands.check",
    "compare": "commands.compare",
    "compile": "compilation.compile",
    "diagnose": "diagnosis.diagnosing",
    "expected_outputs": "diagnosis.expected_outputs",
    "export": "exporting.export",
    "export_best": "commands.search",
    "fetch": "commands.fetch",
    "fix": "commands.fix",
    "import_artifact": "compilation.importing",
    "inspect": "commands.inspect",
    "live": "transcription.live",
    "load_checkpoint": "checkpoint",
    "lower": "commands.lower",
    "plan": "commands.plan",
    "sensitivity": "commands.sensitivity",
    "serve": "serving.serve",
    "transcribe": "transcription",
    "transcribe_archive": "archive",
    "transcribe_features": "transcription",
    "transcribe_files": "transcription",
    "verify": "verification.bundle_check",
    "verify_and_record": "verification.record_evidence",
    "verify_each_program": "providers",
    "write_device_inputs": "diagnosis.device_inputs",
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
    """The module that defines a name of `__all__`.

    Raises:
        MissingPackageError: the module needs torch, which is not installed.
    """
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

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
    from whisperport.apps.archive import (
        ArchiveOptions,
        ArchiveProgress,
        ArchiveSummary,
        transcribe_archive,
    )
    from whisperport.apps.serving.options import ServeOptions
    from whisperport.apps.serving.serve import serve
    from whisperport.build.check import Checked, check
    from whisperport.build.compare import CompareOptions, compare
    from whisperport.build.compile.compile import compile
    from whisperport.build.compile.importing import ImportOptions, import_artifact
    from whisperport.build.compile.options import CompileOptions
    from whisperport.build.compile.source import Compiled
    from whisperport.build.export.export import ExportOptions, export
    from whisperport.build.fetch import fetch
    from whisperport.build.fix import Fixed, fix
    from whisperport.build.inspect import InspectOptions, inspect
    from whisperport.build.lower import Lowered, LowerOptions, lower
    from whisperport.build.plan import Plan, PlanOptions, plan
    from whisperport.build.search.attempts import Searched
    from whisperport.build.search.search import export_best
    from whisperport.build.sensitivity import sensitivity
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
    from whisperport.model.checkpoint import Checkpoint, load_checkpoint
    from whisperport.program.bundle import Bundle
    from whisperport.runtime import DecodeOptions, Thresholds
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
    from whisperport.transcription.live.live import live
    from whisperport.transcription.live.options import LiveOptions
    from whisperport.transcription.live.transcriber import LiveTranscriber, LiveUpdate
    from whisperport.verification import Report
    from whisperport.verification.bundle_check import verify
    from whisperport.verification.diagnosis.device_inputs import DeviceInputs, write_device_inputs
    from whisperport.verification.diagnosis.diagnosing import DiagnoseOptions, diagnose
    from whisperport.verification.diagnosis.divergence import ComparedPrograms
    from whisperport.verification.diagnosis.expected_outputs import expected_outputs
    from whisperport.verification.diagnosis.result import Diagnosis
    from whisperport.verification.providers import ProviderReport, verify_each_program
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
    "ArchiveOptions": "apps.archive",
    "ArchiveProgress": "apps.archive",
    "ArchiveSummary": "apps.archive",
    "Bundle": "program.bundle",
    "Checked": "build.check",
    "Checkpoint": "model.checkpoint",
    "CompareOptions": "build.compare",
    "ComparedPrograms": "verification.diagnosis.divergence",
    "CompileOptions": "build.compile.options",
    "Compiled": "build.compile.source",
    "DecodeOptions": "runtime",
    "DeviceInputs": "verification.diagnosis.device_inputs",
    "DiagnoseOptions": "verification.diagnosis.diagnosing",
    "Diagnosis": "verification.diagnosis.result",
    "ExportOptions": "build.export.export",
    "FeatureOptions": "transcription",
    "FeatureStorage": "transcription",
    "Fixed": "build.fix",
    "ImportOptions": "build.compile.importing",
    "InspectOptions": "build.inspect",
    "LiveOptions": "transcription.live.options",
    "LiveTranscriber": "transcription.live.transcriber",
    "LiveUpdate": "transcription.live.transcriber",
    "LowerOptions": "build.lower",
    "Lowered": "build.lower",
    "Plan": "build.plan",
    "PlanOptions": "build.plan",
    "ProviderReport": "verification.providers",
    "Report": "verification",
    "RunOptions": "targets",
    "Searched": "build.search.attempts",
    "ServeOptions": "apps.serving.options",
    "Thresholds": "runtime",
    "TranscribeOptions": "transcription",
    "Transcriber": "transcription",
    "Transcript": "transcription",
    "check": "build.check",
    "compare": "build.compare",
    "compile": "build.compile.compile",
    "diagnose": "verification.diagnosis.diagnosing",
    "expected_outputs": "verification.diagnosis.expected_outputs",
    "export": "build.export.export",
    "export_best": "build.search.search",
    "fetch": "build.fetch",
    "fix": "build.fix",
    "import_artifact": "build.compile.importing",
    "inspect": "build.inspect",
    "live": "transcription.live.live",
    "load_checkpoint": "model.checkpoint",
    "lower": "build.lower",
    "plan": "build.plan",
    "sensitivity": "build.sensitivity",
    "serve": "apps.serving.serve",
    "transcribe": "transcription",
    "transcribe_archive": "apps.archive",
    "transcribe_features": "transcription",
    "transcribe_files": "transcription",
    "verify": "verification.bundle_check",
    "verify_and_record": "verification.record_evidence",
    "verify_each_program": "verification.providers",
    "write_device_inputs": "verification.diagnosis.device_inputs",
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
        if module != "model.checkpoint":
            raise
        from whisperport.errors import MissingPackageError

        raise MissingPackageError(
            f"cannot use `whisperport.{name}`: torch is not installed",
            why=str(error),
            hint='pip install "whisperport[export]"',
        ) from error

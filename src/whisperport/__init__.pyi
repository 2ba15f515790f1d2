"""The public names, each with its module. `__init__.py` reads this file, and so do type checkers."""

from whisperport import errors as errors
from whisperport.apps.archive import ArchiveOptions as ArchiveOptions
from whisperport.apps.archive import ArchiveSummary as ArchiveSummary
from whisperport.apps.archive import transcribe_archive as transcribe_archive
from whisperport.apps.serving import serve as serve
from whisperport.apps.serving.serve_options import ServeOptions as ServeOptions
from whisperport.build.check import Checked as Checked
from whisperport.build.check import check as check
from whisperport.build.compare import CompareOptions as CompareOptions
from whisperport.build.compare import compare as compare
from whisperport.build.compile.compile import compile as compile
from whisperport.build.compile.compile_options import CompileOptions as CompileOptions
from whisperport.build.compile.compiled import Compiled as Compiled
from whisperport.build.compile.importing import ImportOptions as ImportOptions
from whisperport.build.compile.importing import import_artifact as import_artifact
from whisperport.build.export.export import export as export
from whisperport.build.export.export_options import ExportOptions as ExportOptions
from whisperport.build.export.exported import Exported as Exported
from whisperport.build.fetch import fetch as fetch
from whisperport.build.fix import Fixed as Fixed
from whisperport.build.fix import fix as fix
from whisperport.build.inspect import InspectOptions as InspectOptions
from whisperport.build.inspect import inspect as inspect
from whisperport.build.judge.judge import judge as judge
from whisperport.build.layouts.convert import ConvertOptions as ConvertOptions
from whisperport.build.layouts.convert import convert as convert
from whisperport.build.lower import Lowered as Lowered
from whisperport.build.lower import LowerOptions as LowerOptions
from whisperport.build.lower import lower as lower
from whisperport.build.plan import Plan as Plan
from whisperport.build.plan import PlanOptions as PlanOptions
from whisperport.build.plan import plan as plan
from whisperport.build.search.search import export_best as export_best
from whisperport.build.sensitivity import sensitivity as sensitivity
from whisperport.model.checkpoint import Checkpoint as Checkpoint
from whisperport.model.checkpoint import load_checkpoint as load_checkpoint
from whisperport.program.bundle import Bundle as Bundle
from whisperport.runtime import DecodeOptions as DecodeOptions
from whisperport.runtime import Thresholds as Thresholds
from whisperport.system.progress import reporting as reporting
from whisperport.targets import RunOptions as RunOptions
from whisperport.transcription import TranscribeOptions as TranscribeOptions
from whisperport.transcription import Transcriber as Transcriber
from whisperport.transcription import Transcript as Transcript
from whisperport.transcription import transcribe as transcribe
from whisperport.transcription import transcribe_files as transcribe_files
from whisperport.transcription.feature_files import FeatureOptions as FeatureOptions
from whisperport.transcription.feature_files import transcribe_features as transcribe_features
from whisperport.transcription.live.live import live as live
from whisperport.transcription.live.live_options import LiveOptions as LiveOptions
from whisperport.transcription.live.transcriber import LiveTranscriber as LiveTranscriber
from whisperport.transcription.live.transcriber import LiveUpdate as LiveUpdate
from whisperport.verification import Report as Report
from whisperport.verification.bundle_check import verify as verify
from whisperport.verification.diagnosis.device_inputs import (
    write_device_inputs as write_device_inputs,
)
from whisperport.verification.diagnosis.diagnosing import DiagnoseOptions as DiagnoseOptions
from whisperport.verification.diagnosis.diagnosing import diagnose as diagnose
from whisperport.verification.diagnosis.expected_outputs import expected_outputs as expected_outputs
from whisperport.verification.diagnosis.result import Diagnosis as Diagnosis
from whisperport.verification.diagnosis.stored_features import FeatureStorage as FeatureStorage
from whisperport.verification.providers import verify_each_program as verify_each_program

__version__: str

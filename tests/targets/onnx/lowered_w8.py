"""Programs of the micro model in the precision `w8` of the target `onnxruntime`."""

from collections.abc import Sequence
from pathlib import Path

from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.bundle import ProgramEntry
from whisperport.program.runner import Runner
from whisperport.targets import RunOptions, get_target
from whisperport.targets.cpu.onnxruntime import OPSETS, LowerOptions

Lowered = tuple[Path, list[ProgramEntry]]


def lowered_w8(
    micro: Whisper, folder: Path, names: Sequence[str], opset: int = OPSETS[-1]
) -> Lowered:
    target = get_target("onnxruntime").configured(LowerOptions(opset=opset))
    target = target.with_precisions(dict.fromkeys(names, "w8"))
    programs = list(whisper_programs(Parts(micro, [(0, 0)]), names))
    return folder, target.lower(programs, folder)


def loaded(lowered: Lowered) -> dict[str, Runner]:
    return get_target("onnxruntime").load(*lowered, RunOptions(threads=1))

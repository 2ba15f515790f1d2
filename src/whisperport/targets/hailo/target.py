"""Hailo's chips as targets: ONNX and a model script for their compiler, a stand-in until it has run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, cast, final

from whisperport.bundle import ProgramEntry, regular_file
from whisperport.bundle.onnx_graph import OnnxGraph
from whisperport.dims import Dims
from whisperport.errors import BundleError, UsageError
from whisperport.runner import Runner
from whisperport.spec import FullForm, ProgramSpec, Refusal
from whisperport.targets.base import RunOptions, Say, Target
from whisperport.targets.hailo.chips import OPSETS, Chip
from whisperport.targets.hailo.compiler import HailoCompiler
from whisperport.targets.hailo.importer import HailoImporter
from whisperport.targets.hailo.model_script import model_script
from whisperport.targets.hailo.size import too_large
from whisperport.targets.onnx_lowering import lower_to_onnx
from whisperport.targets.onnx_runner import OnnxRunner

if TYPE_CHECKING:  # boards have no torch
    from whisperport.programs.program import Program

OPSET = 17  # the newest that was seen to be parsed; layer norms stay whole
ROWS = 32  # of `decode_full`, where none is published for a checkpoint's width
POSITIONS = ("host", "graph")
SUFFIX = ".hef"


@final
class Hailo(Target):
    """One chip.

    Options for lowering: `opset`, 13 or 17; of `decode_full`: `rows`, and `positions`, which is `host` or
    `graph`. Options for running: `stand-in`, where `onnx` runs what was given to the compiler on the CPU;
    `service`, where `on` shares the chip with other processes by HailoRT's service.
    """

    def __init__(
        self,
        chip: Chip,
        opset: int = OPSET,
        rows: int | None = None,
        positions: Literal["host", "graph"] = "host",
    ) -> None:
        self.chip, self.spec = chip, chip.spec
        self.compiler = HailoCompiler(chip)
        self.importer = HailoImporter(chip)
        self.opset, self.rows, self.positions = opset, rows, positions

    def configured(self, options: Mapping[str, str]) -> Self:
        opset, rows = options.get("opset", str(OPSET)), options.get("rows", "")
        positions = options.get("positions", POSITIONS[0])
        if opset not in map(str, OPSETS):
            raise _wrong("opset", opset, " or ".join(map(str, sorted(OPSETS))))
        if positions not in POSITIONS:
            raise _wrong("positions", positions, " or ".join(POSITIONS))
        if rows and not (re.fullmatch("[0-9]{1,4}", rows) and int(rows) >= 8):
            raise _wrong("rows", rows[:20], "a number from 8 on")
        form = cast(Literal["host", "graph"], positions)
        return type(self)(self.chip, int(opset), int(rows) if rows else None, form)

    def full_form(self, dims: Dims) -> FullForm:
        """The published one, of hailocs/hailo-whisper@ebe7a85: its parser begins after the lookup of
        tokens, at a reshape, and ends before the pieces of the logits are joined; its causal mask is -inf.
        """
        rows = self.rows or min(self.chip.rows.get(dims.n_text_state, ROWS), dims.n_text_ctx)
        if rows > dims.n_text_ctx:
            raise _wrong("rows", str(rows), f"at most {dims.n_text_ctx}, the decoder's positions")
        return FullForm(rows, self.positions)

    def too_large(self, dims: Dims) -> str:
        return too_large(dims)

    def check(self, program: "Program") -> list[Refusal]:
        from whisperport.targets.graph_check import refusals

        return refusals(program, self.spec)

    def lower(self, programs: Sequence["Program"], folder: Path, say: Say) -> list[ProgramEntry]:
        """Write each program as one ONNX file with its weights, and the script that compiles it."""
        return [
            self._with_script(entry, folder)
            for entry in lower_to_onnx(self, programs, folder, self.opset, say)
        ]

    def _with_script(self, entry: ProgramEntry, folder: Path) -> ProgramEntry:
        script = f"{self.spec.name}/{entry.spec.name}.alls"
        (folder / script).write_text(_script(self.chip, entry.spec), encoding="utf-8")
        return replace(entry, files=(*entry.files, script))

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        stand_in = options.options.get("stand-in")
        if stand_in not in (None, *self.spec.stand_in.values()):
            raise _wrong("stand-in", stand_in, " or ".join(self.spec.stand_in.values()))
        service = options.options.get("service")
        if service not in (None, "on"):
            raise _wrong("service", service, "on")
        if stand_in:
            return {
                entry.spec.name: OnnxRunner(
                    entry.spec,
                    OnnxGraph.of(folder, entry, _file(self.chip, entry, ".onnx")),
                    options.threads,
                )
                for entry in entries
            }
        from whisperport.targets.hailo.runtime import load_hefs

        hefs = {e.spec.name: regular_file(folder, _file(self.chip, e, SUFFIX)) for e in entries}
        specs = [entry.spec for entry in entries]
        return load_hefs(self.chip, specs, hefs, service=service == "on")


def _script(chip: Chip, spec: ProgramSpec) -> str:
    """The model script with the defaults; the width is that of the features."""
    if spec.name == "decode_full":
        return model_script(chip.name, spec.inputs[0].shape[-1], program=spec.name)
    return model_script(chip.name, spec.outputs[0].shape[-1])


def _file(chip: Chip, entry: ProgramEntry, suffix: str) -> str:
    """The entry's file of this kind."""
    for file in entry.files:
        if file.endswith(suffix):
            return file
    if suffix == SUFFIX:
        raise BundleError(
            f"`{entry.spec.name}` is not compiled for `{chip.name}` yet",
            why=f"the bundle holds {', '.join(entry.files)}, which Hailo's compiler takes",
            hint="whisperport compile BUNDLE --calibration AUDIO_DIR; until then "
            "`--run-option stand-in=onnx` runs that file on the CPU",
        )
    raise BundleError(
        f"nothing can stand in for `{entry.spec.name}` on `{chip.name}`",
        why=f"the bundle holds {', '.join(entry.files)}, and no {suffix} file",
    )


def _wrong(name: str, value: str | None, expected: str) -> UsageError:
    return UsageError(f"the option `{name}` cannot be `{value}`", hint=f"expected {expected}")

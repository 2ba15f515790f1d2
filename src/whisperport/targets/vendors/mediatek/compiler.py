"""MediaTek's compiler, `ncc-tflite`: its stages, the check of compiled files, and its errors in words."""

import json
import mmap
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast, final

from whisperport.errors import MissingPackageError
from whisperport.program.spec import ProgramSpec
from whisperport.targets.compiled_file import (
    not_compiled,
    other_program,
    printable,
    printable_texts,
    read_bytes,
    read_json,
    read_report,
    read_text,
)
from whisperport.targets.compiler import (
    CompilePlan,
    Compiler,
    CompileRequest,
    Explanation,
)
from whisperport.targets.toolchain import Stage
from whisperport.targets.vendors.mediatek import stages
from whisperport.targets.vendors.mediatek.chips import Chip
from whisperport.targets.vendors.mediatek.flags import CompileOptions, flags_of
from whisperport.targets.vendors.mediatek.printed_plan import notes_of, read_io, read_plan

MODEL, COMPILED = ".tflite", ".dla"
CHECKED, IO, PLAN = "check.txt", "io.txt", "plan.txt"  # what the stages printed
BUILT, NOTES = "built.json", "notes.json"

# Class of a stage's error -> what happened, as words that follow the compiler's title; and what to do.
_FAILURES: Mapping[str, Explanation] = {
    "UnsupportedOperatorError": (
        "does not support an operator",
        "`whisperport check BUNDLE --target {target}` lists the rejected nodes with rewrites; or place the "
        "program on the CPU: export with `--placement {program}=litert`",
    ),
    "UnsupportedTypeError": (
        "does not support the type of a tensor",
        "export in another precision: `--precision {program}=fp16`; the NPU has float16, 8-bit integers "
        "and, from MDLA 3.0 on, 16-bit activations",
    ),
    "UnknownFlagError": (
        "does not have one of the flags",
        "turn the option of this flag off with `--option {target}.NAME=off`, or remove it from "
        "`{target}.flags`: `ncc-tflite --help` lists the flags of this version",
    ),
    "MemoryError": (
        "ran out of memory",
        "use a machine with more memory; or try `--option {target}.opt=1`, and `--option "
        "{target}.relax-fp32=off`, with which the encoder of large-v3-turbo compiled for a user",
    ),
    "MissingLibraryError": (
        "cannot load one of its libraries",
        "name the folder of the complete SDK, with host/lib beside host/bin: `--toolchain "
        "mediatek=/path/to/sdk`; on Debian, the package libc++1 has libc++.so.1",
    ),
    "MissingConfigurationError": (
        "cannot read the configuration of this machine",
        "use the SDK's host/bin/ncc-tflite on a PC; on a board, install the image's Neuron configuration "
        "(commonly /vendor/etc/armnn_app.config)",
    ),
}

# A record in the files of NeuroPilot's compilers. Source: a user's report on genio-community.mediatek.com,
# t/1907: {"CompilerName": "adapter", "CompilerVersion": "9.2.1", "Neuron SHA1": "b3a8289961"}.
_RECORD = re.compile(rb'"CompilerVersion"\s*:\s*"([0-9][0-9A-Za-z.+-]{0,30})"')


@final
class NccCompiler(Compiler):
    """`ncc-tflite` for one board."""

    toolchain: ClassVar[str] = "mediatek"
    sdk: ClassVar[str] = stages.COMMAND
    is_command: ClassVar[bool] = True
    variables: ClassVar[tuple[str, ...]] = stages.VARIABLES[1:]
    source: ClassVar[str] = (
        "x86-64 Linux, NeuroPilot SDK from MediaTek, or a Genio board's own image"
    )
    script: ClassVar[Path] = Path(stages.__file__)
    options: ClassVar[type[Any]] = CompileOptions
    suffix: ClassVar[str] = COMPILED
    failures: ClassVar[Mapping[str, Explanation]] = _FAILURES

    def __init__(self, chip: Chip) -> None:
        self._chip, self.target = chip, chip.name
        versions = " or ".join(str(major) for major in chip.npu.sdks)
        self.title = f"ncc-tflite of NeuroPilot {versions}"

    def settings(self) -> Mapping[str, Any]:
        return {
            "board": self._chip.name,
            "arch": self._chip.npu.arch,
            "sdks": list(self._chip.npu.sdks),
        }

    def plan(self, request: CompileRequest) -> CompilePlan:
        name = request.spec.name
        chosen = flags_of(cast(CompileOptions, request.options), self._chip)
        model, artifact = f"{name}{MODEL}", f"{name}{COMPILED}"
        (request.folder / NOTES).write_text(json.dumps(chosen.notes), encoding="utf-8")
        return CompilePlan(
            stages=(
                Stage("check", (model,), (CHECKED,)),
                Stage("describe", (model,), (IO,)),
                Stage("compile", (model,), (artifact, PLAN, BUILT)),
            ),
            artifact=artifact,
            settings={"model": model, "artifact": artifact, "flags": list(chosen.flags)},
        )

    def check(self, artifact: Path, spec: ProgramSpec) -> Mapping[str, Any]:
        """Check what can be known of a compiled file.

        MediaTek does not publish the format of .dla files, so that its contents are not checked. Inputs and
        outputs are compared as the compiler describes them, if its description is beside the file.
        """
        if read_bytes(artifact, 8)[4:] == b"TFL3":
            raise not_compiled(artifact, "it is a .tflite, the input of the compiler")
        folder = artifact.parent
        built = read_report(folder / BUILT)
        plan = read_plan(read_text(folder / PLAN))
        checked = read_plan(read_text(folder / CHECKED))
        plan = replace(plan, problems=tuple(dict.fromkeys((*checked.problems, *plan.problems))))
        facts: dict[str, Any] = {
            "compiler": _recorded_version(artifact) or printable(built.get("version", "")),
            "compiled_for": self._chip.npu.arch,
            "compiler_flags": printable_texts(built.get("flags")),
            "plan": plan.targets,
            "inputs_and_outputs_compared": _compared(folder, spec, artifact),
        }
        facts["notes"] = [
            *_noted(folder / NOTES),
            *notes_of(plan, self._chip.npu.plan_target, self._chip.board),
        ]
        return facts


def _recorded_version(path: Path) -> str:
    """Return the compiler's version that a compiled file states, "" if it states none."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        match = _RECORD.search(data)
        return match[1].decode("ascii") if match else ""


def _compared(folder: Path, spec: ProgramSpec, artifact: Path) -> bool:
    """Compare the inputs and outputs that the compiler described with those of the .tflite.

    Returns:
        False if the compiler's description, or the package tflite, is missing, or it is not understood.

    Raises:
        BundleError: they differ.
    """
    from whisperport.model.inspection.tflite_signatures import read_signatures

    inputs, outputs = read_io(read_text(folder / IO))
    model = folder / f"{spec.name}{MODEL}"
    if not inputs or not outputs or not model.is_file():
        return False
    try:
        (stated,) = read_signatures(model).values()
    except MissingPackageError:
        return False
    for side, described, tensors in (
        ("inputs", inputs, stated.inputs),
        ("outputs", outputs, stated.outputs),
    ):
        expected = sorted(f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors)
        if sorted(described) != expected:
            what = f"the compiler describes its {side} as"
            raise other_program(artifact, spec, what, sorted(described), expected)
    return True


def _noted(path: Path) -> list[str]:
    notes = read_json(path)
    return [str(note) for note in notes] if isinstance(notes, list) else []

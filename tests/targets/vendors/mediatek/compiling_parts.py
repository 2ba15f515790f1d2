"""A work folder with one small program, for tests of MediaTek's compiler with the fake `ncc-tflite`."""

import json
from pathlib import Path
from typing import Any

from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets.compiler import CompileRequest
from whisperport.targets.toolchain import Job, prepare
from whisperport.targets.vendors.mediatek.chips import GENIO720, Chip
from whisperport.targets.vendors.mediatek.compiler import NccCompiler
from whisperport.targets.vendors.mediatek.flags import CompileOptions

from ....model.inspection.tflite_file import Op, T, tflite_file

SPEC = ProgramSpec("encoder", (TensorSpec("x", (2, 3)),), (TensorSpec("y", (2, 4)),))
FLOATS = ([["float32", [2, 3]]], [["float32", [2, 4]]])  # inputs and outputs of the model


def linear() -> bytes:
    """Return a .tflite with the inputs and outputs of `SPEC`."""
    return tflite_file(
        [T((2, 3)), T((4, 3), data=bytes(48)), T((4,), data=bytes(16)), T((2, 4))],
        [Op("FULLY_CONNECTED", (0, 1, 2), (3,))],
        (0,),
        (3,),
        signature=("encoder", ("x",), ("y",)),
    )


def work_folder(folder: Path, options: CompileOptions | None = None, chip: Chip = GENIO720) -> Path:
    """Prepare a work folder with the program `linear`; return it."""
    compiler, program = NccCompiler(chip), folder / "work" / "encoder"
    program.mkdir(parents=True, exist_ok=True)
    (program / "encoder.tflite").write_bytes(linear())
    (program / "encoder.fake.json").write_text(json.dumps(FLOATS))  # for the fake, see there
    request = CompileRequest(
        spec=SPEC,
        dims=_unused(),
        options=options or CompileOptions(),
        folder=program,
        files=("encoder.tflite",),
    )
    plan = compiler.plan(request)
    job = Job(name="encoder", stages=plan.stages, settings=plan.settings)
    prepare(folder / "work", compiler.script, compiler.settings(), [job])
    return folder / "work"


def _unused() -> Any:
    return None

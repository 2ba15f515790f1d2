"""Read what MediaTek's compiler prints about a program: its execution plan, its inputs and its outputs.

The compiler's output is text for people, has no version, and comes from a program of unknown origin. A line
that is not understood is ignored, so that the result says less and not something else. The forms come from
scripts and logs of users, since MediaTek does not document them:

    OP[12]: GATHER                      an operator, before messages about it
    MDLA: unsupported operation         why the engine does not run it
    Target: MDLA_5_3                    the engine of one part of the plan, with --show-exec-plan
    Type: kTfLiteFloat32                of an input or output, with --show-io-info
    Shape: {1,80,3000}
    # of output tensors: 1              inputs come before this line, outputs after it

Sources: superLin006/MTK_model_zoo@942c4fb; MediaTek's demos of nnstreamer and label_image for Genio, which
read --show-io-info; reports about NeuroPilot 8.2 on Genio 720, with the target EDPA_1_2.
"""

import re
from collections import Counter
from dataclasses import dataclass

from whisperport.targets.compiled_file import printable

LONGEST_TEXT = 8 * 2**20  # characters that are read
MOST = 100_000  # parts or operators that are read
SHOWN = 3  # names in a sentence

_TARGET = re.compile(r"\bTarget:\s*([A-Za-z][A-Za-z0-9_.]{0,40})")
_OPERATOR = re.compile(r"^\s*OP\[(\d{1,9})\]:?\s*([A-Za-z]\w{0,60})")
_PROBLEM = re.compile(
    r"unsupported|not support(ed)?|does not support|fall ?back|software (path|implementation)", re.I
)
_TYPE = re.compile(r"\bType:\s*kTfLite(\w{1,20})")
_SHAPE = re.compile(r"\bShape:\s*\{\s*([\d\s,]{0,200})\}")
_OUTPUTS = "# of output tensors"


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """The engines that the compiler chose.

    Attributes:
        targets: engine -> number of parts of the plan that it runs; empty: the plan is not understood.
        problems: operators that an engine does not run, each with what the compiler printed about it.
    """

    targets: dict[str, int]
    problems: tuple[str, ...]


def read_plan(text: str) -> ExecutionPlan:
    """Read the output of `--show-exec-plan` or `--check-target-only`."""
    targets: Counter[str] = Counter()
    problems: dict[str, None] = {}
    operator = "an operator"
    for line in text[:LONGEST_TEXT].splitlines():
        line = line[:2000]
        if named := _OPERATOR.match(line):
            operator = named[2]
        if target := _TARGET.search(line):
            if len(targets) < MOST:
                targets[target[1]] += 1
        elif _PROBLEM.search(line) and len(problems) < MOST:
            problems[f"{operator}: the compiler printed: {printable(line)}"] = None
    return ExecutionPlan(dict(targets), tuple(problems))


def read_io(text: str) -> tuple[list[str], list[str]]:
    """Read the output of `--show-io-info`: inputs and outputs; both empty if it is not understood."""
    inputs, separator, outputs = text[:LONGEST_TEXT].partition(_OUTPUTS)
    return (_tensors(inputs), _tensors(outputs)) if separator else ([], [])


def _tensors(text: str) -> list[str]:
    """Return type and shape of each tensor, such as "float32[2, 4]"; empty if their numbers differ."""
    types, shapes = _TYPE.findall(text), _SHAPE.findall(text)
    if len(types) != len(shapes) or len(types) > MOST:
        return []
    pairs = zip(types, shapes, strict=True)
    return [f"{name.lower()}[{', '.join(re.findall('[0-9]+', axes))}]" for name, axes in pairs]


def notes_of(plan: ExecutionPlan, engine: str, board: str) -> list[str]:
    """Return what the user should know about a plan: parts that do not run on the NPU.

    Args:
        engine: name of the NPU in plans, such as "MDLA_5_3".
        board: name of the board.
    """
    notes = []
    if not plan.targets:
        notes.append(
            "the compiler's execution plan is not understood, so that it is not known whether all "
            "operators run on the NPU; it is in the log of the stage compile"
        )
    for target, parts in plan.targets.items():
        if target.upper() == engine or target.upper().startswith("EDMA"):  # moves the NPU's data
            continue
        run = "1 part of the execution plan runs"
        if parts > 1:
            run = f"{parts} parts of the execution plan run"
        notes.append(f"{run} on {target}, not on {engine}, the NPU of {board}{_advice(target)}")
    notes += plan.problems[:SHOWN]
    further = len(plan.problems) - SHOWN
    if further > 0:
        notes.append(f"{further} further messages are in the log of the stage compile")
    return notes


def _advice(target: str) -> str:
    if target.startswith("EDPA"):
        # A report about ncc-tflite 8.2.31 and neuronrt 8.2.16 on Genio 720.
        return (
            ": a board without this engine rejects the file (`Found an unsupported target`); "
            "compile with `disallow-bridge=on`"
        )
    return ": it falls back, and is slower"

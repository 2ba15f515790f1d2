"""Lower one program, ours or a stranger's, to one file: rewrite, compile, compare, put in place."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.bundle import ProgramEntry
from whisperport.bundle.staging import staging
from whisperport.errors import (
    BundleError,
    LoweringError,
    MissingPackageError,
    ProgramError,
    UsageError,
    VerificationError,
    WhisperportError,
)
from whisperport.placement import Placement
from whisperport.preflight import check_fits, estimate_lowering, within_memory_of
from whisperport.runner import Array
from whisperport.spec import Limit, ProgramSpec
from whisperport.targets import RunOptions, Target, get_target
from whisperport.targets.onnxruntime import OPSETS
from whisperport.verification import GATES

if TYPE_CHECKING:  # boards have no torch
    from whisperport.inspection.graph import Graph
    from whisperport.inspection.rules import Finding
    from whisperport.programs.program import Program

ONNX = "onnxruntime"
ONNX_RANK = 4  # a file for other people's compilers: most stop there
SEEDS = (0, 1)
# Another order of summation in float32 was seen to change Whisper's outputs by 5e-6 of their
# largest value; a wrong operator by 1e-2 and more.
TOLERANCE = 1e-4  # of the largest expected value, or of 1 where that is smaller
# Of programs that compute in these anywhere.
COARSER = {"float16": GATES["fp16"].max_relative, "bfloat16": GATES["bf16"].max_relative}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerOptions:
    """How one program is lowered."""

    opset: int | None = None  # of ONNX, 13 to 20; None: 20
    simplify: bool = False  # ONNX only, with onnxslim
    max_rank: int | None = None  # of any tensor; None: 4 in ONNX, elsewhere what the target takes
    allow_unequal: bool = False  # write the file although it computes something else
    preflight: bool = True  # refuse at once what memory or disk have no room for
    trust: bool = False  # run a program of a file without a limit on memory
    run: RunOptions = field(default_factory=RunOptions)  # for the comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """What was written, and how far it is from the program it was made of."""

    files: tuple[Path, ...]  # the file asked for, then its external data if there is any
    target: str
    spec: ProgramSpec
    facts: dict[str, Any]  # of ONNX: opset, nodes, max_rank, weight_bytes; else the delegation
    rewrites: dict[str, int]  # name -> nodes it replaced
    largest_difference: float  # max |lowered - torch| over all outputs; NaN if one is not a number
    tolerance: float  # what it was held against
    equal: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "files": [os.fspath(file) for file in self.files],
            "target": self.target,
            "program": self.spec.to_json(),
            **self.facts,
            "rewrites": self.rewrites,
            "largest_difference": _or_none(self.largest_difference),
            "tolerance": self.tolerance,
            "equal": self.equal,
        }


def lower(
    program: "Program | str | os.PathLike[str]",
    target: str,
    out: str | os.PathLike[str],
    options: LowerOptions | None = None,
    *,
    say: Say = lambda _: None,
) -> Lowered:
    """Lower one program for a target, run it on the target's runtime, and write it if it is equal.

    Args:
        program: a `.pt2` file, or what `whisperport.programs.program.trace` returned.
        target: a name from `TARGETS` that writes one file a program.
        out: the file to write. One already there stays until the new one is complete.
        say: told what is being done, in a few words.

    Raises:
        UsageError: no such target, or an option that it does not take.
        ProgramError: the program cannot be read, keeps state in a buffer, writes to an input, or
            takes or returns what numpy has no numbers of.
        LoweringError: a compiler refused, or a tensor has more axes than there may be.
        WhisperportError: `out` cannot be written, or this machine is too small.
        VerificationError: the lowered program computes something else; nothing was written.
    """
    options, out, chosen = options or LowerOptions(), Path(out), get_target(target)
    _check_options(target, options)
    with _folder_beside(out) as folder, within_memory_of(program, trust=options.trust):
        program = _read(program, say)
        if options.preflight:
            _check_room(program, target, out)
        say("running the program in torch")
        trials = _trials(program)
        rewritten, rewrites = _rewritten(program, chosen, _max_rank(options, chosen), say)
        entry, facts = _compile(rewritten, chosen, folder, out.name, options, say)
        say(f"running {out.name} on {target}")
        difference, scale = _difference(chosen, folder, entry, options.run, trials)
        tolerance = _relative_tolerance(program) * max(1.0, scale)
        equal = difference <= tolerance
        if not equal and not options.allow_unequal:
            raise VerificationError(
                f"{out} would not compute what `{program.name}` does, and was not written",
                why=_why_unequal(difference, tolerance, trials),
                hint="`--allow-unequal` writes it all the same",
            )
        return Lowered(
            files=_put_in_place(folder, entry, out),
            target=target,
            spec=program.spec,
            facts=facts,
            rewrites=rewrites,
            largest_difference=difference,
            tolerance=tolerance,
            equal=equal,
        )


def _check_options(target: str, options: LowerOptions) -> None:
    if target != ONNX and (options.opset is not None or options.simplify):
        raise UsageError(
            f"`{target}` takes no opset and does not simplify",
            hint=f"these are options of `{ONNX}`",
        )
    if options.opset is not None and options.opset not in OPSETS:
        raise UsageError(
            f"ONNX opset {options.opset} is not written",
            hint=f"opsets {OPSETS[0]} to {OPSETS[-1]} are",
        )


@contextmanager
def _folder_beside(out: Path) -> Iterator[Path]:
    """A hidden folder on the same disk, so that a rename puts its files in place; removed at the end."""
    with ExitStack() as stack:
        try:
            if out.is_dir():
                raise IsADirectoryError("it is a folder")
            folder = stack.enter_context(staging(out)).partial
            os.mkdir(folder)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise WhisperportError(
                f"cannot write {out}",
                why=getattr(error, "strerror", None) or str(error),
                hint="name a file in a folder that you may write to",
            ) from error
        try:
            yield folder
        except OSError as error:
            raise WhisperportError(
                f"cannot write {out}",
                why=error.strerror or str(error),
                hint="free some space, or choose another folder; nothing was left half-written",
            ) from error


def _read(program: "Program | str | os.PathLike[str]", say: Say) -> "Program":
    try:
        from whisperport.programs.pt2 import read_pt2
    except ImportError as error:
        raise MissingPackageError(
            "cannot lower: torch and its exporters are not installed",
            why=str(error),
            hint='pip install "whisperport[export]"',
        ) from error
    if isinstance(program, str | os.PathLike):
        say(f"reading {program}")
        program = read_pt2(program)
    _check_comparable(program)
    return program


def _check_comparable(program: "Program") -> None:
    """Refuse what a run of both would not tell apart, or could not be made."""
    from whisperport.programs.program import written_buffer, written_input

    for tensor in (*program.spec.inputs, *program.spec.outputs):
        if tensor.dtype == "bfloat16":
            raise ProgramError(
                f"`{program.name}` takes or returns bfloat16, at `{tensor.name}`",
                why="numpy has no such numbers, so that the two cannot be run and compared",
                hint="convert inputs and outputs to float32 in the module, or the module by `.float()`",
            )
    if buffer := written_buffer(program):
        raise ProgramError(
            f"`{program.name}` keeps state in a buffer, `{buffer}`",
            why="compilers drop such state without a word",
            hint="pass the state as an input, and return it as an output",
        )
    if given := written_input(program):
        raise ProgramError(
            f"`{program.name}` writes to its input `{given}`",
            why="its caller's array would have to change, and compilers do not do that",
            hint="copy the input first, and return what was written as an output",
        )


def _check_room(program: "Program", target: str, out: Path) -> None:
    from whisperport.programs.pt2 import weight_bytes

    check_fits(estimate_lowering(weight_bytes(program), target), out)


@dataclass(frozen=True, slots=True)
class _Trial:
    inputs: dict[str, Array]
    expected: list[Array]


def _trials(program: "Program") -> list[_Trial]:
    from whisperport.programs.trial import drawn_inputs, eager_outputs

    names = [tensor.name for tensor in program.spec.inputs]
    trials = []
    for seed in SEEDS:
        inputs = drawn_inputs(program, seed)
        expected = [output.numpy() for output in eager_outputs(program, inputs)]
        arrays = (tensor.contiguous().numpy() for tensor in inputs)
        trials.append(_Trial(dict(zip(names, arrays, strict=True)), expected))
    return trials


def _rewritten(
    program: "Program", target: Target, max_rank: int, say: Say
) -> "tuple[Program, dict[str, int]]":
    """By the target's rewrites, and one that folds axes where there are too many."""
    from whisperport.inspection.read_exported import read_exported
    from whisperport.rewrites import run_rewrites

    if target.spec.rewrites:
        say(f"rewriting {program.name} for {target.spec.name}")
    program, outcomes = run_rewrites(program, target.spec.rewrites)
    if _above(read_exported(program.name, program.exported), max_rank):
        say(f"folding the axes of {program.name}")
        program, folded = run_rewrites(program, [f"fold-axes={max_rank}"])
        outcomes += folded
    return program, {outcome.rewrite: len(outcome.changed) for outcome in outcomes}


def _max_rank(options: LowerOptions, target: Target) -> int:
    return options.max_rank or (ONNX_RANK if target.spec.name == ONNX else target.spec.max_rank)


def _above(graph: "Graph", max_rank: int) -> "list[Finding]":
    from whisperport.inspection.rules import RULES

    return list(RULES["WP201"].check(graph, Limit(rule="WP201", value=max_rank, source="")))


def _check_rank(name: str, graph: "Graph", max_rank: int) -> None:
    if not (found := _above(graph, max_rank)):
        return
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raise LoweringError(
        f"`{name}` has tensors of more than {max_rank} axes",
        why=f"`{found[0].place}`: {found[0].reason}{more}",
        hint="`whisperport explain WP201` says what mends it; `--max-rank` allows more",
    )


def _compile(
    program: "Program", target: Target, folder: Path, name: str, options: LowerOptions, say: Say
) -> tuple[ProgramEntry, dict[str, Any]]:
    """The entry by which the target loads what was written to `folder`, and facts about it."""
    if target.spec.name == ONNX:
        return _compile_onnx(program, target, folder, name, options, say)
    from whisperport.inspection.read_exported import read_exported

    graph = read_exported(program.name, program.exported)
    _check_rank(program.name, graph, _max_rank(options, target))
    (entry,) = target.lower([program], folder, say)
    if len(entry.files) != 1:
        raise UsageError(
            f"`{target.spec.name}` writes {len(entry.files)} files for a program",
            hint="`whisperport export` makes a bundle of them",
        )
    return entry, dict(entry.delegation)


def _compile_onnx(
    program: "Program", target: Target, folder: Path, name: str, options: LowerOptions, say: Say
) -> tuple[ProgramEntry, dict[str, Any]]:
    from whisperport.inspection.read_onnx import read_onnx
    from whisperport.programs.onnx_file import write_onnx_file

    opset = options.opset or OPSETS[-1]
    say(f"{program.name} to ONNX opset {opset}")
    facts = write_onnx_file(program, folder / name, opset=opset, simplify=options.simplify)
    # Of the file, since exporters write some operators with more axes than torch has.
    if facts.nodes:  # none: it gives back constants
        _check_rank(program.name, read_onnx(folder / name), _max_rank(options, target))
    entry = ProgramEntry(
        spec=program.spec,
        placement=Placement(target.spec.name),
        method=program.name,
        files=tuple(file.name for file in facts.files),
    )
    return entry, {
        "opset": facts.opset,
        "nodes": facts.nodes,
        "max_rank": facts.max_rank,
        "weight_bytes": facts.weight_bytes,
    }


def _difference(
    target: Target, folder: Path, entry: ProgramEntry, run: RunOptions, trials: list[_Trial]
) -> tuple[float, float]:
    """The largest difference from torch, NaN if it is not a number; the largest finite value expected."""
    runner = target.load(folder, [entry], run)[entry.spec.name]
    difference = scale = 0.0
    for trial in trials:
        try:
            actual = runner.run(trial.inputs).values()
        except BundleError:  # an output has another shape or dtype than the program's
            return float("nan"), scale
        for ours, theirs in zip(actual, trial.expected, strict=True):
            wide = theirs.astype(np.float64)
            finite = np.isfinite(wide)  # or a tolerance without an end would allow anything
            scale = max(scale, float(np.max(np.abs(wide), initial=0.0, where=finite)))
            with np.errstate(invalid="ignore"):  # infinity less infinity
                apart = np.abs(ours.astype(np.float64) - wide)
            largest = float(np.max(np.where(ours == theirs, 0.0, apart), initial=0.0))
            difference = max(difference, largest) if largest == largest else largest
            if difference != difference:
                return difference, scale
    return difference, scale


def _why_unequal(difference: float, tolerance: float, trials: list[_Trial]) -> str:
    if any(np.isnan(output).any() for trial in trials for output in trial.expected):
        return "torch itself gives NaN for an output, on random inputs: nothing can be compared"
    return f"an output differs by {difference:.2g}; {tolerance:.2g} is allowed"


def _relative_tolerance(program: "Program") -> float:
    from whisperport.inspection.read_exported import read_exported

    graph = read_exported(program.name, program.exported)
    dtypes = {value.dtype for node in graph.nodes for value in node.outputs}
    return max((COARSER.get(dtype, TOLERANCE) for dtype in dtypes), default=TOLERANCE)


def _put_in_place(folder: Path, entry: ProgramEntry, out: Path) -> tuple[Path, ...]:
    """The graph comes last: whoever finds it finds its external data too."""
    first, *others = entry.files
    placed = [out.with_name(Path(file).name) for file in others]
    for file, place in zip((*others, first), (*placed, out), strict=True):
        with (folder / file).open("rb") as written:
            os.fsync(written.fileno())
        os.replace(folder / file, place)
    return (out, *placed)


def _or_none(number: float) -> float | None:
    return None if number != number else number

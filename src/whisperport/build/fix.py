"""Fix a program for a target: apply the target's rewrites, verify each, and list the remaining problems.

Without a target, fix the files of an app: see `whisperport.build.judge.fixing`.
"""

import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from whisperport.build.judge.fixing import FixedFiles, fix_files
from whisperport.build.lower import check_owner, read_program
from whisperport.errors import ProgramError, UsageError
from whisperport.program.bundle.replacing_files import put_files_in_place
from whisperport.program.bundle.staging import staged_beside
from whisperport.program.host_part import HostPart
from whisperport.program.json_records import to_json
from whisperport.program.runner import Array
from whisperport.program.sizes import NO_SIZES
from whisperport.program.spec import FindingKind, Rejection, TargetSpec
from whisperport.system.progress import begin_stage
from whisperport.targets import get_target
from whisperport.targets.preflight import within_memory_of
from whisperport.verification.array_comparison import Gate
from whisperport.verification.equality import (
    Equality,
    OutputComparison,
    as_array,
    compare_sample,
    eager_arrays,
    expected_outputs,
    gate_of,
)
from whisperport.verification.samples import Sample, samples_of
from whisperport.verification.tolerances import REWRITTEN

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from whisperport.model.checkpoint.checkpoint import Checkpoint
    from whisperport.model.inspection.rejections import CheckedProgram
    from whisperport.model.rewrites import Outcome
    from whisperport.model.trace.program import Program

FindingCounts = Counter[tuple[str, str, str]]
"""(rule, operator, module and line) -> number of findings of one kind."""

ADDED: Mapping[FindingKind, str] = {
    "rejected": "the target rejects",
    "not seen": "were not seen in programs known to compile",
}
NOTHING_COMPARED = Equality()


@dataclass(frozen=True, slots=True)
class RewriteStep:
    """One rewrite: what it changed, and how the rewritten program compares with the original.

    Attributes:
        outcome: the nodes that the rewrite replaced, and those that it could not replace.
        equality: the comparisons with the original program; empty if the rewrite changed nothing.
        left_out: why the rewrite is not used although no output differs: the nodes that it adds and that
            the target rejects or that were not seen to compile, or torch's error. Empty otherwise.
    """

    outcome: "Outcome"
    equality: Equality = NOTHING_COMPARED
    left_out: str = ""

    @property
    def failed(self) -> bool:
        """Whether the rewritten program differs from the original, so that the rewrite is not used."""
        return bool(self.outcome.changed) and not self.left_out and not self.equality

    @property
    def kept(self) -> bool:
        """Whether the rewrite is part of the fixed program."""
        return bool(self.outcome.changed) and not self.left_out and bool(self.equality)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "rewrite": self.outcome.rewrite,
            "kept": self.kept,
            "changed": list(self.outcome.changed),
            "declined": [
                {"node": rejection.node, "reason": rejection.reason}
                for rejection in self.outcome.rejected
            ],
            "left_out": self.left_out,
            **(self.equality.numbers() if self.equality.compared else {}),
            "failed": [comparison.to_json() for comparison in self.equality.failed],
        }


@dataclass(frozen=True, slots=True)
class Fixed:
    """A fixed program, and the rewrites that were applied to it.

    Attributes:
        program: the fixed program.
        host: steps of the original program that the host computes; false if there are none.
        target: name of the target.
        steps: the rewrites, in the order of their application.
        samples: names of the samples that every rewrite was verified on.
        gate: the tolerance of every comparison.
        remaining: nodes that the target still rejects, and why.
        lookups: token lookups that the target rejects. They read a table and compute nothing.
        unseen: nodes that were not seen in programs known to compile.
        before: what the target rejected in the original program.
        after: what it rejects in the fixed one.
    """

    program: "Program"
    host: HostPart
    target: str
    steps: tuple[RewriteStep, ...]
    samples: tuple[str, ...]
    gate: Gate
    remaining: tuple[Rejection, ...]
    lookups: tuple[Rejection, ...]
    unseen: tuple[Rejection, ...]
    before: "CheckedProgram"
    after: "CheckedProgram"

    @property
    def changed(self) -> int:
        """Number of nodes that were replaced."""
        return sum(len(step.outcome.changed) for step in self.steps if step.kept)

    def __bool__(self) -> bool:
        """Return True if no rewrite failed and the target rejects no node other than lookups."""
        return not self.remaining and not any(step.failed for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "program": self.program.name,
            "signature": to_json(self.program.spec),
            "host": self.host.to_json() if self.host else None,
            "target": self.target,
            "passed": bool(self),
            "changed_nodes": self.changed,
            "samples": list(self.samples),
            "rule": self.gate.rule,
            "rewrites": [step.to_json() for step in self.steps],
            "remaining": [asdict(rejection) for rejection in self.remaining],
            "lookups": [asdict(rejection) for rejection in self.lookups],
            "not_seen": [asdict(rejection) for rejection in self.unseen],
        }

    def write(self, out: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the fixed program as a `.pt2` file, and the host's steps as files beside it.

        Args:
            out: path of the `.pt2` file. The host's steps are written as `NAME.host.json` and `.npy` files.
            overwrite: replace existing files, but none that may belong to a lowered program of the same
                stem. Default: False.

        Returns:
            The path of the `.pt2` file.

        Raises:
            ProgramError: a file exists already, and `overwrite` is False.
            WhisperportError: a file cannot be written, or may belong to a lowered program.
        """
        from torch.export import save

        from whisperport.model.inspection.quiet import quiet

        out = Path(out)
        beside = self.host.files(out.stem)
        for name in (*beside, out.name):
            check_free(out.with_name(name), overwrite=overwrite)
        buffer = io.BytesIO()  # torch's own errors do not name a full disk
        with (
            quiet()
        ):  # torch warns about weights that share memory, although it stores them correctly
            save(self.program.exported, buffer)
        with staged_beside(out) as staged:
            for name, content in (*beside.items(), (out.name, buffer.getvalue())):
                (staged.partial / name).write_bytes(content)
            check_owner(staged.partial, [out.with_name(name) for name in beside], out)
            put_files_in_place(staged.partial, staged.files, out, (*beside, out.name))
        return out


@overload
def fix(
    program: "Program | str | os.PathLike[str]",
    target: str,
    *,
    inputs: Sequence[str | os.PathLike[str]] = (),
    sizes: Mapping[str, int] = NO_SIZES,
    trust: bool = False,
) -> Fixed: ...


@overload
def fix(
    program: str | os.PathLike[str],
    target: None = None,
    *,
    out: str | os.PathLike[str],
    checkpoint: "Checkpoint | str | os.PathLike[str] | None" = None,
    app: str | None = None,
) -> FixedFiles: ...


def fix(
    program: "Program | str | os.PathLike[str]",
    target: str | None = None,
    *,
    inputs: Sequence[str | os.PathLike[str]] = (),
    sizes: Mapping[str, int] = NO_SIZES,
    trust: bool = False,
    out: str | os.PathLike[str] | None = None,
    checkpoint: "Checkpoint | str | os.PathLike[str] | None" = None,
    app: str | None = None,
) -> Fixed | FixedFiles:
    """Apply a target's rewrites to a copy of a program, or repair a copy of an app's files; verify it.

    With a target, `program` is a program, built-in or third-party. Without one, it is a folder or file that
    an app loads: what breaks a rule and can be corrected is corrected in a copy, which is then judged as
    `judge` does, and moved to `out`, complete or not at all.

    After each rewrite, the original and the rewritten program run in torch on random inputs of three
    scales, on two shipped audio files if the input is a mel spectrogram, and on `inputs`. A rewrite whose
    outputs differ is not used; its numbers are in the result. The target's check also runs after each: a
    rewrite that adds nodes which the target rejects in the fixed program is not used either. The fixed
    program has no more rejected nodes of any rule, operator and line of Python than the original.

    Args:
        program: a `.pt2` file, or a `Program` from `whisperport.model.trace.program.trace`; without a
            target, the files of an app.
        target: name of a target, as `whisperport targets` lists them. Default: None, for files of an app.
        inputs: `.npz` files with further inputs, each with one array per input, by the input's name.
        sizes: numbers for the dynamic sizes of a `.pt2` file, as it names them: {"s27": 128}.
        trust: run the program of a file without a limit on memory. Default: False.
        out: folder or file to write the app's files to; an older one that whisperport wrote is replaced.
        checkpoint: that the app's files were made of; some repairs need it. Default: None.
        app: the only app that is run with the repaired files. Default: None, every installed one.

    Returns:
        The fixed program, the result of every rewrite, and the remaining problems. Of files: what was
        changed, and the judgement.

    Raises:
        UsageError: there is no such target or app, no app loads the files, they hold another model than the
            checkpoint, or `out` would replace something else.
        MissingPackageError: torch is not installed.
        ProgramError: the program or a file of inputs cannot be read, the program is not a `.pt2` file,
            torch cannot run it, it keeps state in a buffer, or it writes to an input.
        LoweringError: a rewrite produced an invalid program.
    """
    if target is None:
        if out is None or not isinstance(program, str | os.PathLike):
            raise UsageError("a program is fixed for a target", hint="give the name of a target")
        return fix_files(Path(program), Path(out), checkpoint, app=app)
    chosen = get_target(target)
    with within_memory_of(program, trust=trust):
        if isinstance(program, str | os.PathLike):
            _check_kind(Path(program))
        program = read_program(program, "fix a program", sizes, as_arrays=False)
        samples = samples_of(program, inputs)
        begin_stage(f"running {program.name} in torch on {len(samples)} samples")
        expected = expected_outputs(program, samples)
        work = _Work(program, chosen.spec, samples, expected, gate_of(REWRITTEN, program))
        applied = _apply_rewrites(work)
    remaining, lookups = _split_lookups(
        applied.program, _rejections(applied.checks[-1], "rejected")
    )
    return Fixed(
        program=applied.program,
        host=applied.host,
        target=target,
        steps=applied.steps,
        samples=tuple(sample.name for sample in samples),
        gate=work.gate,
        remaining=remaining,
        lookups=lookups,
        unseen=_rejections(applied.checks[-1], "not seen"),
        before=applied.checks[0],
        after=applied.checks[-1],
    )


def check_free(out: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Check that `out` can be written without replacing a file, unless `overwrite` is True.

    Raises:
        ProgramError: the file exists already.
    """
    if os.path.lexists(out) and not overwrite:
        raise ProgramError(
            f"{out} exists already, and was not changed",
            hint="choose another file name, or use `--overwrite`",
        )


@dataclass(frozen=True, slots=True)
class _Work:
    """The program to fix, the target, and the expected outputs."""

    program: "Program"
    spec: TargetSpec
    samples: tuple[Sample, ...]
    expected: dict[str, dict[str, Array]]
    gate: Gate


@dataclass(frozen=True, slots=True)
class _Applied:
    """A program after all rewrites; the target's findings before the first rewrite and after each."""

    program: "Program"
    host: HostPart
    steps: tuple[RewriteStep, ...]
    checks: tuple["CheckedProgram", ...]

    def problems(self) -> tuple[int, int]:
        """Return how much the target rejects in the final program, and how much was not seen to compile."""
        last = self.checks[-1]
        return _counts(last, "rejected").total(), _counts(last, "not seen").total()


@dataclass(frozen=True, slots=True)
class _Harm:
    """A rewrite that adds nodes which the target rejects or which were not seen to compile, and why."""

    rewrite: str
    kind: FindingKind
    reason: str


def _apply_rewrites(work: _Work) -> _Applied:
    """Apply all rewrites except those that add problems to the final program.

    Only the final program counts, because a later rewrite can replace a node that an earlier one added. No
    rewrite that adds rejected nodes is used. One that adds nodes which were not seen to compile is used if
    more problems remain without it.
    """
    left_out: dict[str, str] = {}
    needed: set[str] = set()
    applied = _apply_except(work, left_out)
    while harm := _harm(applied, "rejected", set()) or _harm(applied, "not seen", needed):
        candidate = _apply_except(work, {**left_out, harm.rewrite: harm.reason})
        if harm.kind == "not seen" and candidate.problems() > applied.problems():
            needed.add(harm.rewrite)
        else:
            left_out[harm.rewrite], applied = harm.reason, candidate
    return applied


def _apply_except(work: _Work, left_out: Mapping[str, str]) -> _Applied:
    from whisperport.model.rewrites import run_host_rewrite, run_rewrites

    program, host = work.program, HostPart()
    steps, checks = [], [_check(program, work.spec)]
    for name in (*work.spec.lowering.rewrites, *work.spec.lowering.host_rewrites):
        begin_stage(f"{name} on {program.name}")
        if name in work.spec.lowering.host_rewrites:
            candidate, moved, outcome = run_host_rewrite(program, name)
        else:
            candidate, (outcome,) = run_rewrites(program, [name])
            moved = HostPart()
        if name in left_out or not outcome.changed:
            steps.append(RewriteStep(outcome, left_out=left_out.get(name, "")))
        else:
            steps.append(_tried(work, outcome, candidate, host + moved))
        if steps[-1].kept:
            program, host = candidate, host + moved
        checks.append(_check(program, work.spec))
    return _Applied(program, host, tuple(steps), tuple(checks))


def _tried(work: _Work, outcome: "Outcome", program: "Program", host: HostPart) -> RewriteStep:
    try:
        return RewriteStep(outcome, _compared(work, program, host))
    except ProgramError as error:
        return RewriteStep(outcome, left_out=f"torch cannot run its program: {error.why}")


def _compared(work: _Work, program: "Program", host: HostPart) -> Equality:
    """Compare a rewritten program, together with the host's steps, with the original program."""
    from torch import from_numpy

    names = [tensor.name for tensor in work.program.spec.inputs]
    compared: list[OutputComparison] = []
    for sample in work.samples:
        tensors = sample.inputs
        if host:
            arrays = host.inputs(dict(zip(names, map(as_array, tensors), strict=True)))
            tensors = tuple(from_numpy(arrays[tensor.name]) for tensor in program.spec.inputs)
        actual = host.outputs(eager_arrays(program, tensors))
        compared += compare_sample(sample.name, actual, work.expected[sample.name], work.gate)
    return Equality(tuple(compared))


def _harm(applied: _Applied, kind: FindingKind, needed: Set[str]) -> _Harm | None:
    """Return the last rewrite, other than `needed`, that added findings of a kind to the final program."""
    counts = [_counts(checked, kind) for checked in applied.checks]
    added = counts[-1] - counts[0]
    for index, step in reversed([*enumerate(applied.steps)]):
        name = step.outcome.rewrite
        harm = (counts[index + 1] - counts[index]) & added
        if harm and name not in needed:
            counted = Counter[tuple[str, str]]()
            for (rule, operator, _), count in harm.items():
                counted[rule, operator] += count
            nodes = ", ".join(
                f"{n} × {operator or rule} ({rule})" for (rule, operator), n in counted.items()
            )
            return _Harm(name, kind, f"it adds nodes that {ADDED[kind]}: {nodes}")
    return None


def _check(program: "Program", spec: TargetSpec) -> "CheckedProgram":
    from whisperport.model.inspection.read_exported import read_exported
    from whisperport.model.inspection.rejections import check_graph

    return check_graph(read_exported(program.name, program.exported), spec)


def _counts(checked: "CheckedProgram", kind: FindingKind) -> FindingCounts:
    """Count findings. Names do not tell a node from another: exporting again gives it another name."""
    return Counter(
        (group.rule, group.operator, occurrence.cost.node.place if occurrence.cost else "")
        for group in checked.of(kind)
        for occurrence in group.occurrences
    )


def _rejections(checked: "CheckedProgram", finding: Any) -> tuple[Rejection, ...]:
    return tuple(
        Rejection(
            occurrence.name,
            occurrence.reason,
            kind.rule,
            occurrence.cost.node.place if occurrence.cost else "",
        )
        for kind in checked.of(finding)
        for occurrence in kind.occurrences
    )


def _check_kind(path: Path) -> None:
    """Raise an error for other file formats than `.pt2`; the reader reports damaged files."""
    kind = {".onnx": "an ONNX file", ".tflite": "a TFLite file", ".pte": "an ExecuTorch file"}
    if path.is_dir() or path.suffix in kind:
        raise ProgramError(
            f"{path} cannot be fixed",
            why=f"it is {kind.get(path.suffix, 'a folder')}; rewrites need a torch graph",
            hint="give the `.pt2` file that it was made from; "
            "`torch.export.save(torch.export.export(module, inputs), path)` writes such a file",
        )


def _split_lookups(
    program: "Program", rejected: Sequence[Rejection]
) -> tuple[tuple[Rejection, ...], tuple[Rejection, ...]]:
    """Split the rejected nodes into nodes that compute and token lookups, which only read table rows."""
    import torch

    embedding = torch.ops.aten.embedding.default

    tables = {
        node.name: node.args[0].meta["val"].numel() * node.args[0].meta["val"].element_size()
        for node in program.exported.graph.nodes
        if node.target is embedding
    }
    lookups = [
        replace(
            rejection,
            reason=f"{rejection.reason}; it computes nothing, but its table of "
            f"{tables[rejection.node] / 1e6:.1f} MB is also stored for the host",
        )
        for rejection in rejected
        if rejection.node in tables
    ]
    return tuple(r for r in rejected if r.node not in tables), tuple(lookups)

"""Fix a program for a target: apply its rewrites, verify each against the original, say what remains."""

import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.atomic import write_atomic
from whisperport.errors import MissingPackageError, ProgramError
from whisperport.host_part import HostPart
from whisperport.preflight import within_memory_of
from whisperport.progress import Progress
from whisperport.runner import Array
from whisperport.spec import Rejection, TargetSpec
from whisperport.targets import get_target
from whisperport.verification.compare import Gate
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

if TYPE_CHECKING:  # boards have no torch
    from whisperport.inspection.check import CheckedProgram
    from whisperport.programs.program import Program
    from whisperport.rewrites import Outcome

Found = Counter[tuple[str, str]]
"""How many nodes the target rejects, or were not seen to compile, by rule and operator."""

NOTHING_COMPARED = Equality()


@dataclass(frozen=True, slots=True)
class Step:
    """One rewrite: what it did, and how the program compares with the original afterwards."""

    outcome: "Outcome"
    equality: Equality = NOTHING_COMPARED  # without comparisons where nothing was changed
    left_out: str = ""  # why a verified rewrite is not part of the fixed program

    @property
    def failed(self) -> bool:
        return bool(self.outcome.changed) and not self.left_out and not self.equality

    @property
    def kept(self) -> bool:
        """Whether the fixed program has it."""
        return bool(self.outcome.changed) and not self.left_out and bool(self.equality)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "rewrite": self.outcome.rewrite,
            "kept": self.kept,
            "changed": list(self.outcome.changed),
            "declined": [
                {"node": refusal.node, "reason": refusal.reason}
                for refusal in self.outcome.rejected
            ],
            "left_out": self.left_out,
            **(self.equality.numbers() if self.equality.compared else {}),
            "failed": [one.to_json() for one in self.equality.failed],
        }


@dataclass(frozen=True, slots=True)
class Fixed:
    """A fixed program, and what was done to it."""

    program: "Program"
    host: HostPart  # what the host computes around it, if anything
    target: str
    steps: tuple[Step, ...]
    samples: tuple[str, ...]  # what every step was verified on
    gate: Gate  # that every output was held to
    remaining: tuple[Rejection, ...]  # what the target still rejects, and why
    lookups: tuple[Rejection, ...]  # what it rejects too, and what computes nothing
    unseen: tuple[Rejection, ...]  # what was not seen in programs known to compile

    @property
    def changed(self) -> int:
        """How many nodes were replaced."""
        return sum(len(step.outcome.changed) for step in self.steps if step.kept)

    def __bool__(self) -> bool:
        """Whether every rewrite was verified and the target rejects nothing that computes."""
        return not self.remaining and not any(step.failed for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "program": self.program.name,
            "signature": self.program.spec.to_json(),
            "host": self.host.to_json() if self.host else None,
            "target": self.target,
            "passed": bool(self),
            "changed_nodes": self.changed,
            "samples": list(self.samples),
            "rule": self.gate.rule,
            "rewrites": [step.to_json() for step in self.steps],
            "remaining": [asdict(refusal) for refusal in self.remaining],
            "lookups": [asdict(refusal) for refusal in self.lookups],
            "not_seen": [asdict(refusal) for refusal in self.unseen],
        }


def fix(
    program: "Program | str | os.PathLike[str]",
    target: str,
    *,
    inputs: Sequence[str | os.PathLike[str]] = (),
    trust: bool = False,
    progress: Progress = lambda _: None,
) -> Fixed:
    """Apply a target's rewrites to a program, built-in or third-party; the one given is not changed.

    Each rewrite is verified before the next: original and rewritten program run in torch on random
    inputs of three scales, on two shipped audio files where the input is a mel spectrogram, and on
    `inputs`. One that fails is left out, and its numbers are in the result. The target's check runs
    after each: a rewrite whose own nodes the target would reject in the fixed program is left out too.

    Args:
        program: a `.pt2` file, or what `whisperport.programs.program.trace` returned.
        target: a name from `TARGETS`.
        inputs: `.npz` files, each with one array for every input, by its name.
        trust: run the program of a file without a limit on memory.
        progress: told what is being done, in a few words.

    Raises:
        UsageError: no such target.
        ProgramError: the program, or a file of inputs, cannot be read, or is no `.pt2`; torch cannot
            run it; it keeps state in a buffer, or writes to an input.
        LoweringError: a rewrite broke it.
    """
    chosen = get_target(target)
    with within_memory_of(program, trust=trust):
        program = _read(program, progress)
        samples = samples_of(program, inputs)
        progress(f"running {program.name} in torch on {len(samples)} samples")
        expected = expected_outputs(program, samples)
        work = _Work(program, chosen.spec, samples, expected, gate_of(REWRITTEN, program), progress)
        done = _without_harm(work)
        checked = _check(done.program, chosen.spec)
    remaining, lookups = _without_lookups(done.program, _rejections(checked, "rejected"))
    return Fixed(
        program=done.program,
        host=done.host,
        target=target,
        steps=done.steps,
        samples=tuple(sample.name for sample in samples),
        gate=work.gate,
        remaining=remaining,
        lookups=lookups,
        unseen=_rejections(checked, "not seen"),
    )


def write_fixed(fixed: Fixed, out: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write the fixed program as a `.pt2` file, and beside it what the host computes around it.

    Raises:
        ProgramError: there is a file already, and `overwrite` was not asked for.
        WhisperportError: it cannot be written there.
    """
    from torch.export import save

    from whisperport.inspection.quiet import quiet

    out = Path(out)
    beside = {out.with_name(name): data for name, data in fixed.host.files(out.stem).items()}
    for path in (*beside, out):
        check_free(path, overwrite=overwrite)
    buffer = io.BytesIO()
    with quiet():  # torch warns of weights that are parts of one table, which it stores right
        save(fixed.program.exported, buffer)
    for path, content in beside.items():
        write_atomic(path, content)
    write_atomic(out, buffer.getvalue())
    return out


def check_free(out: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Refuse to replace a file, the program given among them, unless that was asked for.

    Raises:
        ProgramError: there is a file already.
    """
    if Path(out).exists() and not overwrite:
        raise ProgramError(
            f"{out} exists already, and was not changed",
            hint="name another file, or use --overwrite",
        )


@dataclass(frozen=True, slots=True)
class _Work:
    """What a program is fixed for, and what it is compared with."""

    program: "Program"
    spec: TargetSpec
    samples: tuple[Sample, ...]
    expected: dict[str, dict[str, Array]]
    gate: Gate
    progress: Progress


@dataclass(frozen=True, slots=True)
class _Done:
    """A program after all rewrites, and the target's findings before the first and after each."""

    program: "Program"
    host: HostPart
    steps: tuple[Step, ...]
    found: tuple[Found, ...]


def _without_harm(work: _Work) -> _Done:
    """Apply all rewrites, and leave out those whose nodes the target would reject in the end.

    A node that one rewrite adds may be what a later one replaces, so the end decides.
    """
    left_out: dict[str, str] = {}
    done = _apply(work, left_out)
    while culprit := _culprit(done):
        name, reason = culprit
        other = _apply(work, {**left_out, name: reason})
        if _weight(work, other.program) > _weight(work, done.program):
            break  # without it, more would remain than with it
        left_out[name], done = reason, other
    return done


def _apply(work: _Work, left_out: Mapping[str, str]) -> _Done:
    from whisperport.rewrites import run_host_rewrite, run_rewrites

    program, host = work.program, HostPart()
    steps, found = [], [_found(_check(program, work.spec))]
    for name in (*work.spec.rewrites, *work.spec.host_rewrites):
        work.progress(f"{name} on {program.name}")
        if name in work.spec.host_rewrites:
            candidate, moved, outcome = run_host_rewrite(program, name)
        else:
            candidate, (outcome,) = run_rewrites(program, [name])
            moved = HostPart()
        if name in left_out or not outcome.changed:
            steps.append(Step(outcome, left_out=left_out.get(name, "")))
        else:
            steps.append(Step(outcome, _compared(work, candidate, host + moved)))
        if steps[-1].kept:
            program, host = candidate, host + moved
        found.append(_found(_check(program, work.spec)))
    return _Done(program, host, tuple(steps), tuple(found))


def _compared(work: _Work, program: "Program", host: HostPart) -> Equality:
    """The candidate, through what the host computes around it, held against the original."""
    from torch import from_numpy

    names = [tensor.name for tensor in work.program.spec.inputs]
    compared: list[OutputComparison] = []
    for sample in work.samples:
        given = sample.inputs
        if host:
            arrays = host.inputs(dict(zip(names, map(as_array, given), strict=True)))
            given = tuple(from_numpy(arrays[tensor.name]) for tensor in program.spec.inputs)
        actual = host.outputs(eager_arrays(program, given))
        compared += compare_sample(sample.name, actual, work.expected[sample.name], work.gate)
    return Equality(tuple(compared))


def _culprit(done: _Done) -> tuple[str, str] | None:
    """The last rewrite that added what the target does not support in the end, and what that is."""
    first, last = done.found[0], done.found[-1]
    added = [key for key in last if last[key] > first[key]]
    for index in reversed(range(len(done.steps))):
        before, after = done.found[index], done.found[index + 1]
        harm = [key for key in added if after[key] > before[key]]
        if harm:
            nodes = ", ".join(f"{after[k] - before[k]} × {k[1] or k[0]} ({k[0]})" for k in harm)
            return done.steps[index].outcome.rewrite, f"it adds what the target rejects: {nodes}"
    return None


def _check(program: "Program", spec: TargetSpec) -> "CheckedProgram":
    from whisperport.inspection.check import check_graph
    from whisperport.inspection.read_exported import read_exported

    return check_graph(read_exported(program.name, program.exported), spec)


def _found(checked: "CheckedProgram") -> Found:
    counted: Found = Counter()
    for kind in (*checked.rejected, *checked.of("not seen")):
        counted[kind.rule, kind.operator] += len(kind.occurrences)
    return counted


def _weight(work: _Work, program: "Program") -> tuple[int, int]:
    checked = _check(program, work.spec)
    return sum(len(kind.occurrences) for kind in checked.rejected), checked.not_seen_nodes


def _rejections(checked: "CheckedProgram", finding: Any) -> tuple[Rejection, ...]:
    return tuple(
        Rejection(place.name, place.reason, kind.rule)
        for kind in checked.of(finding)
        for place in kind.occurrences
    )


def _read(program: "Program | str | os.PathLike[str]", progress: Progress) -> "Program":
    try:
        from whisperport.programs.pt2 import read_pt2
        from whisperport.programs.trial import check_comparable
    except ImportError as error:
        raise MissingPackageError(
            "cannot fix a program: torch is not installed",
            why=str(error),
            hint='pip install "whisperport[export]"',
        ) from error
    if isinstance(program, str | os.PathLike):
        _check_kind(Path(program))
        progress(f"reading {program}")
        program = read_pt2(program)
    check_comparable(program, as_arrays=False)
    return program


def _check_kind(path: Path) -> None:
    """Say of what is no `.pt2` what to do instead; what is damaged, its reader says."""
    kind = {".onnx": "an ONNX file", ".tflite": "a TFLite file", ".pte": "an ExecuTorch file"}
    if path.is_dir() or path.suffix in kind:
        raise ProgramError(
            f"{path} cannot be fixed",
            why=f"it is {kind.get(path.suffix, 'a folder')}; rewrites work on the graph of torch",
            hint="fix the .pt2 that it was made of: "
            "torch.export.save(torch.export.export(module, inputs), path)",
        )


def _without_lookups(
    program: "Program", rejected: Sequence[Rejection]
) -> tuple[tuple[Rejection, ...], tuple[Rejection, ...]]:
    """What remains and computes, and the lookups of tokens, which read rows and compute nothing."""
    import torch

    embedding = torch.ops.aten.embedding.default

    tables = {
        node.name: node.args[0].meta["val"].numel() * node.args[0].meta["val"].element_size()
        for node in program.exported.graph.nodes
        if node.target is embedding
    }
    lookups = [
        replace(
            refusal,
            reason=f"{refusal.reason}; it computes nothing, but its table of "
            f"{tables[refusal.node] / 1e6:.1f} MB is stored for the host too",
        )
        for refusal in rejected
        if refusal.node in tables
    ]
    return tuple(r for r in rejected if r.node not in tables), tuple(lookups)

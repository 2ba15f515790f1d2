"""Mend a program for a target: apply its rewrites, prove each against the original, say what remains."""

import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.atomic import write_atomic
from whisperport.audio import HOP_LENGTH, log_mel
from whisperport.errors import AudioError, LoweringError, MissingPackageError, ProgramError
from whisperport.preflight import within_memory_of
from whisperport.spec import ProgramSpec, Refusal
from whisperport.targets import get_target
from whisperport.verification import GATES, Comparison, Gate, compare
from whisperport.verification.clips import shipped_clips

if TYPE_CHECKING:  # boards have no torch
    from torch import Tensor

    from whisperport.programs.program import Program
    from whisperport.rewrites import Outcome

Say = Callable[[str], None]

EXACT = Gate(
    min_cosine=0.99999,
    min_sqnr_db=80.0,
    max_relative=1e-4,
    because="a rewrite is the same function in real arithmetic, so only float32's order of sums "
    "differs: seen up to 4e-6 of the largest value in decoders and encoders of the size of Whisper "
    "tiny; a wrong operator is off by 1e-2 and more",
)
GATE_OF = {"float16": GATES["fp16"], "bfloat16": GATES["bf16"]}  # by the dtype of an output
DRAWS = ((0, 1.0), (1, 0.1), (2, 10.0))  # seed, and the scale of random floats
RECORDINGS = 2
MELS = (80, 128)


@dataclass(frozen=True, slots=True)
class Proof:
    """One output of a rewritten program, held against the original's."""

    sample: str  # what both were run on: "noise of scale 1", "01-espeak.wav", "calls.npz"
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class Step:
    """One rewrite: what it did, and the proof that the program still computes the same."""

    outcome: "Outcome"
    proofs: tuple[Proof, ...]  # none where nothing was changed

    @property
    def failed(self) -> tuple[Proof, ...]:
        return tuple(proof for proof in self.proofs if not proof.comparison)

    @property
    def kept(self) -> bool:
        """A step that changed nothing, or failed its proof, is not part of the mended program."""
        return bool(self.outcome.changed) and not self.failed

    @property
    def largest_relative(self) -> float:
        """max|Δ| / max|expected|, over all outputs and samples; 0 where nothing was changed."""
        return max((proof.comparison.max_relative for proof in self.proofs), default=0.0)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A mended program, and what was done to it."""

    program: "Program"
    target: str
    steps: tuple[Step, ...]
    samples: tuple[str, ...]  # what every step was proved on
    remaining: tuple[Refusal, ...]  # what the target refuses still, and why
    lookups: tuple[Refusal, ...]  # what it refuses too, and what computes nothing

    @property
    def changed(self) -> int:
        """How many nodes were replaced."""
        return sum(len(step.outcome.changed) for step in self.steps if step.kept)

    def __bool__(self) -> bool:
        """Whether every rewrite passed its proof and nothing that computes remains."""
        return not self.remaining and not any(step.failed for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        return {
            "program": self.program.name,
            "target": self.target,
            "changed_nodes": self.changed,
            "samples": list(self.samples),
            "rewrites": [_step_to_json(step) for step in self.steps],
            "remaining": [asdict(refusal) for refusal in self.remaining],
            "lookups": [asdict(refusal) for refusal in self.lookups],
        }


def fix(
    program: "Program | str | os.PathLike[str]",
    target: str,
    *,
    inputs: Sequence[str | os.PathLike[str]] = (),
    trust: bool = False,
    say: Say = lambda _: None,
) -> Fixed:
    """Apply a target's rewrites to a program, ours or a stranger's; the one given is not changed.

    Each rewrite is proved before the next: original and rewritten program run in torch on random
    inputs of three scales, on two shipped recordings where the input is a mel spectrogram, and on
    `inputs`. One that fails is left out, and its numbers are in the result.

    Args:
        program: a `.pt2` file, or what `whisperport.programs.program.trace` returned.
        inputs: `.npz` files, each with one array for every input, by its name.
        trust: run the program of a file without a limit on memory.
        say: told what is being done, in a few words.

    Raises:
        UsageError: no such target.
        ProgramError: the program, or a file of inputs, cannot be read, or is no `.pt2`; or torch
            cannot run it.
        LoweringError: the program keeps state, or a rewrite broke it.
    """
    with within_memory_of(program, trust=trust):
        return _fix(program, target, inputs, say)


def _fix(
    program: "Program | str | os.PathLike[str]",
    target: str,
    inputs: Sequence[str | os.PathLike[str]],
    say: Say,
) -> Fixed:
    chosen = get_target(target)
    program = _read(program, say)
    from whisperport.programs.trial import eager_outputs
    from whisperport.rewrites import run_rewrites

    samples = dict(_samples(program, inputs))
    say(f"running {program.name} in torch on {len(samples)} samples")
    expected = {name: eager_outputs(program, sample) for name, sample in samples.items()}
    steps = []
    for name in chosen.spec.rewrites:
        say(f"{name} on {program.name}")
        candidate, (outcome,) = run_rewrites(program, [name])
        proofs = _prove(candidate, samples, expected) if outcome.changed else ()
        steps.append(Step(outcome, proofs))
        if steps[-1].kept:
            program = candidate
    remaining, lookups = _without_lookups(program, chosen.check(program))
    return Fixed(program, target, tuple(steps), tuple(samples), remaining, lookups)


def write_fixed(fixed: Fixed, out: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write the mended program as a `.pt2` file, whole or not at all.

    Raises:
        ProgramError: there is a file already, and `overwrite` was not asked for.
        WhisperportError: it cannot be written there.
    """
    from torch.export import save

    check_free(out, overwrite=overwrite)
    buffer = io.BytesIO()
    save(fixed.program.exported, buffer)
    write_atomic(out, buffer.getvalue())
    return Path(out)


def check_free(out: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Refuse to replace a file, the program given among them, unless that was asked for.

    Raises:
        ProgramError: there is a file already.
    """
    if Path(out).exists() and not overwrite:
        raise ProgramError(
            f"{out} is there already, and was left as it is",
            hint="name another file, or say --overwrite",
        )


def _read(program: "Program | str | os.PathLike[str]", say: Say) -> "Program":
    try:
        from whisperport.programs.program import written_buffer, written_input
        from whisperport.programs.pt2 import read_pt2
    except ImportError as error:
        raise MissingPackageError(
            "cannot mend a program: torch is not installed",
            why=str(error),
            hint='pip install "whisperport[export]"',
        ) from error
    if isinstance(program, str | os.PathLike):
        _check_kind(Path(program))
        say(f"reading {program}")
        program = read_pt2(program)
    if state := written_buffer(program):
        raise LoweringError(
            f"`{program.name}` keeps state in a buffer, `{state}`",
            why="its outputs depend on earlier calls, so a rewrite cannot be proved on one",
            hint="pass the state as an input, and return it as an output",
        )
    if given := written_input(program):
        raise LoweringError(
            f"`{program.name}` writes to its input `{given}`",
            why="its caller's array would have to change, and compilers do not do that",
            hint="copy the input first, and return what was written as an output",
        )
    return program


def _check_kind(path: Path) -> None:
    """Say of what is no `.pt2` what to do instead; what is damaged, its reader says."""
    kind = {".onnx": "an ONNX file", ".tflite": "a TFLite file", ".pte": "an ExecuTorch file"}
    if path.is_dir() or path.suffix in kind:
        raise ProgramError(
            f"{path} cannot be mended",
            why=f"it is {kind.get(path.suffix, 'a folder')}; rewrites work on the graph of torch",
            hint="mend the .pt2 that it was made of: "
            "torch.export.save(torch.export.export(module, inputs), path)",
        )


def _samples(
    program: "Program", files: Sequence[str | os.PathLike[str]]
) -> "Iterator[tuple[str, list[Tensor]]]":
    """Name and inputs of everything that a rewrite is proved on."""
    from torch import from_numpy

    from whisperport.inspection.graph import Value
    from whisperport.inspection.inputs import inputs_for, read_inputs
    from whisperport.programs.trial import drawn_inputs

    for seed, scale in DRAWS:
        drawn = drawn_inputs(program, seed)
        scaled = [x * scale if x.is_floating_point() else x for x in drawn]
        yield f"noise of scale {scale:g}", scaled
    if shape := _mel_shape(program.spec):
        for name, mel in _recorded(*shape):
            yield name, [from_numpy(mel)[None]]
    wanted = [Value(tensor.name, tensor.shape, tensor.dtype) for tensor in program.spec.inputs]
    for file in files:
        arrays = inputs_for(wanted, read_inputs(Path(file)))
        yield Path(file).name, [from_numpy(array) for array in arrays]


def _mel_shape(spec: ProgramSpec) -> tuple[int, int] | None:
    """Bins and frames, where the one input of a program is a mel spectrogram (1, bins, frames)."""
    if len(spec.inputs) != 1 or spec.inputs[0].dtype != "float32":
        return None
    shape = spec.inputs[0].shape
    if len(shape) != 3 or shape[0] != 1 or shape[1] not in MELS:
        return None
    return shape[1], shape[2]


def _recorded(bins: int, frames: int) -> Iterator[tuple[str, Any]]:
    try:
        clips = shipped_clips(RECORDINGS)
    except AudioError:
        return  # this copy came without recordings: the samples named in the result say so
    for clip in clips:
        yield clip.name, log_mel(clip.samples[: frames * HOP_LENGTH], bins, n_frames=frames)


def _without_lookups(
    program: "Program", refused: Sequence[Refusal]
) -> tuple[tuple[Refusal, ...], tuple[Refusal, ...]]:
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
        for refusal in refused
        if refusal.node in tables
    ]
    return tuple(r for r in refused if r.node not in tables), tuple(lookups)


def _prove(
    candidate: "Program",
    samples: "dict[str, list[Tensor]]",
    expected: "dict[str, list[Tensor]]",
) -> tuple[Proof, ...]:
    from whisperport.programs.trial import eager_outputs

    names = [tensor.name for tensor in candidate.spec.outputs]
    return tuple(
        Proof(sample, _compare(name, ours, theirs))
        for sample, given in samples.items()
        for name, ours, theirs in zip(
            names, eager_outputs(candidate, given), expected[sample], strict=True
        )
    )


def _compare(name: str, ours: "Tensor", theirs: "Tensor") -> Comparison:
    """Numpy has neither bfloat16 nor a difference of booleans."""
    gate = GATE_OF.get(str(theirs.dtype).removeprefix("torch."), EXACT)
    actual, expected = (x.float() if x.is_floating_point() else x.long() for x in (ours, theirs))
    return compare(name, actual.numpy(), expected.numpy(), gate)


def _step_to_json(step: Step) -> dict[str, Any]:
    return {
        "rewrite": step.outcome.rewrite,
        "kept": step.kept,
        "changed": list(step.outcome.changed),
        "declined": [
            {"node": refusal.node, "reason": refusal.reason} for refusal in step.outcome.refused
        ],
        "largest_relative_error": step.largest_relative,
        "failed": [
            {
                "sample": proof.sample,
                "output": proof.comparison.output,
                "reason": proof.comparison.reason,
            }
            for proof in step.failed
        ],
    }

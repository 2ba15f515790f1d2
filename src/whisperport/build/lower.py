"""Lower one program, built-in or third-party, to a file: rewrite, lower, compare, write."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from whisperport.errors import (
    BundleError,
    LoweringError,
    UsageError,
    VerificationError,
    WhisperportError,
)
from whisperport.program.bundle import ProgramEntry
from whisperport.program.bundle.replacing_files import put_files_in_place
from whisperport.program.bundle.staging import Staging, staged_beside
from whisperport.program.host_part import HostPart
from whisperport.program.json_records import to_json
from whisperport.program.runner import Array, Runner
from whisperport.program.sizes import not_fixable
from whisperport.program.spec import Limit, ProgramSpec
from whisperport.system.option import Option
from whisperport.system.outputs import Output, check_outputs, is_same
from whisperport.system.progress import begin_stage
from whisperport.targets import TARGETS, RunOptions, Target, get_target
from whisperport.targets.cpu.onnxruntime import OPSETS
from whisperport.targets.preflight import (
    check_fits,
    estimate_lowering,
    requires_torch,
    within_memory_of,
)
from whisperport.targets.target_options import parse_options
from whisperport.verification.array_comparison import Gate
from whisperport.verification.equality import (
    Equality,
    OutputComparison,
    as_array,
    compare_sample,
    expected_outputs,
    failed_sample,
    gate_of,
)
from whisperport.verification.precision import run_precision
from whisperport.verification.samples import Sample, samples_of
from whisperport.verification.tolerances import GATES, LOWERED

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from whisperport.model.inspection.graph import Graph
    from whisperport.model.inspection.rules import Finding
    from whisperport.model.trace.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerOptions:
    """Options of `lower`.

    Args:
        sizes: numbers for the dynamic sizes of a `.pt2` file, as it names them. Default: none.
        preflight: raise an error before the lowering starts if memory or disk space is too small. Default:
            True.
        trust: run the program of a file without a limit on memory. Default: False.
        run: how the lowered program is run for the comparison.
    """

    opset: Annotated[
        int | None,
        Option(
            "ONNX opset of the file, for targets that read ONNX",
            low=OPSETS[0],
            high=OPSETS[-1],
            default="the target's",
        ),
    ] = None
    simplify: Annotated[
        bool,
        Option("Simplify the ONNX graph with the package onnxslim, for targets that read ONNX"),
    ] = False
    max_rank: Annotated[
        int | None,
        Option(
            "Maximum number of axes of a tensor. Axes of tensors with more are merged; if that is not "
            "possible, the program is rejected",
            low=3,
            default="4 for onnxruntime, else the target's limit",
        ),
    ] = None
    inputs: Annotated[
        tuple[str | os.PathLike[str], ...],
        Option(
            "Additional inputs on which PROGRAM and the lowered file are compared, as one array per input "
            "name; may be repeated",
            metavar="FILE.npz",
            exists=True,
            repeat=True,
        ),
    ] = ()
    allow_unequal: Annotated[
        bool, Option("Write the file even if its outputs differ too much from the program's")
    ] = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    preflight: bool = True
    trust: bool = False
    run: RunOptions = field(default_factory=RunOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """The result of `lower`: the files, and the comparison with the original program.

    Attributes:
        files: paths of the lowered program and of the files that belong to it; the program is the first.
        target: name of the target.
        spec: signature of the original program.
        host: description of the steps of the original program that the host computes; None if there are
            none. Their tables are in the files only: `HostPart.read` reads both.
        facts: for ONNX `opset`, `nodes`, `max_rank` and `weight_bytes`; for other formats the delegation.
        rewrites: name of a rewrite -> number of nodes that it replaced.
        equality: the comparisons with the original program.
        gate: the tolerance of every comparison.
    """

    files: tuple[Path, ...]
    target: str
    spec: ProgramSpec
    host: dict[str, Any] | None
    facts: dict[str, Any]
    rewrites: dict[str, int]
    equality: Equality
    gate: Gate

    @property
    def equal(self) -> bool:
        """Whether all outputs equal those of the original program, within the tolerance."""
        return bool(self.equality)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "files": [os.fspath(file) for file in self.files],
            "target": self.target,
            "program": to_json(self.spec),
            "host": self.host,
            **self.facts,
            "rewrites": self.rewrites,
            "rule": self.gate.rule,
            **self.equality.numbers(),
            "equal": self.equal,
            "comparisons": [comparison.to_json() for comparison in self.equality.compared],
        }


def lower(
    program: "Program | str | os.PathLike[str]",
    target: str,
    out: str | os.PathLike[str],
    options: LowerOptions | None = None,
) -> Lowered:
    """Lower one program for a target, compare it with the original program, and write it.

    The original program runs in torch, and the lowered program on the target's runtime. Both run on random
    inputs of three scales, on two shipped audio files if the input is a mel spectrogram, and on
    `options.inputs`. A target that needs a device is emulated on the CPU.

    Args:
        program: a `.pt2` file, or a `Program` from `whisperport.model.trace.program.trace`.
        target: name of a target, as `whisperport targets` lists them.
        out: path of the file to write, with the target's suffix. A file that already exists there is
            replaced when the new one is complete. Files that belong to it have the same stem, such as the
            weights, `STEM.bin`, and the steps that the target leaves to the host, `STEM.host.json` and
            `.npy` files; see `HostPart`. They replace other files only together with `out`.
        options: see `LowerOptions`. Default: None, all defaults.

    Returns:
        The files that were written, and the comparison.

    Raises:
        UsageError: there is no such target, the target has no such option, or `out` is the program itself
            or has another suffix than the target's files.
        MissingPackageError: torch, an exporter or the target's runtime is not installed.
        ProgramError: the program or a file of inputs cannot be read, or the program keeps state in a
            buffer, writes to an input, or has an input or output of a dtype that numpy does not support.
        LoweringError: the target or its compiler rejects the program, or a tensor has too many axes.
        WhisperportError: `out` cannot be written, or the machine has too little memory or disk space.
        VerificationError: the outputs of the lowered program differ; nothing was written.
    """
    options, out = options or LowerOptions(), Path(out)
    chosen = _configured(get_target(target), options)
    read = [*([program] if isinstance(program, str | os.PathLike) else []), *options.inputs]
    beside = (out.with_suffix(".bin"), out.with_name(f"{out.stem}.host.json"))
    overlaps = [path for path in beside if any(is_same(path, source) for source in read)]
    check_outputs([Output(path, "--out", "file") for path in (out, *overlaps)], read)
    _check_suffix(out, chosen)
    with staged_beside(out) as staged, within_memory_of(program, trust=options.trust):
        folder = staged.partial
        program_path = (
            os.fspath(program) if isinstance(program, str | os.PathLike) else "PROGRAM.pt2"
        )
        program = read_program(program, "lower a program", options.sizes, as_arrays=True)
        if options.preflight:
            _check_room(program, target, out)
        samples = samples_of(program, options.inputs)
        begin_stage(f"running the program in torch on {len(samples)} samples")
        expected = expected_outputs(program, samples)
        rewritten, host, rewrites = _rewritten(program, chosen, _max_rank(options, chosen))
        _check_supported(rewritten, chosen, program_path)
        entry, facts = _compile(rewritten, chosen, folder / out.name, options)
        begin_stage(f"running {out.name} on {target}")
        run = options.run.with_emulation([chosen])
        runner = chosen.load(folder, [entry], run)[entry.spec.name]
        gate = _gate(program, run_precision(entry, run.options))
        equality = _compared(runner, host, program.spec, samples, expected, gate)
        if not equality and not options.allow_unequal:
            raise VerificationError(
                f"{out} would not compute what `{program.name}` does, and was not written",
                why=equality.reason,
                hint="`--allow-unequal` writes it anyway",
            )
        return Lowered(
            files=_put_in_place(staged, (*entry.files, *_write_host(host, folder, out)), out, read),
            target=target,
            spec=program.spec,
            host=host.to_json() if host else None,
            facts=facts,
            rewrites=rewrites,
            equality=equality,
            gate=gate,
        )


def _gate(program: "Program", precision: str) -> Gate:
    """Return the limit of the program's dtypes, or that of the file's precision if it is wider."""
    gates = (gate_of(LOWERED, program), GATES[precision])
    return min(gates, key=lambda gate: gate.min_sqnr_db)


def _check_suffix(out: Path, target: Target) -> None:
    suffix = target.spec.lowering.lowered_suffix
    if out.suffix != suffix:
        raise UsageError(
            f"cannot write {out}: `{target.spec.name}` writes {suffix} files",
            why=f"programs read a file by its suffix; that of `--out` is `{out.suffix}`"
            if out.suffix
            else "the path of `--out` has no suffix",
            hint=f"use `--out {shlex.quote(os.fspath(out.with_suffix(suffix)))}`"
            if out.name
            else f"give the path of a {suffix} file",
        )


def _configured(target: Target, options: LowerOptions) -> Target:
    if options.opset is None:
        return target
    settings = {"opset": str(options.opset)}
    return target.configured(parse_options(target.lower_options, settings, target.spec.name))


def read_program(
    program: "Program | str | os.PathLike[str]",
    use: str,
    sizes: Mapping[str, int],
    *,
    as_arrays: bool,
) -> "Program":
    """Read a program if it is the path of a `.pt2` file, and check that it can be compared.

    Args:
        use: what is done with it, for the error if torch is not installed.
        sizes: numbers for the dynamic sizes of the file.
        as_arrays: see `check_comparable`.
    """
    with requires_torch(use):
        from whisperport.model.trace.pt2 import read_pt2
        from whisperport.model.trace.trial import check_comparable
    if isinstance(program, str | os.PathLike):
        begin_stage(f"reading {program}")
        program = read_pt2(program, sizes)
    elif sizes:
        raise not_fixable(f"`{program.name}`")
    check_comparable(program, as_arrays=as_arrays)
    return program


def _check_room(program: "Program", target: str, out: Path) -> None:
    from whisperport.model.trace.pt2 import weight_bytes

    check_fits(estimate_lowering(weight_bytes(program), target), out)


def _rewritten(
    program: "Program", target: Target, max_rank: int
) -> "tuple[Program, HostPart, dict[str, int]]":
    """Apply the target's rewrites, and fold axes if a tensor has more than `max_rank` axes.

    Returns:
        The rewritten program, the host's steps, and name of a rewrite -> number of nodes that it replaced.
    """
    from whisperport.model.inspection.read_exported import read_exported
    from whisperport.model.rewrites import run_host_rewrite, run_rewrites

    if target.spec.lowering.rewrites:
        begin_stage(f"rewriting {program.name} for {target.spec.name}")
    program, outcomes = run_rewrites(program, target.spec.lowering.rewrites)
    if _above(read_exported(program.name, program.exported), max_rank):
        begin_stage(f"folding the axes of {program.name}")
        program, folded = run_rewrites(program, [f"fold-axes={max_rank}"])
        outcomes += folded
    host = HostPart()
    for name in target.spec.lowering.host_rewrites:
        program, moved, outcome = run_host_rewrite(program, name)
        host, outcomes = host + moved, [*outcomes, outcome]
    return program, host, {outcome.rewrite: len(outcome.changed) for outcome in outcomes}


def _check_supported(program: "Program", target: Target, program_path: str) -> None:
    """Raise an error if the target's compiler would reject the program because of an unsupported node."""
    rejected = target.check(program) if target.spec.supports.rejects_programs else []
    if rejected:
        what = f"{shlex.quote(program_path)} --target {target.spec.name}"
        fixed = shlex.quote(os.fspath(Path(program_path).with_suffix(".fixed.pt2")))
        place = f", in {rejected[0].place}" if rejected[0].place else ""
        raise LoweringError(
            f"`{target.spec.name}` does not support the program `{program.name}`",
            why=f"`{rejected[0].node}`{place}: {rejected[0].reason} "
            f"(rejections in total: {len(rejected)})",
            hint=f"`whisperport check {what}` lists every rejection of the original program; "
            f"`whisperport fix {what} --out {fixed}` applies the rewrites, and lists what remains",
        )


def _max_rank(options: LowerOptions, target: Target) -> int:
    return (
        options.max_rank or target.spec.lowering.lowered_max_rank or target.spec.supports.max_rank
    )


def _above(graph: "Graph", max_rank: int) -> "list[Finding]":
    from whisperport.model.inspection.rules import RULES

    return list(RULES["WP201"].check(graph, Limit(rule="WP201", value=max_rank, source="")))


def _check_rank(name: str, graph: "Graph", max_rank: int) -> None:
    if not (rejections := _above(graph, max_rank)):
        return
    remainder = f" (and {len(rejections) - 1} more)" if len(rejections) > 1 else ""
    raise LoweringError(
        f"`{name}` has tensors of more than {max_rank} axes",
        why=f"`{rejections[0].name}`: {rejections[0].reason}{remainder}",
        hint="`whisperport explain WP201` explains what to do; `--max-rank` allows more axes",
    )


def _compile(
    program: "Program", target: Target, path: Path, options: LowerOptions
) -> tuple[ProgramEntry, dict[str, Any]]:
    """Lower a program to the file `path`.

    Returns:
        The entry that the target loads the program with, and facts about the file.
    """
    from whisperport.model.inspection.read_exported import read_exported

    max_rank, onnx = _max_rank(options, target), target.spec.lowering.lowered_suffix == ".onnx"
    if not onnx:
        _check_rank(program.name, read_exported(program.name, program.exported), max_rank)
    entry, facts = target.lower_file(program, path, simplify=options.simplify)
    if entry.files[0] != path.name:  # a single file: those of several have the stem of `path`
        os.replace(path.parent / entry.files[0], path)
        entry = replace(entry, files=(path.name, *entry.files[1:]))
    # Exporters write some operators with more axes than torch has, so the written file is checked.
    if onnx and facts["nodes"]:  # a program that returns constants has no nodes
        from whisperport.model.inspection.read_onnx import read_onnx

        _check_rank(program.name, read_onnx(path.parent / entry.files[0]), max_rank)
    return entry, facts


def _compared(
    runner: Runner,
    host: HostPart,
    spec: ProgramSpec,
    samples: Sequence[Sample],
    expected: dict[str, dict[str, Array]],
    gate: Gate,
) -> Equality:
    comparisons: list[OutputComparison] = []
    names = [tensor.name for tensor in spec.inputs]
    for sample in samples:
        arrays = dict(zip(names, map(as_array, sample.inputs), strict=True))
        try:
            actual = host.outputs(runner.run(host.inputs(arrays)))
        except BundleError as error:  # an output has a wrong shape or dtype
            reason = f"{error.what}: {error.why}"
            comparisons += failed_sample(
                sample.name, [tensor.name for tensor in spec.outputs], reason
            )
            continue
        comparisons += compare_sample(sample.name, actual, expected[sample.name], gate)
    return Equality(tuple(comparisons))


def _write_host(host: HostPart, folder: Path, out: Path) -> tuple[str, ...]:
    files = host.files(out.stem)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return tuple(files)


def _put_in_place(
    staged: Staging, files: Sequence[str], out: Path, read: Sequence[str | os.PathLike[str]]
) -> tuple[Path, ...]:
    """Move the files to the folder of `out`, under the names with which they were verified."""
    first, *companions = files
    beside = [out.with_name(file) for file in companions]
    check_outputs([Output(path, "--out", "file") for path in beside], read)
    check_owner(staged.partial, beside, out)
    put_files_in_place(staged.partial, staged.files, out, (*companions, first))
    return (out, *beside)


def check_owner(folder: Path, beside: Sequence[Path], out: Path) -> None:
    """Check that files beside `out` belong to it, before those in `folder` replace them.

    `fix` writes such files too: a fixed program and a lowered one may have the same stem.

    Raises:
        WhisperportError: a file with other contents is there, and may belong to another program.
    """
    suffixes = {target.spec.lowering.lowered_suffix for target in TARGETS} - {out.suffix}
    siblings = [path for suffix in suffixes if (path := out.with_suffix(suffix)).exists()]
    for place in beside:
        if not os.path.lexists(place):
            continue
        if place.is_file() and place.read_bytes() == (folder / place.name).read_bytes():
            continue
        if siblings or not out.exists():
            owner = (
                f"{siblings[0].name} may belong to it" if siblings else f"{out} does not exist yet"
            )
            raise WhisperportError(
                f"{place} exists already, and was not changed",
                why=f"`--out {out}` needs this name for a file of its own, and {owner}",
                hint="choose another name for `--out`, or move that file; nothing was written",
            )

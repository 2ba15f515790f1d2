"""Export a checkpoint to the fastest verified mix of the targets that run on this machine.

    candidates ─► export, verify ─► time each program, in turn ─► choose ─► export with that placement

The result is an ordinary bundle. Its placements are the choice. If a target has the program
`coarse_projection`, the vocabulary projection is measured as a program of its own on all targets. If the
coarse one is not clearly faster than this, the projection is a part of `step` again in the result.
"""

import os
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whisperport import targets
from whisperport.bundle import Bundle, check_writable
from whisperport.bundle.staging import TOKEN_BYTES, Staging
from whisperport.commands.doctor import is_installed
from whisperport.errors import LoweringError, UsageError, WhisperportError
from whisperport.exporting.export import ExportOptions, export, loaded
from whisperport.program.program_kind import COARSE_PROJECTION, VOCAB_PROJECTION
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.system.progress import Progress, prefixed
from whisperport.targets import RunOptions, Target, get_target
from whisperport.targets.options import by_target

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from whisperport.checkpoint import Checkpoint

AUTO = "auto"  # the name of no target; `--target auto` calls `export_fastest`
ROUNDS = 9  # runs of each program on each target, after one that is not measured
# Runs per window: the start tokens, and 64 tokens of text, as this project's benchmarks decode.
RUNS_PER_WINDOW: Mapping[str, int] = {
    "encoder": 1,
    "cross_kv": 1,
    "prefill_4": 1,
    "step": 64,
    VOCAB_PROJECTION: 64,
}
# Programs that a user may place without a choice of where the vocabulary is projected.
OTHERS = {"encoder", "cross_kv", "align"}
# A program leaves the fastest single target only for a target that needs at most this share of its time.
# A second target has its own copy of the weights in memory, and medians of idle machines vary by 3 %.
LEAVES_BELOW = 0.95


@dataclass(frozen=True, slots=True)
class Timed:
    """One program on one target.

    Attributes:
        program: name of the program.
        target: name of the target.
        ms: median time of a run, in milliseconds.
        verified: whether every comparison with the reference passed.
    """

    program: str
    target: str
    ms: float
    verified: bool


@dataclass(frozen=True, slots=True)
class Fastest:
    """The fastest bundle, and what it was chosen from.

    Attributes:
        bundle: the bundle that was written.
        timed: every program on every target that was measured.
        rejected: name of a target -> why it was not measured.
    """

    bundle: Bundle
    timed: tuple[Timed, ...]
    rejected: Mapping[str, str]


def export_fastest(
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    out: str | os.PathLike[str],
    options: ExportOptions | None = None,
    *,
    progress: Progress = lambda _: None,
) -> Fastest:
    """Export to every installed target that runs here, measure, and write the fastest verified mix.

    Measure on an idle machine. Each target is exported to a hidden folder beside `out`, which needs the
    disk space of all bundles, and is deleted at the end.

    Args:
        checkpoint: a loaded checkpoint, or anything that `load_checkpoint` accepts.
        out: folder of the bundle. A bundle that already exists there is replaced when the new one is
            complete.
        options: see `ExportOptions`. Programs in `options.placement` stay on the target that it names.
            `options.precision` applies to every target; a target without this precision is not measured.
            A program in `options.precisions` is measured only on the targets with its precision. Default:
            None, all defaults.
        progress: called with the name of each stage, a few words.

    Raises:
        UsageError: an option does not exist, or no target has the precision of a program.
        LoweringError: no target could be exported, or a program is verified on none of them.
        CheckpointError, MissingPackageError, BundleError, VerificationError: see `export`.
    """
    options, out = options or ExportOptions(), Path(out)
    found = candidates()
    _check_options(options, found)
    check_writable(out)
    checkpoint = loaded(checkpoint, progress)
    with _hidden_folder(out) as folder:
        bundles, rejected = _exported(checkpoint, found, folder, options, progress)
        timed = time_programs(bundles, options.run, progress, options.precisions)
    placement = choose(timed, options.precisions)
    if not placement:
        raise UsageError(
            "there is no program to place on the fastest target",
            why="`placement` names a target for every program",
            hint="use `export` with one of these targets",
        )
    progress("exporting the fastest mix: " + ", ".join(dict.fromkeys(placement.values())))
    chosen = _with_placement(options, placement)
    first = next(iter(placement.values()))  # each program has a placement of its own
    bundle = export(checkpoint, first, out, chosen, progress=progress)
    return Fastest(bundle, timed, rejected)


def candidates() -> tuple[Target, ...]:
    """Return the targets that run all programs on this machine, and whose packages are installed.

    A target with a compiler or an emulation runs on a device. A target with own variants of programs may
    have another cache, which the programs of one bundle share.
    """
    return tuple(
        target
        for target in targets.TARGETS
        for spec in [target.spec]
        if not (spec.emulation or spec.programs or spec.variants or target.compiler)
        and is_installed(spec.extra)
        and is_installed(spec.run_extra)
    )


def time_programs(
    bundles: Mapping[str, Bundle],
    run: RunOptions,
    progress: Progress,
    precisions: Mapping[str, str] | None = None,
) -> tuple[Timed, ...]:
    """Measure every program of bundles that were exported from one checkpoint.

    The targets run in turn, so that other load on the machine affects all of them.

    Args:
        bundles: name of the target -> its bundle. Programs on other targets are not measured.
        run: options for running.
        progress: called with the name of each program.
        precisions: program -> precision; a program in another one is not measured. Default: None, all
            programs are measured.
    """
    wanted = precisions or {}
    loaded = {name: _runners_on(name, bundle, run, wanted) for name, bundle in bundles.items()}
    found = []
    for program in dict.fromkeys(name for runners in loaded.values() for name in runners):
        progress(f"timing {program}")
        on = {name: noise_call(own[program]) for name, own in loaded.items() if program in own}
        times: dict[str, list[float]] = {target: [] for target in on}
        for _ in range(1 + ROUNDS):
            for target, call in on.items():
                started = time.perf_counter()
                call()
                times[target].append(time.perf_counter() - started)
        for target, seconds in times.items():
            verified = bundles[target].manifest.is_verified(program)
            found.append(Timed(program, target, 1e3 * statistics.median(seconds[1:]), verified))
    return tuple(found)


def choose(timed: Sequence[Timed], exempt: Collection[str] = ()) -> dict[str, str]:
    """Choose a target for every program: the fastest single target, or another that is clearly faster.

    The fastest single target has the smallest sum of times of a window, see `RUNS_PER_WINDOW`. It counts
    only if all of its programs are verified; if there is none, each program is on its fastest target.

    Args:
        timed: every program on every target that was measured.
        exempt: programs that are always on their fastest target, and do not count for the others.

    Returns:
        Program -> name of its target.

    Raises:
        LoweringError: a program is verified on no target.
    """
    ms: dict[str, dict[str, float]] = {}
    for one in timed:
        own = ms.setdefault(one.program, {})
        if one.verified:
            own[one.target] = one.ms
    if not _coarse_is_faster(ms):
        ms.pop(COARSE_PROJECTION, None)
    for program, on in ms.items():
        if not on:
            names = ", ".join(dict.fromkeys(one.target for one in timed if one.program == program))
            raise LoweringError(
                f"`{program}` is verified on no target of this machine",
                why=f"its outputs differ from the reference on {names}",
                hint="`whisperport export --target NAME --allow-unverified` writes a bundle to examine",
            )
    single = _fastest_single({program: on for program, on in ms.items() if program not in exempt})
    chosen = {}
    for program, on in ms.items():
        best = min(on, key=on.__getitem__)
        stays = single in on and program not in exempt and on[best] > LEAVES_BELOW * on[single]
        chosen[program] = single if stays else best
    if COARSE_PROJECTION not in chosen:  # then it is a part of the programs that decode
        chosen.pop(VOCAB_PROJECTION, None)
    return chosen


def _coarse_is_faster(ms: Mapping[str, Mapping[str, float]]) -> bool:
    coarse, exact = (ms.get(name, {}).values() for name in (COARSE_PROJECTION, VOCAB_PROJECTION))
    return bool(coarse and exact) and min(coarse) < LEAVES_BELOW * min(exact)


def _fastest_single(ms: Mapping[str, Mapping[str, float]]) -> str:
    """Return the target with the smallest time per window, of those with all programs; else ""."""
    needed = [on for program, on in ms.items() if program != COARSE_PROJECTION]
    complete = set[str]().union(*needed).intersection(*needed)

    def window_ms(target: str) -> float:
        return sum(runs * ms[p][target] for p, runs in RUNS_PER_WINDOW.items() if p in ms)

    return min(sorted(complete), key=window_ms, default="")


def _exported(
    checkpoint: "Checkpoint",
    found: Sequence[Target],
    folder: Path,
    options: ExportOptions,
    progress: Progress,
) -> tuple[dict[str, Bundle], dict[str, str]]:
    """Export to each target.

    Returns:
        Target -> its bundle, and target -> why it has none.

    Raises:
        WhisperportError: the first error, if no target has a bundle.
    """
    bundles: dict[str, Bundle] = {}
    errors: dict[str, WhisperportError] = {}
    apart = _projects_apart(checkpoint, found, options)
    for target in found:
        name = target.spec.name
        coarse = COARSE_PROJECTION in target.spec.further_programs
        placed = {COARSE_PROJECTION if coarse else VOCAB_PROJECTION: name} if apart else {}
        own = replace(
            options,
            options=_options_of(name, options),
            placement={**placed, **options.placement},
            precisions={
                program: precision
                for program, precision in options.precisions.items()
                if program in options.placement or precision in target.spec.precisions
            },
            allow_unverified=True,
        )
        report = prefixed(progress, name)
        try:
            bundles[name] = export(checkpoint, name, folder / name, own, progress=report)
        except (LoweringError, UsageError) as error:
            errors[name] = error
    if not bundles:
        raise next(iter(errors.values()), None) or LoweringError(
            "no target that runs on this machine is installed",
            hint='pip install "whisperport[export]" installs the target `onnxruntime`',
        )
    reasons = {name: f"{e.what}: {e.why}" if e.why else e.what for name, e in errors.items()}
    return bundles, reasons


def _projects_apart(
    checkpoint: "Checkpoint", found: Sequence[Target], options: ExportOptions
) -> bool:
    """Return whether to measure the vocabulary projection as a program of its own."""
    from whisperport.model.coarse_projection import SMALLEST_BLOCK

    return (
        any(COARSE_PROJECTION in target.spec.further_programs for target in found)
        and not options.placement.keys() - OTHERS
        and not options.precision
        and not options.precisions.keys() - OTHERS
        and checkpoint.dims.n_text_state % SMALLEST_BLOCK == 0
    )


def _check_options(options: ExportOptions, found: Sequence[Target]) -> None:
    """Raise UsageError if no target that may be used has a lowering option or a precision."""
    used = {*options.placement.values(), *(target.spec.name for target in found)}
    known = {t.spec.name: t.lower_options for t in targets.TARGETS if t.spec.name in used}
    by_target(options.options, known)
    every = {precision: None for target in found for precision in target.spec.precisions}
    for program, precision in options.precisions.items():
        if program not in options.placement and precision not in every:
            raise UsageError(
                f"no target that runs on this machine has the precision `{precision}` for `{program}`",
                why=f"installed targets have {', '.join(every) or 'none'}",
                hint="`whisperport targets` lists the precisions of all targets",
            )


def _options_of(target: str, options: ExportOptions) -> dict[str, str]:
    """Return the lowering options of the targets of one export."""
    used = {target, *options.placement.values()}
    return {name: v for name, v in options.options.items() if name.partition(".")[0] in used}


def _with_placement(options: ExportOptions, placement: Mapping[str, str]) -> ExportOptions:
    """Return the options of the last export."""
    precisions = dict.fromkeys(placement, options.precision) if options.precision else {}
    used = {*placement.values(), *options.placement.values()}
    return replace(
        options,
        placement={**placement, **options.placement},
        precision="",
        precisions={**precisions, **options.precisions},
        options={n: v for n, v in options.options.items() if n.partition(".")[0] in used},
    )


def _runners_on(
    target: str, bundle: Bundle, run: RunOptions, precisions: Mapping[str, str]
) -> dict[str, Runner]:
    """Load the programs of a bundle that are placed on a target, in the precision asked for."""
    entries = [
        entry
        for entry in bundle.manifest.programs
        if entry.target == target
        and entry.precision == precisions.get(entry.spec.name, entry.precision)
    ]
    return get_target(target).load(bundle.folder, entries, run)


def noise_call(runner: Runner) -> Callable[[], object]:
    """Return a function that runs a program on noise, with constants and state bound as in a decoder."""
    inputs = _inputs(runner.spec)
    binding = runner.binding()
    for name, role in runner.roles.items():
        if role != "input":
            binding.bind(name, inputs[name])
    return partial(binding.run, inputs)


def _inputs(spec: ProgramSpec) -> dict[str, Array]:
    """Return noise for every input, and masks that hide nothing."""
    random = np.random.default_rng(0)
    return {
        tensor.name: (
            np.zeros(tensor.shape, tensor.dtype)
            if tensor.name == "mask"
            else (0.1 * random.standard_normal(tensor.shape)).astype(tensor.dtype)
        )
        for tensor in spec.inputs
    }


@contextmanager
def _hidden_folder(out: Path) -> Iterator[Path]:
    """Make a folder beside the output; if this process is killed, the next writer of `out` deletes it."""
    folder = Staging(out.resolve(), secrets.token_hex(TOKEN_BYTES)).partial
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

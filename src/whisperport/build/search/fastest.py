"""The target "auto": the fastest verified mix of runtimes and precisions on this machine.

    candidates ─► lower encoder, cross_kv and step ─► time them, in turn ─► choose ─► export and verify
                                                                              ▲                  │
                                                                              └──── rejected ◄───┘

A candidate is a target in one of its precisions. The encoder is on one, `cross_kv` is on one, and so are
all other programs together. Short speech counts as much as a full window: an encoder that reads windows as
short as the audio, or has a program for short windows, takes a fraction of the time for a command. The
result is an ordinary bundle, verified as any other. A choice that fails is left out of the next one.
"""

import math
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from whisperport import targets
from whisperport.build.doctor import is_installed
from whisperport.build.export.drafting import STATIC, build_packages, loaded, lower_programs
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.export.exported import Attempt, Candidate, Exported, Timed
from whisperport.build.export.placing import PlacementRequest, of_one_length
from whisperport.build.search.attempts import first_accepted
from whisperport.build.search.timing import known_times, race, remember
from whisperport.errors import LoweringError, UsageError, VerificationError
from whisperport.program.bundle.staging import TOKEN_BYTES, Staging
from whisperport.program.bundle.writing import check_writable
from whisperport.program.dims import Dims
from whisperport.program.program_kind import (
    ALIGN,
    COARSE_PROJECTION,
    CROSS_KV,
    ENCODER,
    STEP,
    VOCAB_PROJECTION,
)
from whisperport.program.runner import Runner
from whisperport.program.window import WindowOptions
from whisperport.system.progress import begin_stage
from whisperport.targets import Target, get_target
from whisperport.targets.preflight import check_fits, estimate_export
from whisperport.targets.target_options import by_target
from whisperport.verification import machine, versions

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from whisperport.model.checkpoint import Checkpoint

FLOAT = "fp32"
WINDOW_S, TOKENS = 30.0, 64  # a full window, as this project's benchmarks decode
COMMAND_TOKENS = 12  # in a command of 3 s
COMMAND_WINDOW_S = 3.5  # the window that holds it, if the audio's programs read any length
LENGTHS_S = (5.0, 10.0)  # of the programs that others get, beside the window of 30 s
STEPS = 8  # that are measured together
# Programs that are placed together: each group is known by the one that takes most of the time.
GROUPS = {ENCODER: (ENCODER,), CROSS_KV: (CROSS_KV,), STEP: (STEP, COARSE_PROJECTION)}
# Programs that a user may place, while the rest of the decoder is chosen.
OTHERS = {ENCODER, CROSS_KV, ALIGN}
# A second runtime needs more memory, and fewer bits cost accuracy: each must save 5 % of the time.
# Medians of idle machines vary by 3 %.
PRICE = 1.05


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate of each group of programs that the user has not placed."""

    of: Mapping[str, Candidate]

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(map(str, self.of.values())))


def export_fastest(
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    out: Path,
    options: ExportOptions,
) -> Exported:
    """Measure every candidate, and write the fastest verified mix; see `export_best`."""
    shortlist = candidates(options)
    check_writable(out)
    checkpoint = loaded(checkpoint, options.adapter)
    about = _about(checkpoint, shortlist, options)
    rejected: dict[str, str] = {}
    if (timed := known_times(about)) is None:
        if options.preflight:
            check_fits(
                estimate_export(checkpoint.dims, {candidate.target for candidate in shortlist}), out
            )
        with _hidden_folder(out) as folder:
            timed, rejected = _measured(checkpoint, shortlist, folder, options)
        if not rejected:
            remember(about, timed)
    else:
        begin_stage("the times of a model of these sizes are known")

    def export_choice(choice: Choice) -> Exported:
        begin_stage(f"exporting {choice}, the fastest of {len(shortlist)} candidates")
        target, chosen = _export_of(choice, checkpoint.dims, options)
        return replace(export(checkpoint, target, out, chosen), choice=choice.of)

    exported, attempts = first_accepted(
        partial(
            _choices, timed, _placed_groups(options), _shares(shortlist, checkpoint.dims, options)
        ),
        export_choice,
        lambda choice, _: Attempt(name=str(choice)),
    )
    not_measured = (Attempt(name=name, rejected=why) for name, why in rejected.items())
    return replace(exported, attempts=(*not_measured, *attempts), timed=timed)


def _choices(
    timed: Sequence[Timed],
    placed: Collection[str],
    shares: Mapping[str, float],
    failures: Sequence[tuple[Choice, VerificationError]],
) -> Iterator[Choice]:
    """Yield the fastest choice; after each failure, the fastest one without the candidate that failed."""
    banned: set[tuple[str, Candidate]] = set()
    while True:
        yield choose(timed, banned, placed, shares)
        ban = _failed(*failures[-1])
        banned.add(ban)
        if not _candidates_of(ban[0], timed, banned):
            return


def candidates(options: ExportOptions) -> tuple[Candidate, ...]:
    """Return the targets that run all programs on this machine, each in the precisions to measure.

    A target with a compiler or an emulation runs on a device. A target with own variants of programs may
    have another cache, which the programs of one bundle share.

    Raises:
        UsageError: no target that may be used has a lowering option, or a precision.
    """
    here = [
        target
        for target in targets.TARGETS
        for spec in [target.spec]
        if not (
            spec.runs.emulation or spec.runs.programs or spec.lowering.variants or target.compiler
        )
        and is_installed(spec.software.extra)
        and is_installed(spec.software.run_extra)
    ]
    _check_options(options, here)
    shortlist = tuple(
        Candidate(target.spec.name, precision)
        for target in here
        for precision in target.spec.runs.precisions
        if any(precision in _precisions(target.spec.name, group, options) for group in GROUPS)
    )
    if not shortlist:
        raise LoweringError(
            "no target that runs on this machine is installed",
            hint='pip install "whisperport[export]" installs the target `onnxruntime`',
        )
    return shortlist


def choose(
    timed: Sequence[Timed],
    banned: Collection[tuple[str, Candidate]] = (),
    placed: Collection[str] = (),
    shares: Mapping[str, float] = MappingProxyType({}),
) -> Choice:
    """Choose the candidates with the least time, as the geometric mean of a full window and a command.

    Args:
        timed: every program of every candidate that was measured.
        banned: groups, such as "encoder", with a candidate that is not used for them.
        placed: groups that the user has placed.
        shares: target -> the share of its times that its programs of the audio take for a command.
            Default: all of them.

    Raises:
        UsageError: the user has placed all of them.
        LoweringError: there is no candidate for a group.
    """
    if len(placed) == len(GROUPS):
        raise UsageError(
            "there is no program to place on the fastest target",
            why="`placement` names a target for every program",
            hint="use `export` with one of these targets",
        )
    of = {g: _candidates_of(g, timed, banned) for g in GROUPS if g not in placed}
    for group, group_candidates in of.items():
        if not group_candidates:
            raise LoweringError(
                f"`{group}` could be measured on no target of this machine",
                why="every target failed, or has not the precision asked for",
                hint="`whisperport export --target NAME` shows why one of them fails",
            )
    choices = [Choice(dict(zip(of, mix, strict=True))) for mix in product(*of.values())]
    return min(choices, key=lambda choice: _price(choice, timed, shares))


def _price(choice: Choice, timed: Sequence[Timed], shares: Mapping[str, float]) -> float:
    """Return the milliseconds of speech, times `PRICE` for what should save more than it costs."""
    large = [choice.of[group].precision for group in (ENCODER, STEP) if group in choice.of]
    # Those of cross_kv alone.
    small = {candidate.precision for candidate in choice.of.values()} - {*large}
    fewer_bits = sum(precision != FLOAT for precision in (*large, *small))
    runtimes = len({candidate.target for candidate in choice.of.values()})
    of_audio = [choice.of[group].target for group in (ENCODER, CROSS_KV) if group in choice.of]
    share = max((shares.get(target, 1.0) for target in of_audio), default=1.0)
    command = _speech_ms(choice, timed, COMMAND_TOKENS, share)
    ms = math.sqrt(_speech_ms(choice, timed, TOKENS) * command)
    return PRICE ** (fewer_bits + runtimes - 1) * ms


def _speech_ms(choice: Choice, timed: Sequence[Timed], tokens: int, share: float = 1.0) -> float:
    """Return the time of so many tokens, without programs that take little of it.

    Args:
        share: of the audio's programs, in a window that is shorter than that of the measurement.
    """
    return sum(
        timing.ms * (tokens if group == STEP else share)
        for group, candidate in choice.of.items()
        for timing in timed
        if timing.program in GROUPS[group] and timing.candidate == candidate
    )


def _shares(
    shortlist: Sequence[Candidate], dims: Dims, options: ExportOptions
) -> Mapping[str, float]:
    """Return the share of the audio's programs that a command takes on each target."""
    if options.window != WindowOptions():  # such a bundle has one window only
        return {}
    shortest = min(_lengths(dims, options), default=WINDOW_S)
    runs = {name: get_target(name).spec.runs for name in {c.target for c in shortlist}}
    return {
        name: (COMMAND_WINDOW_S if own.any_audio else shortest) / WINDOW_S
        for name, own in runs.items()
    }


def _lengths(dims: Dims, options: ExportOptions) -> tuple[float, ...]:
    """Return the seconds of the windows that programs of one length of audio are exported for."""
    if options.windows or options.window != WindowOptions():
        return options.windows
    return tuple(seconds for seconds in LENGTHS_S if seconds < dims.window_s)


def _candidates_of(
    group: str, timed: Sequence[Timed], banned: Collection[tuple[str, Candidate]]
) -> list[Candidate]:
    return [
        timing.candidate
        for timing in timed
        if timing.program == group and (group, timing.candidate) not in banned
    ]


def _failed(choice: Choice, error: VerificationError) -> tuple[str, Candidate]:
    """Return the group whose candidate is not used again, with the candidate.

    It is the group of the program that failed. If only words differ, it is one with fewer bits.
    """
    failed = [group for group in choice.of if group in error.programs]
    if not error.programs:
        failed = [group for group, candidate in choice.of.items() if candidate.precision != FLOAT]
    rest = STEP if STEP in choice.of else next(iter(choice.of))
    group = next(iter(failed), rest)
    return group, choice.of[group]


def _measured(
    checkpoint: "Checkpoint",
    shortlist: Sequence[Candidate],
    folder: Path,
    options: ExportOptions,
) -> tuple[tuple[Timed, ...], dict[str, str]]:
    """Lower encoder, cross_kv and step for every candidate, without a verification, and measure them.

    Returns:
        The times, and a candidate -> why it was not measured.
    """
    from whisperport.model.network.whisper import build_model

    model = build_model(checkpoint, options.window.of(checkpoint.dims))
    runners: dict[Candidate, Mapping[str, Runner]] = {}
    rejected: dict[str, str] = {}
    for number, candidate in enumerate(shortlist):
        target, programs = get_target(candidate.target), [*GROUPS]
        if _is_coarse(candidate, checkpoint.dims, options):
            programs += [VOCAB_PROJECTION, COARSE_PROJECTION]
        begin_stage(f"lowering encoder, cross_kv and step for {candidate}")
        request = PlacementRequest(
            target=candidate.target,
            precision=candidate.precision,
            options=_of_targets([candidate.target], options.options),
        )
        run = replace(options.run, options=_of_targets([candidate.target], options.run.options))
        own = folder / str(number)
        own.mkdir()
        try:
            if reason := target.too_large(checkpoint.dims):
                raise LoweringError(
                    f"the checkpoint is too large for `{candidate.target}`", why=reason
                )
            entries = lower_programs(model, checkpoint.generation, request, programs, own)
            used = [entry for entry in entries if entry.spec.name != VOCAB_PROJECTION]
            runners[candidate] = target.load(own, used, run)
        except (LoweringError, UsageError) as error:
            rejected[str(candidate)] = f"{error.what}: {error.why}" if error.why else error.what
    timed: list[Timed] = []
    for group, parts in GROUPS.items():
        rivals = {
            rival: [programs_by_name[name] for name in parts if name in programs_by_name]
            for rival, programs_by_name in runners.items()
            if rival.precision in _precisions(rival.target, group, options)
        }
        if group not in _placed_groups(options):
            begin_stage(f"timing {group} on {len(rivals)} candidates")
            timed += race(rivals, STEPS if group == STEP else 1)
    return tuple(timed), rejected


def _precisions(target: str, group: str, options: ExportOptions) -> tuple[str, ...]:
    """Return the precisions in which a group is measured on a target that has them."""
    precision = options.precisions.get(group, options.precision)
    return (precision,) if precision else get_target(target).spec.runs.timed_precisions


def _is_coarse(candidate: Candidate, dims: Dims, options: ExportOptions) -> bool:
    """Return whether a candidate decodes with `coarse_projection`, which has the text of float32."""
    from whisperport.model.network.coarse_projection import SMALLEST_BLOCK

    return (
        candidate.precision == FLOAT
        and COARSE_PROJECTION in get_target(candidate.target).spec.runs.further_programs
        and not options.precisions.keys() - OTHERS
        and dims.n_text_state % SMALLEST_BLOCK == 0
    )


def _export_of(choice: Choice, dims: Dims, options: ExportOptions) -> tuple[str, ExportOptions]:
    """Return the target and the options of the export of a choice."""
    small = {group: candidate for group, candidate in choice.of.items() if group != STEP}
    placement = {group: candidate.target for group, candidate in small.items()}
    precisions = {group: candidate.precision for group, candidate in small.items()}
    if decoder := choice.of.get(STEP):
        target, precision = decoder.target, decoder.precision
        if _is_coarse(decoder, dims, options):
            placement[COARSE_PROJECTION] = target
    else:
        placed = {name: on for name, on in options.placement.items() if name not in OTHERS}
        target, precision = placed.get(STEP, next(iter(placed.values()))), options.precision
    placement |= options.placement
    static = of_one_length(lambda name: get_target(placement.get(name, target)))
    return target, replace(
        options,
        windows=_lengths(dims, options) if static else (),
        placement=placement,
        precision=precision,
        precisions={**precisions, **options.precisions},
        options=_of_targets([target, *placement.values()], options.options),
    )


def _placed_groups(options: ExportOptions) -> set[str]:
    """Return the groups that the user has placed."""
    return {STEP if name not in OTHERS else name for name in options.placement} - {ALIGN}


def _check_options(options: ExportOptions, here: Sequence[Target]) -> None:
    """Raise UsageError if no target that may be used has a lowering option or a precision."""
    used = {*options.placement.values(), *(target.spec.name for target in here)}
    known = {t.spec.name: t.lower_options for t in targets.TARGETS if t.spec.name in used}
    by_target(options.options, known)
    precisions = (precision for target in here for precision in target.spec.runs.precisions)
    every = dict.fromkeys(precision for precision in precisions if precision not in STATIC)
    for program, precision in {"all programs": options.precision, **options.precisions}.items():
        if program not in options.placement and precision and precision not in every:
            raise UsageError(
                f"no target that runs on this machine has the precision `{precision}` for `{program}`",
                why=f"installed targets have {', '.join(every) or 'none'}; a precision whose ranges are "
                "calibrated is not measured",
                hint="`whisperport targets` lists the precisions of all targets",
            )


def _of_targets(names: Collection[str], options: Mapping[str, str]) -> dict[str, str]:
    """Return those of the options that are of some targets."""
    return {name: value for name, value in options.items() if name.partition(".")[0] in names}


def _about(
    checkpoint: "Checkpoint", shortlist: Sequence[Candidate], options: ExportOptions
) -> dict[str, Any]:
    """Return what the times depend on, as JSON."""
    packages = build_packages(dict.fromkeys(candidate.target for candidate in shortlist))
    return {
        "dims": asdict(checkpoint.dims),
        "window": str(options.window),
        "programs": [*GROUPS],
        "candidates": [str(candidate) for candidate in shortlist],
        "placed": sorted(_placed_groups(options)),
        "precisions": dict(options.precisions),
        "options": {**options.options, **options.run.options},
        "threads": options.run.cores,
        "machine": machine(),
        "versions": versions(packages),
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

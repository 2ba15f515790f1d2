"""Compile the programs of a bundle with vendors' compilers: calibrate, compile, update the bundle.

If a vendor's SDK can run the quantized program on the CPU, one stage runs it, and its outputs are compared
with those of the program in float32.

    BUNDLE                    unchanged until everything is compiled, then replaced
    BUNDLE.compile/TARGET     work folder of a target: calibration sets, stages and their logs, and a script
                              that runs the stages on another machine

Finished stages are kept; a stage runs again only if its inputs changed. This module knows no vendor: a
target's `Compiler` describes what is specific, and the stages run in the Python interpreter that has the
vendor's SDK.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whisperport.bundle import Bundle, ProgramEntry, check_writable
from whisperport.bundle.origin import is_trusted, record_own
from whisperport.calibration import (
    BundleSession,
    CalibrationOptions,
    CalibrationRequest,
    CalibrationSet,
    calibration_sets,
)
from whisperport.compilation.artifacts import Artifact, put_artifacts
from whisperport.compilation.compile_errors import compile_error, missing_sdk
from whisperport.compilation.emulating import Emulation, emulation_checks, prepare_emulation
from whisperport.errors import (
    BundleError,
    LoweringError,
    UsageError,
    VerificationError,
    WhisperportError,
)
from whisperport.program.checks import Check
from whisperport.program.dims import Dims
from whisperport.program.program_kind import ENCODER
from whisperport.system.atomic import clear_temporaries
from whisperport.system.locking import lock_path, locked
from whisperport.system.progress import Progress
from whisperport.targets import RunOptions, Target, get_target
from whisperport.targets.compiler import Compiler, CompileRequest, Layout, same_layout
from whisperport.targets.options import by_target
from whisperport.toolchain import (
    Failure,
    Installed,
    Job,
    has_unfinished_stages,
    prepare,
    probe,
    run_driver,
)
from whisperport.verification.machine import machine
from whisperport.verification.rejection import rejection


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Options of `compile`.

    Args:
        calibration: data to quantize with: a folder of audio files, one audio file, or an `.npy` file of
            log-mel spectrograms. Default: None, the calibration set that the work folder already has, or
            else the audio files of the package.
        work: work folder for calibration sets and finished stages; it cannot be inside the bundle. Default:
            None, a folder beside the bundle, `BUNDLE.compile`.
        force: compile even if the audio is too little, silent, repeated or below 16 kHz, or if the model is
            too large for the target. Default: False.
        allow_unverified: write the bundle even if a program disagrees with its reference in the vendor's
            simulator, or in emulation on the CPU where there is no simulator; its evidence keeps the failed
            comparisons. Default: False.
        options: compiler options of targets, "TARGET.NAME" -> value. Default: none.
        toolchains: name of a toolchain -> path of the Python interpreter that has the vendor's SDK, or of
            the SDK's folder if it is a command-line program. Default: none; then the path is taken from the
            environment variable WHISPERPORT_TOOLCHAIN_NAME. Without this variable, the SDK is looked for in
            the current interpreter, or in PATH.
        threads: CPU threads per runtime, 1 to 1024, for the programs that compute a calibration set.
            Default: None, the runtime chooses.
        trust: load programs of unknown origin without a trial run in a child process with limits on memory
            and time. Default: False.
    """

    calibration: Path | None = None
    work: Path | None = None
    force: bool = False
    allow_unverified: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    toolchains: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    trust: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """One program that a vendor's compiler compiled.

    Attributes:
        name: name of the program.
        target: name of its target.
        file: path of the compiled file in the bundle.
        bytes: size of the compiled file.
        compiler: version of the compiler, as the compiled file states it; "" if it states none.
        samples: number of calibration samples; 0 if the program needs none.
        snr_db: layer -> signal-to-noise ratio in dB, as the compiler measured it.
        emulation: checks of the quantized program, which the vendor's emulator ran.
        notes: what the user should read, such as a part of the program that runs on the CPU.
        logs: paths of the logs of the stages.
    """

    name: str
    target: str
    file: str
    bytes: int
    compiler: str
    samples: int
    snr_db: Mapping[str, float] = field(default_factory=dict)
    emulation: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The result of `compile`: the new bundle, and its compiled programs."""

    bundle: Bundle
    programs: tuple[CompiledProgram, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The programs of one target that has a compiler."""

    target: Target
    compiler: Compiler
    entries: tuple[ProgramEntry, ...]
    options: Any
    installed: Installed | None  # None: the SDK is not on this machine
    work: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """The plan for one program in its work folder."""

    compiler: Compiler  # in the program's precision
    job: Job
    artifact: Path
    keep: tuple[str, ...]
    samples: int
    emulation: Emulation | None


def compile(
    bundle: str | os.PathLike[str],
    options: CompileOptions | None = None,
    *,
    progress: Progress = lambda _: None,
) -> Compiled:
    """Compile every program of a bundle whose target has a vendor's compiler, and update the bundle.

    Args:
        bundle: folder of the bundle. It is replaced when everything is compiled.
        options: see `CompileOptions`. Default: None, all defaults.
        progress: called with the name of each stage, a few words.

    Returns:
        The new bundle and its compiled programs.

    Raises:
        BundleError: the bundle is damaged or cannot be replaced, or a compiled file does not fit it.
        UsageError: no program of the bundle needs a compiler, or an option or interpreter does not exist.
        AudioError: the audio files are missing, too few, or unsuitable for calibration.
        MissingPackageError: an SDK is not installed. The work folder holds everything that the SDK needs.
        LoweringError: the compiler does not support this target or failed, or the model is too large.
        VerificationError: a program disagrees with its reference in the vendor's simulator, or in emulation
            on the CPU where there is no simulator. The bundle is unchanged.
    """
    options = options or CompileOptions()
    opened = Bundle.open(bundle)
    work = options.work or opened.folder.with_name(f"{opened.folder.resolve().name}.compile")
    groups = _groups(opened, options, work)
    for group in groups:
        _check_size(group, opened, options)
        _check_sdk(group)
    check_writable(opened.folder)
    if work.resolve().is_relative_to(opened.folder.resolve()):
        raise UsageError(
            f"the work folder {work} cannot be inside the bundle",
            why="the complete bundle is replaced",
            hint="omit `--work` to use a folder beside the bundle",
        )
    with _work_folder_lock(work):
        return _compiled_bundle(opened, groups, options, progress)


def _compiled_bundle(
    opened: Bundle, groups: Sequence[_Group], options: CompileOptions, progress: Progress
) -> Compiled:
    session = BundleSession(opened, RunOptions(threads=options.threads, trust=options.trust))
    plans = _prepared(session, groups, options, progress)
    if not any(plan.emulation and plan.job.name == ENCODER for plan in plans.values()):
        session.release()  # no features are decoded: leave the memory to the compilers
    _compile(groups, progress)
    progress("checking the compiled files")
    checks = {name: _checks(session, plan, progress) for name, plan in plans.items()}
    if not options.allow_unverified:
        _check_simulated(session, plans, checks)
    artifacts = {
        entry.spec.name: _artifact(group, entry, plans[entry.spec.name], checks[entry.spec.name])
        for group in groups
        for entry in group.entries
    }
    progress("writing the bundle")
    made = put_artifacts(opened, artifacts)
    if is_trusted(opened):  # the programs that are not compiled are copies of its own
        record_own(made.manifest)
    programs = tuple(
        _compiled(made, entry.spec.name, artifacts[entry.spec.name], group)
        for group in groups
        for entry in group.entries
    )
    return Compiled(bundle=made, programs=programs)


@contextmanager
def _work_folder_lock(work: Path) -> Iterator[None]:
    """Lock the work folder: two compilations in one folder would mix their calibration sets and stages."""
    work = Path(os.path.realpath(work))
    with ExitStack() as stack:
        try:
            work.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(locked(lock_path(work)))
            if lock and lock.is_exclusive:
                for folder in (work, *work.glob("*/"), *work.glob("*/*/")):
                    clear_temporaries(folder)
        except OSError as error:
            raise WhisperportError(
                f"cannot write to the work folder {work}",
                why=str(error),
                hint="choose another folder with `--work`",
            ) from error
        if lock is None:
            raise BundleError(
                f"another process is compiling in the work folder {work}",
                why=f"that process holds the lock {lock_path(work)}",
                hint="wait until that process ends, or choose another folder with `--work`",
            )
        yield


def _groups(opened: Bundle, options: CompileOptions, work: Path) -> list[_Group]:
    """Return the programs of each target that has a compiler."""
    found: dict[str, list[ProgramEntry]] = {}
    compilers: dict[str, Compiler] = {}
    for entry in opened.manifest.programs:
        compiler = get_target(entry.target).compiler
        if compiler is not None:
            compilers[entry.target] = compiler
            found.setdefault(entry.target, []).append(entry)
    if not found:
        raise UsageError(
            f"the bundle {opened.folder} has no programs to compile",
            why="none of its targets has a vendor's compiler",
            hint="`whisperport targets` lists the targets; choose one with `whisperport export --target`",
        )
    chosen = by_target(options.options, {name: one.options for name, one in compilers.items()})
    return [
        _Group(
            target=get_target(name),
            compiler=compilers[name],
            entries=tuple(entries),
            options=chosen[name],
            installed=compilers[name].installed(options.toolchains),
            work=work / name,
        )
        for name, entries in found.items()
    ]


def _check_size(group: _Group, opened: Bundle, options: CompileOptions) -> None:
    reason = group.target.too_large(opened.manifest.dims)
    if reason and not options.force:
        raise LoweringError(
            f"the model is too large for `{group.target.spec.name}`",
            why=reason,
            hint="`--force` compiles it anyway",
        )


def _check_sdk(group: _Group) -> None:
    """Raise an error early if the SDK does not support the target. A missing SDK is reported later."""
    if group.installed is None:
        return
    failure = probe(group.installed, group.compiler.script, group.compiler.settings())
    if failure is not None:
        raise _error(group, failure, prepared=False)


def _prepared(
    session: BundleSession, groups: Sequence[_Group], options: CompileOptions, progress: Progress
) -> dict[str, _Planned]:
    """Write everything that the compilers need to the work folders. Returns program -> its plan."""
    opened = session.bundle
    wanted = CalibrationOptions(source=options.calibration, force=options.force)
    requests = [
        request
        for group in groups
        for entry in group.entries
        for request in _calibration(group, entry, opened.manifest.dims)
    ]
    calibrated = calibration_sets(session, requests, _encoder_layout(opened), wanted, progress)
    plans: dict[str, _Planned] = {}
    for group in groups:
        copied: dict[Path, Path] = {}
        made = [
            _planned(session, group, entry, calibrated.get(entry.spec.name), copied, progress)
            for entry in group.entries
        ]
        jobs = [plan.job for plan in made]
        prepare(group.work, group.compiler.script, group.compiler.settings(), jobs)
        plans |= {plan.job.name: plan for plan in made}
    return plans


def _calibration(group: _Group, entry: ProgramEntry, dims: Dims) -> Iterator[CalibrationRequest]:
    """Make the work folder of a program, and yield its calibration set, if it needs one."""
    folder = group.work / entry.spec.name
    folder.mkdir(parents=True, exist_ok=True)
    compiler = group.compiler.in_precision(entry.precision)
    need = compiler.calibration(entry.spec, dims, group.options)
    if need is not None:
        yield CalibrationRequest(spec=entry.spec, need=need, folder=folder)


def _planned(
    session: BundleSession,
    group: _Group,
    entry: ProgramEntry,
    calibrated: CalibrationSet | None,
    copied: dict[Path, Path],
    progress: Progress,
) -> _Planned:
    folder, opened = group.work / entry.spec.name, session.bundle
    compiler = group.compiler.in_precision(entry.precision)
    emulator = compiler.emulation(entry.spec, group.options)
    emulation = None
    if emulator is not None:
        emulation = prepare_emulation(session, entry.spec, emulator, folder, progress)
    files = compiler.inputs(entry.files)
    for file in files:
        _copy_in(opened.path(file), folder / Path(file).name, copied)
    samples = calibrated.samples if calibrated else 0
    plan = compiler.plan(
        CompileRequest(
            spec=entry.spec,
            dims=opened.manifest.dims,
            options=group.options,
            folder=folder,
            files=tuple(Path(file).name for file in files),
            arrays=calibrated.arrays if calibrated else (),
            samples=samples,
            emulation=emulation.files if emulation else (),
        )
    )
    return _Planned(
        compiler=compiler,
        job=Job(name=entry.spec.name, stages=plan.stages, settings=plan.settings),
        artifact=folder / plan.artifact,
        keep=plan.keep,
        samples=samples,
        emulation=emulation,
    )


def _copy_in(source: Path, target: Path, copied: dict[Path, Path]) -> None:
    """Copy a file of the bundle into a program's folder.

    A file that several programs read, such as their weights, is stored once in the work folder, as hard
    links to the first copy. Where the file system has none, each program gets a copy.

    Args:
        copied: file of the bundle -> its first copy; extended.
    """
    target.unlink(missing_ok=True)
    first = copied.setdefault(source, target)
    if first != target:
        with suppress(OSError):
            os.link(first, target)
            return
    shutil.copyfile(source, target)


def _encoder_layout(opened: Bundle) -> Layout:
    """Return the layout that the encoder's compiler uses; the user's own spectrograms have this layout."""
    entry = opened.manifest.program(ENCODER)
    compiler = get_target(entry.target).compiler
    if compiler is None:
        return same_layout
    need = compiler.calibration(entry.spec, opened.manifest.dims, compiler.options())
    return need.layout if need is not None else same_layout


def _compile(groups: Sequence[_Group], progress: Progress) -> None:
    """Run the unfinished stages of every target whose SDK is installed; then report the missing SDKs."""
    missing = []
    for group in groups:
        if not has_unfinished_stages(group.work):
            progress(f"{group.target.spec.name}: all stages are already finished")
        elif group.installed is None:
            missing.append(group)
        elif failure := run_driver(group.installed, group.work, progress):
            raise _error(group, failure)
    for group in missing:
        raise _error(group, missing_sdk(group.compiler))


def _error(group: _Group, failure: Failure, *, prepared: bool = True) -> LoweringError:
    return compile_error(group.target, failure, group.work, group.installed, prepared=prepared)


def _checks(session: BundleSession, plan: _Planned, progress: Progress) -> tuple[Check, ...]:
    """Return the comparisons of what the vendor's emulator computed; none if it did not run."""
    if plan.emulation is None:
        return ()
    return emulation_checks(session, plan.emulation, plan.artifact.parent, progress)


def _artifact(
    group: _Group, entry: ProgramEntry, plan: _Planned, checks: tuple[Check, ...]
) -> Artifact:
    facts = dict(plan.compiler.check(plan.artifact, entry.spec))
    if plan.samples:
        facts["calibration_samples"] = plan.samples
    measured: dict[str, float] = {}
    for stage in plan.job.stages:
        log = _log(plan, stage.name)
        if log.is_file():
            text = log.read_text(encoding="utf-8", errors="replace")
            measured |= group.compiler.accuracy(stage.name, text)
    if measured:
        facts["snr_db"] = measured
    folder = plan.artifact.parent
    return Artifact(
        path=plan.artifact,
        suffix=group.compiler.suffix,
        facts=facts,
        compiler=group.compiler.title,
        machine=machine()
        if group.installed
        else {},  # without an SDK here: another, unknown machine
        beside=tuple(folder / file for file in plan.keep),
        emulation=plan.emulation.need.kind if plan.emulation else "emulated",
        checks=checks,
    )


def _check_simulated(
    session: BundleSession, plans: Mapping[str, _Planned], checks: Mapping[str, Sequence[Check]]
) -> None:
    """Raise an error if a program disagrees with its reference in the vendor's simulator or emulator.

    An emulator's results are only reported, as they are not those of the compiled file, unless its
    `EmulationNeed` says that they decide.
    """
    failures = [
        check
        for name, plan in plans.items()
        if plan.emulation is not None
        and (plan.emulation.need.kind == "simulated" or plan.emulation.need.decides)
        for check in checks[name]
        if not check.passed
    ]
    if failures:
        raise VerificationError(
            f"the compiled programs of {session.bundle.folder} disagree with their reference in the "
            "vendor's simulator or emulator, and were not written to the bundle",
            why=rejection(
                failures,
                session.reference,
                [session.bundle.manifest.program(name) for name in plans],
            ),
            hint="choose another precision, or another target for these programs, and export again; "
            "`--allow-unverified` writes them anyway, with the failed comparisons in their evidence",
        )


def _log(plan: _Planned, stage: str) -> Path:
    return plan.artifact.with_name(f"{stage}.log")


def _compiled(bundle: Bundle, name: str, artifact: Artifact, group: _Group) -> CompiledProgram:
    entry = bundle.manifest.program(name)
    return CompiledProgram(
        name=name,
        target=entry.target,
        file=entry.files[0],
        bytes=bundle.manifest.files[entry.files[0]].bytes,
        compiler=entry.facts.compiler,
        samples=entry.facts.calibration_samples,
        snr_db=entry.facts.snr_db,
        emulation=artifact.checks,
        notes=entry.facts.notes,
        logs=tuple(str(path) for path in sorted(artifact.path.parent.glob("*.log"))),
    )

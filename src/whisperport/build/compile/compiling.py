"""Compile programs: prepare the work folder, run the vendors' stages, collect the results.

    WORK/TARGET           the stages, and a script that runs them on another machine
    WORK/TARGET/PROGRAM   the files of one program: its calibration set, what the stages wrote, their logs

Finished stages are kept; a stage runs again only if its inputs changed. This module knows no vendor: a
target's `Compiler` describes what is specific, and the stages run in the Python interpreter that has the
vendor's SDK.

`compile_error` says of a compiler's failure what happened, why, and what to do next.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whisperport.build.calibration import CalibrationRequest, CalibrationSet
from whisperport.build.compile.artifacts import Artifact
from whisperport.build.compile.compile_options import CompileOptions
from whisperport.build.compile.emulating import Emulation, emulator_outputs
from whisperport.build.compile.work_folder import copy_in
from whisperport.errors import LoweringError, MissingPackageError, UsageError, VerificationError
from whisperport.program.bundle import ProgramEntry
from whisperport.program.checks import Check
from whisperport.program.dims import Dims
from whisperport.program.runner import Array
from whisperport.program.spec import ProgramSpec
from whisperport.system.progress import begin_stage
from whisperport.targets import Target, get_target
from whisperport.targets.compiler import Compiler, CompileRequest, EmulationNeed
from whisperport.targets.target_options import by_target
from whisperport.targets.toolchain import (
    Failure,
    Installed,
    Job,
    has_unfinished_stages,
    prepare,
    probe,
    run_driver,
    variable,
)
from whisperport.verification.machine import machine

Emulate = Callable[[ProgramSpec, EmulationNeed, Path], Emulation | None]
"""Writes inputs of a program to its work folder, with the expected outputs; None: there are no inputs."""

Compare = Callable[[Emulation, Sequence[Array | None]], tuple[Check, ...]]
"""Compares a program's outputs in the vendor's emulator with the expected ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The programs of one target that has a compiler."""

    target: Target
    compiler: Compiler
    entries: tuple[ProgramEntry, ...]
    dims: Dims  # of the model, as far as a compiler reads them
    options: Any
    installed: Installed | None  # None: the SDK is not on this machine
    work: Path

    def check_sdk(self) -> None:
        """Raise an error early if the SDK does not support the target. A missing SDK is reported later."""
        if self.installed is None:
            return
        failure = probe(self.installed, self.compiler.script, self.compiler.settings())
        if failure is not None:
            raise self.error(failure, prepared=False)

    def needs_samples(self) -> bool:
        """Whether a program is calibrated, or compared with what an emulator computes."""
        compilers = [(self.compiler.in_precision(entry.precision), entry) for entry in self.entries]
        return any(
            self.target.calibration(entry.spec, entry.precision)
            or compiler.calibration(entry.spec, self.dims, self.options)
            or compiler.emulation(entry.spec, self.options)
            for compiler, entry in compilers
        )

    def error(self, failure: Failure, *, prepared: bool = True) -> LoweringError:
        """Return the error for a failure of the compiler."""
        return compile_error(self.target, failure, self.work, self.installed, prepared=prepared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan for one program in its work folder."""

    group: Group
    entry: ProgramEntry
    compiler: Compiler  # in the program's precision
    job: Job
    artifact: Path
    keep: tuple[str, ...]
    notes: tuple[str, ...]
    samples: int
    emulation: Emulation | None


def groups_of(
    path: Path,
    entries: Sequence[ProgramEntry],
    dims: Dims,
    options: CompileOptions,
    work: Path,
) -> list[Group]:
    """Return the programs of each target that has a compiler.

    Raises:
        UsageError: there are none, or an option or interpreter does not exist.
    """
    entries_by_target: dict[str, list[ProgramEntry]] = {}
    compilers: dict[str, Compiler] = {}
    for entry in entries:
        compiler = get_target(entry.target).compiler
        if compiler is not None:
            compilers[entry.target] = compiler
            entries_by_target.setdefault(entry.target, []).append(entry)
    if not entries_by_target:
        raise UsageError(
            f"the bundle {path} has no programs to compile",
            why="none of its targets has a vendor's compiler",
            hint="`whisperport targets` lists the targets; choose one with `whisperport export --target`",
        )
    chosen = by_target(options.options, {name: tool.options for name, tool in compilers.items()})
    return [
        Group(
            target=get_target(name),
            compiler=compilers[name],
            entries=tuple(target_entries),
            dims=dims,
            options=chosen[name],
            installed=compilers[name].installed(options.toolchains),
            work=work / name,
        )
        for name, target_entries in entries_by_target.items()
    ]


def calibration_requests(groups: Sequence[Group]) -> list[CalibrationRequest]:
    """Make the work folder of each program, and return the calibration sets that the compilers need."""
    requests = []
    for group in groups:
        for entry in group.entries:
            folder = group.work / entry.spec.name
            folder.mkdir(parents=True, exist_ok=True)
            compiler = group.compiler.in_precision(entry.precision)
            need = compiler.calibration(entry.spec, group.dims, group.options)
            if need is not None:
                requests.append(CalibrationRequest(spec=entry.spec, need=need, folder=folder))
    return requests


def plan_programs(
    groups: Sequence[Group],
    sets: Mapping[str, CalibrationSet],
    file: Callable[[str], Path],
    emulate: Emulate,
) -> list[Planned]:
    """Write everything that the compilers need to the work folders. Returns the plans of all programs.

    Args:
        groups: the programs.
        sets: program -> its calibration set in its work folder.
        file: from the name of one of an entry's files to its path.
        emulate: see `Emulate`.
    """
    plans: list[Planned] = []
    for group in groups:
        copied: dict[Path, Path] = {}
        group_plans = [
            _planned(group, entry, sets.get(entry.spec.name), file, copied, emulate)
            for entry in group.entries
        ]
        jobs = [plan.job for plan in group_plans]
        prepare(group.work, group.compiler.script, group.compiler.settings(), jobs)
        plans += group_plans
    return plans


def compile_plans(
    path: Path,
    groups: Sequence[Group],
    plans: Sequence[Planned],
    compare: Compare,
    rejection: Callable[[Sequence[Check]], tuple[str, str]],
    *,
    allow_unverified: bool,
) -> dict[str, Artifact]:
    """Compile programs, and compare what their vendors' emulators compute.

    Args:
        path: the bundle or the file, for an error.
        groups: the programs.
        plans: their plans.
        compare: see `Compare`.
        rejection: from failed comparisons to why programs are rejected, and what to do, in words.
        allow_unverified: return also programs whose comparisons decide, and fail.

    Returns:
        Program -> its compiled file.

    Raises:
        LoweringError, VerificationError: see `compile`.
    """
    _run_compilers(groups)
    begin_stage("checking the compiled files")
    checks = {plan.job.name: _checks(plan, compare) for plan in plans}
    failures = [
        check
        for plan in plans
        if plan.emulation is not None and plan.emulation.decides
        for check in checks[plan.job.name]
        if not check.passed
    ]
    if failures and not allow_unverified:
        why, hint = rejection(failures)
        raise VerificationError(
            f"the compiled programs of {path} disagree with their reference in the "
            "vendor's simulator or emulator, and were not written",
            why=why,
            hint=f"{hint}; `--allow-unverified` writes them anyway, with the failed comparisons "
            "in their evidence",
        )
    return {plan.job.name: _artifact(plan, checks[plan.job.name]) for plan in plans}


def _planned(
    group: Group,
    entry: ProgramEntry,
    calibrated: CalibrationSet | None,
    file: Callable[[str], Path],
    copied: dict[Path, Path],
    emulate: Emulate,
) -> Planned:
    folder = group.work / entry.spec.name
    compiler = group.compiler.in_precision(entry.precision)
    emulator = compiler.emulation(entry.spec, group.options)
    emulation = None
    if emulator is not None:
        begin_stage(f"{entry.spec.name}: computing inputs for the vendor's emulator")
        emulation = emulate(entry.spec, emulator, folder)
    files = compiler.inputs(entry.files)
    for name in files:
        copy_in(file(name), folder / Path(name).name, copied)
    samples = calibrated.samples if calibrated else 0
    plan = compiler.plan(
        CompileRequest(
            spec=entry.spec,
            dims=group.dims,
            options=group.options,
            folder=folder,
            files=tuple(Path(name).name for name in files),
            arrays=calibrated.arrays if calibrated else (),
            samples=samples,
            emulation=emulation.files if emulation else (),
        )
    )
    return Planned(
        group=group,
        entry=entry,
        compiler=compiler,
        job=Job(name=entry.spec.name, stages=plan.stages, settings=plan.settings),
        artifact=folder / plan.artifact,
        keep=plan.keep,
        notes=plan.notes,
        samples=samples,
        emulation=emulation,
    )


def _run_compilers(groups: Sequence[Group]) -> None:
    """Run the unfinished stages of every target whose SDK is installed; then report the missing SDKs."""
    missing = []
    for group in groups:
        if not has_unfinished_stages(group.work):
            begin_stage(f"{group.target.spec.name}: all stages are already finished")
        elif group.installed is None:
            missing.append(group)
        elif failure := run_driver(group.installed, group.work):
            raise group.error(failure)
    for group in missing:
        raise group.error(missing_sdk(group.compiler))


def _checks(plan: Planned, compare: Compare) -> tuple[Check, ...]:
    """Return the comparisons of what the vendor's emulator computed; none if it did not run."""
    if plan.emulation is None:
        return ()
    begin_stage(f"{plan.job.name}: comparing the outputs of the vendor's emulator")
    return compare(plan.emulation, emulator_outputs(plan.emulation, plan.artifact.parent))


def _artifact(plan: Planned, checks: tuple[Check, ...]) -> Artifact:
    group, folder = plan.group, plan.artifact.parent
    facts = dict(plan.compiler.check(plan.artifact, plan.entry.spec))
    if plan.notes:
        facts["notes"] = [*plan.notes, *facts.get("notes", ())]
    if plan.samples:
        facts["calibration_samples"] = plan.samples
    measured: dict[str, float] = {}
    for stage in plan.job.stages:
        log = folder / f"{stage.name}.log"
        if log.is_file():
            text = log.read_text(encoding="utf-8", errors="replace")
            measured |= group.compiler.accuracy(stage.name, text)
    if measured:
        facts["snr_db"] = measured
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
        logs=tuple(sorted(folder.glob("*.log"))),
    )


def compile_error(
    target: Target,
    failure: Failure,
    work: Path,
    installed: Installed | None,
    *,
    prepared: bool = True,
) -> LoweringError:
    """Return the error for a failure of a target's compiler.

    Args:
        target: has a compiler.
        failure: what the toolchain reported.
        work: work folder of the target.
        installed: the SDK; None: it is not on this machine.
        prepared: the work folder holds what another machine needs.
    """
    compiler, name = target.compiler, target.spec.name
    assert compiler is not None
    path = "/path/to/sdk" if compiler.is_command else "/path/to/python"
    option = f"`--toolchain {compiler.toolchain}={path}`"
    if failure.kind == "missing" and not prepared:
        return MissingPackageError(
            f"{compiler.title} cannot be used",
            why=failure.message,
            hint=f"name {_owner(compiler)} that has it with {option} or the variable "
            f"{variable(compiler.toolchain)}; without both, `whisperport compile` prepares a folder for a "
            "machine that has it",
        )
    if failure.kind == "missing":
        return MissingPackageError(
            f"not compiled yet: {compiler.title} is not installed here",
            why=failure.message,
            hint=f"if {_owner(compiler)} on this machine has it, name it with {option} or the variable "
            f"{variable(compiler.toolchain)}. If not, copy {work}, which holds all inputs, to a "
            f"machine that has it ({compiler.source}), run `{_on_another_machine(compiler)}` there, copy "
            "the folder back, and repeat this command",
        )
    if failure.kind == "unsuitable":
        return LoweringError(
            f"the installed compiler does not support `{name}`",
            why=failure.message,
            hint=f"install {compiler.title} separately, and name {_owner(compiler)} with it: {option}",
        )
    log = f"the complete log is in {failure.log}" if failure.log else ""
    where = f"{failure.program}, {failure.stage}: " if failure.stage else ""
    if failure.kind == "died":
        return LoweringError(
            f"{compiler.title} ended without a result",
            why=where + failure.message,
            hint="; ".join(filter(None, (failure.hint, log)))
            or f"start `{installed and installed.path}` directly to see what fails",
        )
    happened, hint = compiler.explain(failure)
    return LoweringError(
        f"{compiler.title} {happened}",
        why=f"{where}{failure.classes[0]}: {failure.message}",
        hint="; ".join(filter(None, (hint, log))),
    )


def missing_sdk(compiler: Compiler) -> Failure:
    """Return the failure of a compiler whose SDK is not on this machine."""
    message = f"No module named '{compiler.sdk}'"
    if compiler.is_command:
        message = f"the program {compiler.sdk} is not in PATH"
    return Failure(kind="missing", message=message)


def _on_another_machine(compiler: Compiler) -> str:
    setting = f"{compiler.variables[0]}=/path/to/sdk " if compiler.variables else ""
    return f"{setting}python compile.py"


def _owner(compiler: Compiler) -> str:
    """Return what a toolchain's option names, in words."""
    return "a folder" if compiler.is_command else "another Python interpreter"

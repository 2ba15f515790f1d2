"""Compile a bundle's programs by vendors' own compilers: calibrate, compile in stages, put the result in.

Where a vendor's SDK can run the quantized program on the CPU, one stage does so, and its outputs are
compared with the program in float32.

    BUNDLE                    not touched until everything is compiled, then replaced as a whole
    BUNDLE.compile/TARGET     one work folder per target: calibration sets, stages and their logs, and a
                              script for another machine

What was done is kept, and done again only if what it was made from changed. No vendor is known here: a
target's `Compiler` says what is particular, and the stages run in the interpreter that has its SDK.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from whisperport.atomic import clear_temporaries
from whisperport.bundle import Bundle, Manifest, ProgramEntry, check_writable, writing_bundle
from whisperport.bundle.folder import file_sha256
from whisperport.bundle.origin import is_trusted, record_own
from whisperport.calibration import CalibrationOptions, calibration_set
from whisperport.checks import Check
from whisperport.emulating import Emulation, emulation_checks, prepare_emulation
from whisperport.errors import (
    BundleError,
    LoweringError,
    MissingPackageError,
    UsageError,
    WhisperportError,
)
from whisperport.evidence import Evidence, Kind, with_added
from whisperport.locking import lock_path, locked
from whisperport.progress import Progress
from whisperport.targets import RunOptions, Target, get_target
from whisperport.targets.compiler import Compiler, CompileRequest, Layout, same_layout
from whisperport.targets.options import by_target
from whisperport.toolchain import (
    Failure,
    Job,
    find_interpreter,
    has_unfinished_stages,
    prepare,
    probe,
    run_driver,
    variable,
)
from whisperport.verification.evidence import today
from whisperport.verification.machine import machine


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """How a bundle is compiled."""

    calibration: Path | None = None  # recordings, or an .npy; None: as before, or the package's own
    work: Path | None = None  # None: the bundle's name and `.compile`, beside it
    force: bool = False  # compile with too few recordings, with silence, or too large a model
    options: Mapping[str, str] = field(default_factory=dict)  # "TARGET.NAME" -> value
    toolchains: Mapping[str, str] = field(default_factory=dict)  # name -> interpreter with the SDK
    threads: int | None = None  # of the programs that compute a calibration set
    trust: bool = False  # load programs of unknown origin without a trial run under limits


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """One program that a vendor's compiler compiled."""

    name: str
    target: str
    file: str  # in the bundle
    bytes: int
    compiler: str  # its version, as the file says; "" where it does not
    samples: int  # of calibration; 0: none were needed
    snr_db: Mapping[str, float] = field(default_factory=dict)  # layer -> what the compiler measured
    emulation: tuple[Check, ...] = ()  # of the quantized program, as the vendor's emulator ran it
    logs: tuple[str, ...] = ()  # one per stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A bundle, compiled."""

    bundle: Bundle
    programs: tuple[CompiledProgram, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A compiled file that goes into a bundle."""

    path: Path
    suffix: str  # that it has in a bundle
    facts: Mapping[str, Any]  # JSON, for the manifest
    compiler: str = ""  # that made it; empty: who made it is not known
    machine: Mapping[str, Any] = field(default_factory=dict)  # JSON: where it was made, if known
    beside: tuple[Path, ...] = ()  # files that go in beside it
    emulation: Literal["emulated", "simulated"] = (
        "emulated"  # what the checks below are evidence of
    )
    checks: tuple[Check, ...] = ()  # of what the vendor's emulator computed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The programs of one target that has a compiler."""

    target: Target
    compiler: Compiler
    entries: tuple[ProgramEntry, ...]
    options: Any
    interpreter: Path | None  # None: the SDK is not on this machine
    work: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """One program in its work folder."""

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
    """Compile every program of a bundle whose target has a compiler of its own.

    Raises:
        BundleError: the bundle is damaged or cannot be replaced, or what was compiled does not fit it.
        UsageError: no program of it is to be compiled, or there is no such option or interpreter.
        AudioError: the recordings are missing, too few, or not fit to calibrate with.
        MissingPackageError: an SDK is not installed; the work folder holds all that it needs.
        LoweringError: a compiler does not serve this target, or failed; or the model is too large.
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
            f"the work folder {work} cannot be inside of the bundle",
            why="the bundle is replaced as a whole",
            hint="leave `--work` out: it is put beside the bundle",
        )
    with _only_user_of(work):
        return _compiled_bundle(opened, groups, options, progress)


def _compiled_bundle(
    opened: Bundle, groups: Sequence[_Group], options: CompileOptions, progress: Progress
) -> Compiled:
    planned = [_prepared(group, opened, options, progress) for group in groups]
    _compile(groups, progress)
    progress("checking the compiled files")
    artifacts = {
        entry.spec.name: _artifact(group, entry, plan, _checks(opened, plan, options, progress))
        for group, plans in zip(groups, planned, strict=True)
        for entry, plan in zip(group.entries, plans, strict=True)
    }
    progress("writing the bundle")
    made = put_artifacts(opened, artifacts)
    if is_trusted(opened):  # its other programs are copied
        record_own(made.manifest)
    programs = tuple(
        _compiled(made, entry.spec.name, artifacts[entry.spec.name], group)
        for group in groups
        for entry in group.entries
    )
    return Compiled(bundle=made, programs=programs)


@contextmanager
def _only_user_of(work: Path) -> Iterator[None]:
    """Two compilations that share a work folder would mix their calibration sets and stages."""
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
                hint="choose another one by `--work`",
            ) from error
        if lock is None:
            raise BundleError(
                f"another process is compiling in the work folder {work}",
                why=f"it holds the lock {lock_path(work)}",
                hint="wait until it ends, or choose another folder by `--work`",
            )
        yield


def put_artifacts(
    opened: Bundle, artifacts: Mapping[str, Artifact], *, out: Path | None = None
) -> Bundle:
    """The same bundle with an artifact first among the files of each program named, or no change at all.

    Evidence about files that are replaced is dropped.

    Args:
        out: where it is written; None: in place of the old one.
    """
    manifest = opened.manifest
    with writing_bundle(out or opened.folder) as writer:
        opened.check_unchanged()  # from here on, nobody else replaces it
        for relative in manifest.files:
            (writer.folder / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(opened.path(relative), writer.folder / relative)
        entries = []
        for entry in manifest.programs:
            artifact = artifacts.get(entry.spec.name)
            if artifact is not None:
                (writer.folder / entry.target).mkdir(exist_ok=True)
                for file, source in _sources(entry, artifact).items():
                    shutil.copyfile(source, writer.folder / file)
                entry = _with_artifact(entry, artifact, writer.folder)
            entries.append(entry)
        made = writer.preview(replace(manifest, programs=tuple(entries))).manifest
        return writer.commit(_without_stale_evidence(made))


def _with_artifact(entry: ProgramEntry, artifact: Artifact, folder: Path) -> ProgramEntry:
    first, *beside = _sources(entry, artifact)
    made = (first, *beside)
    evidence = entry.evidence
    if artifact.compiler:
        evidence = with_added(evidence, _evidence("compiled", artifact, folder, made))
    if artifact.checks:
        # Emulation does not run the compiled file, but what the file was made from.
        lowered = [file for file in entry.files if not file.endswith(artifact.suffix)]
        ran = made if artifact.emulation == "simulated" else dict.fromkeys((*lowered, *beside))
        evidence = with_added(evidence, _evidence(artifact.emulation, artifact, folder, ran))
    return replace(
        entry,
        files=tuple(dict.fromkeys((first, *entry.files, *beside))),
        delegation={**entry.delegation, **artifact.facts},
        evidence=evidence,
    )


def _evidence(kind: Kind, artifact: Artifact, folder: Path, files: Iterable[str]) -> Evidence:
    return Evidence(
        kind=kind,
        files={file: file_sha256(folder / file) for file in files},
        runtime={artifact.compiler: str(artifact.facts.get("compiler", ""))},
        machine=artifact.machine,
        date=today(),
        checks=() if kind == "compiled" else artifact.checks,
    )


def _without_stale_evidence(manifest: Manifest) -> Manifest:
    programs = (
        replace(entry, evidence=manifest.evidence(entry.spec.name)) for entry in manifest.programs
    )
    return replace(manifest, programs=tuple(programs))


def _sources(entry: ProgramEntry, artifact: Artifact) -> dict[str, Path]:
    """File in the bundle -> where it comes from, the artifact first; all are called after their program."""
    stem = f"{entry.target}/{entry.spec.name}"
    beside = {f"{stem}{path.suffix}": path for path in artifact.beside}
    return {f"{stem}{artifact.suffix}": artifact.path, **beside}


def _groups(opened: Bundle, options: CompileOptions, work: Path) -> list[_Group]:
    """One for each target of the bundle that has a compiler."""
    found: dict[str, list[ProgramEntry]] = {}
    compilers: dict[str, Compiler] = {}
    for entry in opened.manifest.programs:
        compiler = get_target(entry.target).compiler
        if compiler is not None:
            compilers[entry.target] = compiler
            found.setdefault(entry.target, []).append(entry)
    if not found:
        raise UsageError(
            f"nothing in {opened.folder} is left to compile",
            why="none of its targets has a compiler of its own",
            hint="`whisperport targets` lists the targets; `whisperport export` takes one as `--target`",
        )
    chosen = by_target(options.options, {name: one.options for name, one in compilers.items()})
    return [
        _Group(
            target=get_target(name),
            compiler=compilers[name],
            entries=tuple(entries),
            options=chosen[name],
            interpreter=find_interpreter(
                compilers[name].toolchain, compilers[name].sdk, options.toolchains
            ),
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
            hint="`--force` tries it anyway",
        )


def _check_sdk(group: _Group) -> None:
    """An SDK of another generation is found before hours of calibration; a missing one is no error yet."""
    if group.interpreter is None:
        return
    failure = probe(group.interpreter, group.compiler.script, group.compiler.settings())
    if failure is not None:
        raise _explained(group, failure)


def _prepared(
    group: _Group, opened: Bundle, options: CompileOptions, progress: Progress
) -> tuple[_Planned, ...]:
    """Put everything into the target's work folder that its compiler needs."""
    planned = tuple(_planned(group, entry, opened, options, progress) for entry in group.entries)
    jobs = [plan.job for plan in planned]
    prepare(group.work, group.compiler.script, group.compiler.settings(), jobs)
    return planned


def _planned(
    group: _Group, entry: ProgramEntry, opened: Bundle, options: CompileOptions, progress: Progress
) -> _Planned:
    folder, compiler, dims = group.work / entry.spec.name, group.compiler, opened.manifest.dims
    folder.mkdir(parents=True, exist_ok=True)
    run = _run_options(options)
    need = compiler.calibration(entry.spec, dims, group.options)
    arrays: tuple[str, ...] = ()
    samples = 0
    if need is not None:
        wanted = CalibrationOptions(source=options.calibration, force=options.force, run=run)
        layout = _encoder_layout(opened)
        made = calibration_set(opened, entry.spec, need, layout, folder, wanted, progress)
        arrays, samples = made.arrays, made.samples
    emulator = compiler.emulation(entry.spec, group.options)
    emulation = None
    if emulator is not None:
        emulation = prepare_emulation(opened, entry.spec, emulator, folder, run, progress)
    files = compiler.inputs(entry.files)
    for file in files:
        shutil.copyfile(opened.path(file), folder / Path(file).name)
    plan = compiler.plan(
        CompileRequest(
            spec=entry.spec,
            dims=dims,
            options=group.options,
            folder=folder,
            files=tuple(Path(file).name for file in files),
            arrays=arrays,
            samples=samples,
            emulation=emulation.files if emulation else (),
        )
    )
    return _Planned(
        job=Job(name=entry.spec.name, stages=plan.stages, settings=plan.settings),
        artifact=folder / plan.artifact,
        keep=plan.keep,
        samples=samples,
        emulation=emulation,
    )


def _run_options(options: CompileOptions) -> RunOptions:
    """Of the programs that compute calibration sets and expected outputs."""
    return RunOptions(threads=options.threads, trust=options.trust)


def _encoder_layout(opened: Bundle) -> Layout:
    """In which spectrograms made elsewhere are given: that of the encoder's compiler."""
    entry = opened.manifest.program("encoder")
    compiler = get_target(entry.target).compiler
    if compiler is None:
        return same_layout
    need = compiler.calibration(entry.spec, opened.manifest.dims, compiler.options())
    return need.layout if need is not None else same_layout


def _compile(groups: Sequence[_Group], progress: Progress) -> None:
    """Run what is left of every group whose SDK is here, and then complain of those that are not."""
    missing = []
    for group in groups:
        if not has_unfinished_stages(group.work):
            progress(f"{group.target.spec.name}: every stage was done before, and is kept")
        elif group.interpreter is None:
            missing.append(group)
        elif failure := run_driver(group.interpreter, group.work, progress):
            raise _explained(group, failure)
    for group in missing:
        raise _explained(
            group, Failure(kind="missing", message=f"No module named '{group.compiler.sdk}'")
        )


def _explained(group: _Group, failure: Failure) -> LoweringError:
    compiler, name = group.compiler, group.target.spec.name
    how = f"`--toolchain {compiler.toolchain}=/path/to/python`"
    if failure.kind == "missing":
        return MissingPackageError(
            f"not compiled yet: {compiler.title} is not installed here",
            why=failure.message,
            hint=f"if another interpreter on this machine has it, name that one: {how}, or "
            f"{variable(compiler.toolchain)}. If not, everything that it needs is in {group.work}: copy "
            f"that folder to a machine that has it ({compiler.source}), run `python compile.py` there, "
            "bring the folder back, and give this command again",
        )
    if failure.kind == "unsuitable":
        return LoweringError(
            f"the compiler that was found does not serve `{name}`",
            why=failure.message,
            hint=f"install {compiler.title} in an environment of its own, and name its interpreter: {how}",
        )
    log = f"the complete log is in {failure.log}" if failure.log else ""
    where = f"{failure.program}, {failure.stage}: " if failure.stage else ""
    if failure.kind == "died":
        return LoweringError(
            f"{compiler.title} ended without a result",
            why=where + failure.message,
            hint=log or f"run `{group.interpreter}` by itself to see what fails",
        )
    happened, hint = compiler.explain(failure)
    return LoweringError(
        f"{compiler.title} {happened}",
        why=f"{where}{failure.classes[0]}: {failure.message}",
        hint="; ".join(filter(None, (hint, log))),
    )


def _checks(
    opened: Bundle, plan: _Planned, options: CompileOptions, progress: Progress
) -> tuple[Check, ...]:
    """What the vendor's emulator computed, compared; nothing where it did not run."""
    if plan.emulation is None:
        return ()
    run = _run_options(options)
    return emulation_checks(opened, plan.emulation, plan.artifact.parent, run, progress)


def _artifact(
    group: _Group, entry: ProgramEntry, plan: _Planned, checks: tuple[Check, ...]
) -> Artifact:
    facts = dict(group.compiler.check(plan.artifact, entry.spec))
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
        machine=machine() if group.interpreter else {},  # else on another machine
        beside=tuple(folder / file for file in plan.keep),
        emulation=plan.emulation.need.kind if plan.emulation else "emulated",
        checks=checks,
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
        compiler=str(artifact.facts.get("compiler", "")),
        samples=int(artifact.facts.get("calibration_samples", 0)),
        snr_db=artifact.facts.get("snr_db", {}),
        emulation=artifact.checks,
        logs=tuple(str(path) for path in sorted(artifact.path.parent.glob("*.log"))),
    )

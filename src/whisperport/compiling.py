"""Compile a bundle's programs by a vendor's compiler: calibrate, compile in stages, put the result in.

    BUNDLE           not touched until all is compiled, then replaced whole
    BUNDLE.compile   the work folder: calibration, stages, and a script for another machine

What was done is kept, and done again only if what it was made from changed.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from whisperport.atomic import clear_temporaries, write_atomic
from whisperport.audio import FRAMES_PER_SECOND
from whisperport.bundle import Bundle, ProgramEntry, check_writable, writing_bundle
from whisperport.bundle.origin import is_trusted, record_own
from whisperport.errors import BundleError, LoweringError, UsageError, WhisperportError
from whisperport.generation import Generation
from whisperport.locking import lock_path, locked
from whisperport.runner import Array, Runner
from whisperport.runtime import load_engine, start_tokens
from whisperport.runtime.engine import FULL
from whisperport.runtime.without_cache import WithoutCache
from whisperport.spec import ProgramSpec, Status
from whisperport.targets import RunOptions, get_target
from whisperport.targets.hailo.calibration import (
    Sounds,
    check_enough,
    check_ready,
    encoder_samples,
    fingerprint,
    sound_files,
    write_set,
)
from whisperport.targets.hailo.chips import Chip
from whisperport.targets.hailo.compiler import Job, check_compiler, check_hef, prepare, run
from whisperport.targets.hailo.hef import Hef
from whisperport.targets.hailo.model_script import ScriptOptions, model_script, samples_needed
from whisperport.targets.hailo.target import Hailo
from whisperport.verification.clips import shipped_recordings
from whisperport.verification.reference import Reference

MADE_FROM = "calibration.json"  # in a program's folder: what its calibration set was made from

Say = Callable[[str], None]
Calibration = str | dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """How a bundle is compiled."""

    calibration: Path | None = (
        None  # recordings, or an .npy; None: what was used before, or shipped
    )
    work: Path | None = None  # None: the bundle's name and `.compile`, beside it
    force: bool = False  # compile with too few recordings, with silence, or too large a model
    script: ScriptOptions = field(default_factory=ScriptOptions)
    threads: int | None = None  # of what computes the decoder's calibration set
    trust: bool = False  # load programs of unknown origin without a trial run under limits


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """One program that the compiler took."""

    name: str
    target: str
    file: str  # in the bundle
    bytes: int
    compiler: str  # its version, as the file says; "" where it does not
    samples: int  # of calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A bundle, compiled."""

    bundle: Bundle
    programs: tuple[CompiledProgram, ...]


def compile_bundle(
    bundle: str | os.PathLike[str],
    options: CompileOptions | None = None,
    *,
    say: Say = lambda _: None,
) -> Compiled:
    """Compile every program of a bundle whose target has a compiler of its own.

    Raises:
        BundleError: the bundle is damaged or cannot be replaced, or what was compiled does not fit it.
        UsageError: no program of it wants compiling.
        AudioError: the recordings are missing, too few, or not fit to calibrate with.
        MissingPackageError: the compiler is not installed; the work folder holds all it needs.
        LoweringError: the compiler is of another generation, or refused; or the model is too large.
    """
    options = options or CompileOptions()
    opened = Bundle.open(bundle)
    chip, entries = _to_compile(opened)
    _check_size(chip, opened, options)
    check_compiler(chip)
    check_writable(opened.folder)
    work = options.work or opened.folder.with_name(f"{opened.folder.resolve().name}.compile")
    if work.resolve().is_relative_to(opened.folder.resolve()):
        raise UsageError(
            f"the work folder {work} cannot be inside of the bundle",
            why="the bundle is replaced as a whole",
            hint="leave `--work` out: it is put beside the bundle",
        )
    with _only_user_of(work):
        return _compile(opened, chip, entries, work, options, say)


def _compile(
    opened: Bundle,
    chip: Chip,
    entries: Sequence[ProgramEntry],
    work: Path,
    options: CompileOptions,
    say: Say,
) -> Compiled:
    jobs, samples = [], {}
    for entry in entries:
        job, samples[entry.spec.name] = _job(opened, chip, entry, work, options, say)
        jobs.append(job)
    prepare(work, chip, jobs)
    run(work, chip, say)
    say("checking what was compiled")
    hefs = {e.spec.name: work / e.spec.name / f"{e.spec.name}.hef" for e in entries}
    read = {e.spec.name: check_hef(hefs[e.spec.name], chip, e.spec) for e in entries}
    say("putting it into the bundle")
    scripts = {job.name: job.script for job in jobs}
    facts = {name: {"calibration_samples": n} for name, n in samples.items()}
    made = put_hefs(opened, hefs, read, "compiled here", scripts=scripts, facts=facts)
    if is_trusted(opened):  # its other programs are copied
        record_own(made.manifest)
    return Compiled(bundle=made, programs=_compiled(made, read, samples))


@contextmanager
def _only_user_of(work: Path) -> Iterator[None]:
    """Two compilations that share a work folder would mix their calibration sets and stages."""
    work = Path(os.path.realpath(work))
    with ExitStack() as stack:
        try:
            work.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(locked(lock_path(work)))
            if lock and lock.is_exclusive:
                for folder in [work, *(path for path in work.iterdir() if path.is_dir())]:
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


def put_hefs(
    opened: Bundle,
    hefs: Mapping[str, Path],
    read: Mapping[str, Hef],
    status: Status,
    *,
    scripts: Mapping[str, str] = MappingProxyType({}),
    facts: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    out: Path | None = None,
) -> Bundle:
    """The same bundle with a HEF first among the files of each program named, whole or not at all.

    Args:
        scripts: program -> the model script that the HEF was made by.
        facts: program -> what the manifest is to say of it, beside what the HEF does.
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
            name = entry.spec.name
            if name in hefs:
                entry = _with_hef(entry, read[name], status, facts.get(name, {}))
                shutil.copyfile(hefs[name], writer.folder / entry.files[0])
            if name in scripts:
                path = writer.folder / entry.target / f"{name}.alls"
                path.write_text(scripts[name], encoding="utf-8")
            entries.append(entry)
        return writer.commit(replace(manifest, programs=tuple(entries)))


def _with_hef(
    entry: ProgramEntry, hef: Hef, status: Status, facts: Mapping[str, Any]
) -> ProgramEntry:
    file = f"{entry.target}/{entry.spec.name}.hef"
    compiled = {"compiler": hef.compiler_version, "compiled_for": hef.chip, **facts}
    return replace(
        entry,
        files=(file, *(old for old in entry.files if old != file)),
        status=status,
        delegation={**entry.delegation, **compiled},
    )


def _to_compile(opened: Bundle) -> tuple[Chip, list[ProgramEntry]]:
    found: dict[str, list[ProgramEntry]] = {}
    for entry in opened.manifest.programs:
        if isinstance(get_target(entry.target), Hailo):
            found.setdefault(entry.target, []).append(entry)
    if len(found) != 1:
        raise UsageError(
            f"{opened.folder} has programs for {', '.join(found)}; one chip is compiled for at once"
            if found
            else f"nothing in {opened.folder} is left to compile",
            hint="whisperport export CHECKPOINT --target hailo8l --out BUNDLE",
        )
    ((name, entries),) = found.items()
    target = get_target(name)
    assert isinstance(target, Hailo)
    return target.chip, entries


def _check_size(chip: Chip, opened: Bundle, options: CompileOptions) -> None:
    reason = get_target(chip.name).too_large(opened.manifest.dims)
    if reason and not options.force:
        raise LoweringError(
            f"the model is too large for `{chip.name}`",
            why=reason,
            hint="`--force` tries it all the same",
        )


def _job(
    opened: Bundle,
    chip: Chip,
    entry: ProgramEntry,
    work: Path,
    options: CompileOptions,
    say: Say,
) -> tuple[Job, int]:
    """One program's part of the work folder, and how many samples it is calibrated with."""
    name, width = entry.spec.name, opened.manifest.dims.n_audio_state
    kind = FULL if name == FULL else "encoder"
    needed = samples_needed(width, options.script, program=kind)
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    calibration, count = _calibration(opened, entry.spec, folder, needed, options, say)
    script = model_script(chip.name, width, replace(options.script, samples=count), program=kind)
    onnx = next(file for file in entry.files if file.endswith(".onnx"))
    job = Job(name=name, onnx=opened.path(onnx), script=script, calibration=calibration)
    return job, count


def _calibration(
    opened: Bundle,
    spec: ProgramSpec,
    folder: Path,
    needed: int,
    options: CompileOptions,
    say: Say,
) -> tuple[Calibration, int]:
    """The set that is there, if it was made from the same; else a new one."""
    kept = _kept_set(folder, spec)
    if kept and options.calibration is None and (options.force or kept["samples"] >= needed):
        say(f"{spec.name}: the calibration set is kept")
        return kept["files"], kept["samples"]
    files = _recordings(options.calibration)
    made_from = {
        "sources": {os.fspath(f): [f.stat().st_size, f.stat().st_mtime_ns] for f in files},
        "spec": spec.to_json(),
        "bundle": opened.manifest.source,
        "needed": needed,
        "force": options.force,
    }
    if kept and kept["from"] == json.loads(json.dumps(made_from)):
        say(f"{spec.name}: the calibration set is kept")
        return kept["files"], kept["samples"]
    say(f"{spec.name}: making the calibration set")
    names, count = _new_set(opened, spec, folder, files, needed, options, say)
    noted = {"from": made_from, "files": names, "samples": count}
    write_atomic(folder / MADE_FROM, json.dumps(noted).encode("utf-8"))
    return names, count


def _new_set(
    opened: Bundle,
    spec: ProgramSpec,
    folder: Path,
    files: Sequence[Path],
    needed: int,
    options: CompileOptions,
    say: Say,
) -> tuple[Calibration, int]:
    encoder = opened.manifest.program("encoder").spec
    sounds = _sounds(opened, files, options)
    mels: Iterator[tuple[Array]]
    if files[0].suffix == ".npy":
        check_ready(files[0], encoder, needed, force=options.force)
        mels = _mels_of(files[0])
    else:
        mels = encoder_samples(sounds, encoder)
    samples = _decoder_samples(opened, mels, options) if spec.name == FULL else mels
    names, count = write_set(samples, spec, folder, needed, say)
    check_enough(spec, count, needed, sounds)
    return names, count


def _kept_set(folder: Path, spec: ProgramSpec) -> Any:
    """What is noted of the set in a folder; None if there is none, or a part, or of other shapes."""
    try:
        noted = json.loads((folder / MADE_FROM).read_text(encoding="utf-8"))
        names = noted["files"]
        files = [names] if isinstance(names, str) else list(names.values())
        fits = noted["from"]["spec"] == spec.to_json()
        return noted if fits and all((folder / file).is_file() for file in files) else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def _recordings(source: Path | None) -> list[Path]:
    if source is None:
        return [recording.path for recording in shipped_recordings()]
    return sound_files(source)


def _sounds(opened: Bundle, files: Sequence[Path], options: CompileOptions) -> Sounds:
    """Recordings cut as the transcriber cuts them, without those of the bundle's reference."""
    window, dims = opened.manifest.window, opened.manifest.dims
    frames = 2 * window.sound if window else dims.n_frames
    reference = Reference.from_arrays(opened.reference())
    return Sounds(
        files=files,
        seconds=frames / FRAMES_PER_SECOND,
        apart_from=frozenset(fingerprint(clip.samples) for clip in reference.clips),
        force=options.force,
    )


def _mels_of(array: Path) -> Iterator[tuple[Array]]:
    """Samples (1, n_mels, 1, 2T) of a set (N, 1, 2T, n_mels)."""
    for one in np.load(array, mmap_mode="r", allow_pickle=False):
        yield (one.transpose(2, 0, 1)[None],)


class _Recorder(Runner):
    """Keeps the last inputs of the runner that it stands before."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.spec)
        self._runner = runner
        self.inputs: list[Array] = []

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        self.inputs = [array.copy() for array in inputs]
        names = [tensor.name for tensor in self.spec.inputs]
        return list(self._runner.run(dict(zip(names, inputs, strict=True))).values())


def _decoder_samples(
    opened: Bundle, mels: Iterator[tuple[Array]], options: CompileOptions
) -> Iterator[list[Array]]:
    """Inputs of `decode_full` at the end of each window's greedy transcript."""
    recorders: list[_Recorder] = []

    def around(runner: Runner) -> Runner:
        if runner.spec.name != FULL:
            return runner
        recorders.append(_Recorder(runner))
        return recorders[-1]

    stand_ins: dict[str, str] = {}
    for entry in opened.manifest.programs:
        stand_ins |= get_target(entry.target).spec.stand_in
    run = RunOptions(threads=options.threads, options=stand_ins, trust=options.trust)
    engine = load_engine(opened, run, around)
    full = WithoutCache(recorders[0], opened.embedding(), opened.positions())
    for (mel,) in mels:
        full.listen(engine.encode(mel[0, :, 0, :]))
        _transcribe(full, opened.manifest.generation)
        yield recorders[0].inputs


def _transcribe(full: WithoutCache, generation: Generation) -> None:
    """Greedily, until the text ends or no row is left."""
    logits, _ = full.prefill(start_tokens(generation, generation.any_language, "transcribe"))
    while len(full.tokens) < full.rows:
        token = int(logits.argmax())
        if token == generation.end_of_text:
            return
        logits = full.step(token)


def _compiled(
    bundle: Bundle, read: Mapping[str, Hef], samples: Mapping[str, int]
) -> tuple[CompiledProgram, ...]:
    made = []
    for name, hef in read.items():
        entry = bundle.manifest.program(name)
        made.append(
            CompiledProgram(
                name=name,
                target=entry.target,
                file=entry.files[0],
                bytes=bundle.manifest.files[entry.files[0]].bytes,
                compiler=hef.compiler_version,
                samples=samples[name],
            )
        )
    return tuple(made)

"""Compile one lowered program in a file of its own; the result is written to another folder.

STEM-TARGET/
├── compiled.json    the program, its evidence with the comparisons, and what it was made from
├── STEM.SUFFIX      the compiled program
├── STEM.onnx        the lowered program that the compiler read, with the files that belong to it
└── STAGE.log        logs of the compiler's stages
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from whisperport.build.calibration import CalibrationSet
from whisperport.build.calibration.arrays import ArrayWriter, array_files
from whisperport.build.compile.artifacts import Artifact, put_artifact
from whisperport.build.compile.compile_options import CompileOptions
from whisperport.build.compile.compiled import Compiled, CompiledProgram
from whisperport.build.compile.compiling import (
    calibration_requests,
    compile_plans,
    groups_of,
    plan_programs,
)
from whisperport.build.compile.emulating import (
    Emulation,
    Examples,
    prepare_emulation,
    run_in_order,
)
from whisperport.build.compile.lowered_file import READERS, host_part, read_lowered
from whisperport.build.compile.work_folder import work_folder, work_of
from whisperport.build.export.placing import PlacementRequest, place
from whisperport.errors import AudioError, UsageError, WhisperportError
from whisperport.program.bundle import ProgramEntry
from whisperport.program.bundle.folder import file_sha256
from whisperport.program.bundle.staging import staging
from whisperport.program.bundle.writing import check_writable
from whisperport.program.checks import Check
from whisperport.program.dims import Dims
from whisperport.program.evidence import status_of
from whisperport.program.host_part import HostPart
from whisperport.program.json_records import to_json
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.system.atomic import rename_if_free
from whisperport.system.progress import begin_stage
from whisperport.targets import TARGETS, Target, get_target
from whisperport.targets.compiler import CalibrationNeed, EmulationNeed
from whisperport.targets.preflight import within_memory_of
from whisperport.verification.array_comparison import Comparison, Gate, compare_output
from whisperport.verification.recording.given_inputs import GivenInputs
from whisperport.verification.samples import mel_shape
from whisperport.verification.tolerances import limit_of

RESULT = "compiled.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """What is read of a program: its file, the target that compiles it, and the user's samples.

    Attributes:
        path: the file.
        entry: its signature; its files are beside `path`.
        target: the target.
        host: what the host computes.
        inputs: samples of its inputs; None: none is needed.
        options: see `CompileOptions`.
    """

    path: Path
    entry: ProgramEntry
    target: Target
    host: HostPart
    inputs: GivenInputs | None
    options: CompileOptions


def compile_file(path: Path, options: CompileOptions) -> Compiled:
    """Compile a program in a file. Samples of its inputs are given; the last of them are compared.

    If there are enough for both, none of those that are compared is a calibration sample. See `compile`.
    """
    _check_format(path, get_target(options.target))
    name = path.stem
    precisions = {name: options.precision} if options.precision else {}
    request = PlacementRequest(
        target=options.target, programs={name: options.target}, precisions=precisions
    )
    placed = place(request, [name])
    lowered, host = read_lowered(path, placed.placements[name]), host_part(path)
    out = options.out or path.with_name(f"{name}-{options.target}")
    work = work_of(out, options.work)
    groups = groups_of(path, (lowered,), _dims(_width(lowered.spec)), options, work)
    if os.path.lexists(out):
        raise _exists(out)
    check_writable(out)
    is_sampled = options.inputs or any(group.needs_samples() for group in groups)
    inputs = _inputs(path, lowered.spec, host, options) if is_sampled else None
    program = _Program(
        path=path,
        entry=lowered,
        target=placed.target_of(name),
        host=host,
        inputs=inputs,
        options=options,
    )
    for group in groups:
        group.check_sdk()
    with work_folder(work):
        entry, folder, samples = _quantized(program, work)
        sets = {entry.spec.name: CalibrationSet((), samples)}
        for calibration in calibration_requests(groups):
            samples = _write_samples(program, calibration.need, calibration.folder)
            sets[entry.spec.name] = CalibrationSet(array_files(calibration.need), samples)
        plans = plan_programs(groups, sets, folder.joinpath, partial(_emulate, program))
        artifacts = compile_plans(
            *(path, groups, plans),
            partial(_checks, entry),
            _rejection,
            allow_unverified=options.allow_unverified,
        )
        begin_stage(f"writing {out.name}")
        return _written(program, entry, folder, artifacts[entry.spec.name], out)


def _inputs(path: Path, spec: ProgramSpec, host: HostPart, options: CompileOptions) -> GivenInputs:
    """Find the samples, and check the first.

    Raises:
        ProgramError: there are none, or the first does not fit.
        UsageError: the user gave none.
    """
    if options.inputs is None:
        reads = ", ".join(
            f"{tensor.name} {tensor.dtype}{list(tensor.shape)}" for tensor in spec.inputs
        )
        raise UsageError(
            f"{path.name} cannot be compiled without samples of its inputs",
            why="they calibrate the program, and its outputs are compared on them; "
            f"its inputs are {reads}",
            hint="give a folder with `--inputs FOLDER`: a subfolder with an array NAME.npy for every "
            "input, or an .npz file, per sample; or audio files for an encoder",
        )
    inputs = GivenInputs.find(options.inputs, spec, host, force=options.force)
    next(inputs.read([0]))
    return inputs


def _quantized(program: _Program, work: Path) -> tuple[ProgramEntry, Path, int]:
    """Quantize a program whose target, and not its compiler, quantizes it.

    Returns:
        The entry, the folder of its files, and the number of samples that it was quantized with.
    """
    entry, target, source = program.entry, program.target, program.path.parent
    need = target.calibration(entry.spec, entry.precision)
    if need is None:
        return entry, source, 0
    folder = work / "quantized"
    folder.mkdir(parents=True, exist_ok=True)
    for file in entry.files:
        shutil.copyfile(source / file, folder / file)
    samples = _write_samples(program, need, folder)
    arrays = {
        tensor.name: folder / file
        for tensor, file in zip(entry.spec.inputs, array_files(need), strict=True)
    }
    return target.quantize(entry, folder, arrays), folder, samples


def _write_samples(program: _Program, need: CalibrationNeed, folder: Path) -> int:
    """Write the first samples as a calibration set. Returns their number."""
    assert program.inputs is not None
    count, options = len(program.inputs.files), program.options
    if count < need.samples and not options.force:
        hints = ["give more inputs", need.fewer_hint, "`--force` uses those that are given"]
        raise AudioError(
            f"too few inputs to calibrate `{program.entry.spec.name}`",
            why=f"{options.inputs} has {count} samples, and {need.samples} are needed",
            hint="; ".join(filter(None, hints)),
        )
    need = replace(need, samples=min(count, need.samples))
    writer = ArrayWriter(program.entry.spec, need, folder)
    writer.add(program.inputs.read(range(need.samples)))
    return writer.close()


def _emulate(
    program: _Program, spec: ProgramSpec, need: EmulationNeed, folder: Path
) -> Emulation | None:
    """Write the last samples to the program's work folder; see `prepare_emulation`."""
    inputs = program.inputs
    assert inputs is not None
    last = range(len(inputs.files))[-need.clips :]
    names = tuple(inputs.name(index) for index in last)
    examples = Examples(names=names, inputs=list(inputs.read(last)))
    run = lowered_run(program.path, program.entry, program.target, program.options)
    return prepare_emulation(spec, need, folder, examples, run)


def lowered_run(
    path: Path, entry: ProgramEntry, target: Target, options: CompileOptions
) -> Callable[[Sequence[Array]], list[Array]]:
    """Return a function that runs a lowered program in its runtime; it is loaded at the first call."""

    @cache
    def runner() -> Runner:
        run = options.run.with_emulation([target])
        return target.load(path.parent, [entry], run)[entry.spec.name]

    def run(inputs: Sequence[Array]) -> list[Array]:
        files = [path.with_name(file) for file in entry.files]
        with within_memory_of(*files, trust=options.trust):
            return run_in_order(runner(), inputs)

    return run


def _checks(
    entry: ProgramEntry, emulation: Emulation, outputs: Sequence[Array | None]
) -> tuple[Check, ...]:
    """Compare each output of the vendor's emulator on the sample where it is worst."""
    gate, checks = limit_of(entry.precision, None), []
    for tensor, actual, expected in zip(
        entry.spec.outputs, outputs, emulation.expected, strict=True
    ):
        sample, worst = _worst(tensor.name, emulation.examples.names, actual, expected, gate)
        what = f"{tensor.name}, {emulation.need.kind}, {sample}"
        checks.append(Check.of("arrays", entry.spec.name, what, worst))
    return tuple(checks)


def _rejection(failures: Sequence[Check]) -> tuple[str, str]:
    """Return, in words, why the program is rejected, and what to do."""
    why = "\n".join(f"{check.what}: {check.reason} ({check.rule})" for check in failures)
    return why, "choose another precision with `--precision`"


def _written(
    program: _Program, entry: ProgramEntry, source: Path, artifact: Artifact, out: Path
) -> Compiled:
    """Write the compiled program to its folder, completely or not at all.

    Args:
        program: what was compiled.
        entry: the entry that the compiler read, quantized if its target quantizes.
        source: folder of the entry's files.
        artifact: the compiled file.
        out: the folder.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with staging(out) as folders:
        folder = folders.partial
        folder.mkdir()
        for path in (*(source / file for file in entry.files), *artifact.logs):
            shutil.copyfile(path, folder / path.name)
        for name, content in program.host.files(program.path.stem).items():
            (folder / name).write_bytes(content)
        new_entry = put_artifact(entry, artifact, folder)
        (folder / RESULT).write_text(_description(program, new_entry), encoding="utf-8")
        if not rename_if_free(folder, out):
            raise _exists(out)
    logs = tuple(out / log.name for log in artifact.logs)
    compiled = CompiledProgram.of(out, new_entry, replace(artifact, logs=logs))
    return Compiled(folder=out, programs=(compiled,))


def _description(program: _Program, entry: ProgramEntry) -> str:
    """Return the program with its evidence and comparisons, and what it was made from, as JSON."""
    inputs, folder = program.inputs if program.options.inputs else None, program.path.parent
    described = {
        "program": to_json(entry),
        "status": status_of(entry.evidence),
        "made_from": {file: file_sha256(folder / file) for file in program.entry.files},
        "inputs": list(map(inputs.name, range(len(inputs.files)))) if inputs else [],
    }
    return json.dumps(described, indent=1, allow_nan=False) + "\n"


def _exists(out: Path) -> WhisperportError:
    return WhisperportError(
        f"{out} exists already, and was not changed",
        hint="delete it, or choose another folder with `--out`; finished stages are kept",
    )


def _check_format(file: Path, target: Target) -> None:
    """Check that a target has a compiler that reads files with this suffix."""
    name, suffix = target.spec.name, target.spec.lowering.lowered_suffix
    if target.compiler is None:
        compiled = [candidate.spec.name for candidate in TARGETS if candidate.compiler]
        raise UsageError(
            f"the target `{name}` has no compiler",
            why=f"`whisperport lower` writes the {suffix} file that its runtime loads",
            hint=f"targets with a compiler: {', '.join(compiled)}",
        )
    if file.suffix != suffix or suffix not in READERS:
        lowered = file.with_suffix(suffix).name
        raise UsageError(
            f"the compiler of `{name}` cannot read {file.name}",
            why=f"it reads {suffix} files",
            hint=f"lower the program: `whisperport lower PROGRAM.pt2 --target {name} --out {lowered}`",
        )


def _width(spec: ProgramSpec) -> int:
    """Return the width d of the features: of an encoder's output (1, T, d), or of a decoder's input."""
    tensors = spec.outputs if mel_shape(spec) else spec.inputs
    return max((tensor.shape[-1] for tensor in tensors if len(tensor.shape) == 3), default=1)


def _dims(width: int) -> Dims:
    """Return sizes with the width that a compiler's recipe depends on; a file does not state the others."""
    sizes = dict.fromkeys(Dims.__dataclass_fields__, 1)
    return Dims(**sizes | {"n_audio_state": width, "n_text_state": width})


def _worst(
    output: str, names: Sequence[str], actual: Array | None, expected: Array, gate: Gate
) -> tuple[str, Comparison]:
    """Compare an output, (samples, ...), sample by sample. Returns the worst with the sample's name."""
    if actual is None or actual.shape != expected.shape:
        return "all samples", compare_output(output, actual, expected, gate)
    if np.can_cast(actual.dtype, expected.dtype, "same_kind"):
        actual = actual.astype(expected.dtype)  # a device has its own widths of numbers
    compared = [compare_output(output, *pair, gate) for pair in zip(actual, expected, strict=True)]
    worst = min(range(len(names)), key=lambda i: (bool(compared[i]), compared[i].sqnr_db))
    return f"worst of {len(names)}: {names[worst]}", compared[worst]

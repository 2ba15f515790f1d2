"""One lowered program in a file of its own, to compile it; the result is written to another folder.

STEM-TARGET/
├── compiled.json    the program, its evidence with the comparisons, and what it was made from
├── STEM.SUFFIX      the compiled program
├── STEM.onnx        the lowered program that the compiler read, with the files that belong to it
└── STAGE.log        logs of the compiler's stages
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from whisperport.build.calibration import CalibrationRequest, CalibrationSet
from whisperport.build.calibration.arrays import ArrayWriter, array_files
from whisperport.build.compile.artifacts import Artifact, put_artifact
from whisperport.build.compile.lowered_file import READERS, host_part, read_lowered
from whisperport.build.compile.options import CompileOptions
from whisperport.build.compile.source import (
    Compiled,
    CompiledProgram,
    Emulation,
    Examples,
    Source,
    run_in_order,
)
from whisperport.build.export.placing import PlacementRequest, place
from whisperport.errors import AudioError, UsageError, WhisperportError
from whisperport.program.bundle import ProgramEntry, check_writable
from whisperport.program.bundle.folder import file_sha256
from whisperport.program.bundle.renaming import rename_if_free
from whisperport.program.bundle.staging import staging
from whisperport.program.checks import Check
from whisperport.program.dims import Dims
from whisperport.program.evidence import status_of
from whisperport.program.json_records import to_json
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.targets import TARGETS, Target, get_target
from whisperport.targets.compiler import CalibrationNeed
from whisperport.targets.preflight import within_memory_of
from whisperport.verification.compare import Comparison, Gate, compare_output
from whisperport.verification.recording.given_inputs import GivenInputs
from whisperport.verification.samples import mel_shape
from whisperport.verification.tolerances import limit_of

RESULT = "compiled.json"


class FileSource(Source):
    """A program in a file. Samples of its inputs are given; the last of them are compared.

    If there are enough for both, none of those that are compared is a calibration sample.
    """

    def __init__(self, path: Path, options: CompileOptions) -> None:
        """Read the program's signature.

        Raises:
            BundleError, MissingPackageError, ProgramError: see `read_lowered`.
            LoweringError, UsageError: the target does not exist, has no compiler, reads other files, or
                does not have the precision.
        """
        self.path, self._options = path, options
        _check_format(path, get_target(options.target))
        name = path.stem
        precisions = {name: options.precision} if options.precision else {}
        request = PlacementRequest(
            target=options.target, programs={name: options.target}, precisions=precisions
        )
        placed = place(request, [name])
        self._target, self._host = placed.target_of(name), host_part(path)
        self.entry = self._lowered = read_lowered(path, placed.placements[name])
        self.spec, self.entries = self.entry.spec, (self.entry,)
        self.dims = _dims(_width(self.spec))
        self.out = options.out or path.with_name(f"{name}-{options.target}")
        self._folder = self._read_from = path.parent
        self._quantized = 0  # number of samples that the target quantized it with

    @cached_property
    def inputs(self) -> GivenInputs:
        """The samples.

        Raises:
            ProgramError: there are none.
            UsageError: the user gave none.
        """
        if self._options.inputs is None:
            reads = ", ".join(
                f"{tensor.name} {tensor.dtype}{list(tensor.shape)}" for tensor in self.spec.inputs
            )
            raise UsageError(
                f"{self.path.name} cannot be compiled without samples of its inputs",
                why="they calibrate the program, and its outputs are compared on them; "
                f"its inputs are {reads}",
                hint="give a folder with `--inputs FOLDER`: a subfolder with an array NAME.npy for every "
                "input, or an .npz file, per sample; or audio files for an encoder",
            )
        return GivenInputs.find(
            self._options.inputs, self.spec, self._host, force=self._options.force
        )

    def check(self, *, samples: bool) -> None:
        if os.path.lexists(self.out):
            raise _exists(self.out)
        check_writable(self.out)
        if samples or self._options.inputs:
            next(self.inputs.read([0]))

    def quantize(self, work: Path) -> None:
        need = self._target.calibration(self.spec, self.entry.precision)
        if need is None:
            return
        folder = work / "quantized"
        folder.mkdir(parents=True, exist_ok=True)
        for file in self.entry.files:
            shutil.copyfile(self._folder / file, folder / file)
        self._quantized = self._write_samples(need, folder)
        arrays = {
            tensor.name: folder / file
            for tensor, file in zip(self.spec.inputs, array_files(need), strict=True)
        }
        self.entry = self._target.quantize(self.entry, folder, arrays)
        self.entries, self._read_from = (self.entry,), folder

    def file(self, name: str) -> Path:
        return self._read_from / name

    def calibrated(self, requests: Sequence[CalibrationRequest]) -> Mapping[str, CalibrationSet]:
        sets = {self.spec.name: CalibrationSet((), self._quantized)}
        for request in requests:
            samples = self._write_samples(request.need, request.folder)
            sets[request.spec.name] = CalibrationSet(array_files(request.need), samples)
        return sets

    def _write_samples(self, need: CalibrationNeed, folder: Path) -> int:
        """Write the first samples as a calibration set. Returns their number."""
        count = len(self.inputs.files)
        if count < need.samples and not self._options.force:
            hints = ["give more inputs", need.fewer_hint, "`--force` uses those that are given"]
            raise AudioError(
                f"too few inputs to calibrate `{self.spec.name}`",
                why=f"{self._options.inputs} has {count} samples, and {need.samples} are needed",
                hint="; ".join(filter(None, hints)),
            )
        need = replace(need, samples=min(count, need.samples))
        writer = ArrayWriter(self.spec, need, folder)
        writer.add(self.inputs.read(range(need.samples)))
        return writer.close()

    def examples(self, spec: ProgramSpec, clips: int) -> Examples:
        chosen = range(len(self.inputs.files))[-clips:]
        names = tuple(self.inputs.name(index) for index in chosen)
        return Examples(names=names, inputs=list(self.inputs.read(chosen)))

    def run(self, spec: ProgramSpec, inputs: Sequence[Array]) -> list[Array]:
        files = [self._folder / file for file in self._lowered.files]
        with within_memory_of(*files, trust=self._options.trust):
            return run_in_order(self._runner, inputs)

    @cached_property
    def _runner(self) -> Runner:
        run = self._options.run.with_emulation([self._target])
        return self._target.load(self._folder, [self._lowered], run)[self.spec.name]

    def compared(self, emulation: Emulation, outputs: Sequence[Array | None]) -> tuple[Check, ...]:
        gate, checks = limit_of(self.entry.precision, None), []
        for tensor, actual, expected in zip(
            self.spec.outputs, outputs, emulation.expected, strict=True
        ):
            sample, worst = _worst(tensor.name, emulation.examples.names, actual, expected, gate)
            what = f"{tensor.name}, {emulation.need.kind}, {sample}"
            checks.append(Check.of("arrays", self.spec.name, what, worst))
        return tuple(checks)

    def rejection(self, failures: Sequence[Check]) -> tuple[str, str]:
        why = "\n".join(f"{check.what}: {check.reason} ({check.rule})" for check in failures)
        return why, "choose another precision with `--precision`"

    def release(self, emulations: Sequence[Emulation]) -> None:
        self.__dict__.pop("_runner", None)

    def write(self, artifacts: Mapping[str, Artifact]) -> Compiled:
        artifact = artifacts[self.spec.name]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with staging(self.out) as folders:
            folder = folders.partial
            folder.mkdir()
            for path in (*map(self.file, self.entry.files), *artifact.logs):
                shutil.copyfile(path, folder / path.name)
            for name, content in self._host.files(self.path.stem).items():
                (folder / name).write_bytes(content)
            entry = put_artifact(self.entry, artifact, folder)
            (folder / RESULT).write_text(self._description(entry), encoding="utf-8")
            if not rename_if_free(folder, self.out):
                raise _exists(self.out)
        logs = tuple(self.out / log.name for log in artifact.logs)
        program = CompiledProgram.of(self.out, entry, replace(artifact, logs=logs))
        return Compiled(folder=self.out, programs=(program,))

    def _description(self, entry: ProgramEntry) -> str:
        """Return the program with its evidence and comparisons, and what it was made from, as JSON."""
        inputs = self.inputs if self._options.inputs else None
        described = {
            "program": to_json(entry),
            "status": status_of(entry.evidence),
            "made_from": {file: file_sha256(self._folder / file) for file in self._lowered.files},
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

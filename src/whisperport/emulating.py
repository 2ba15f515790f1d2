"""Compare what a vendor's emulator makes of a quantized program with the program in float32.

    clips of the bundle's reference ─► inputs of the program ─ the compiler's layout ─► arrays
                                        │                                                 │
                     the lowered program on the CPU, in float32           a stage of the vendor's SDK
                                        ▼                                                 ▼
                                expected outputs ───────── compared with ──────────── outputs

An encoder's outputs are also decoded by the bundle's own decoder, and judged by the words.
"""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from whisperport.atomic import write_atomic
from whisperport.bundle import Bundle
from whisperport.calibration.inputs import emulated, program_inputs
from whisperport.checks import Check
from whisperport.progress import Progress
from whisperport.runner import Array, Runner
from whisperport.runtime import Engine, load_engine
from whisperport.spec import ProgramSpec, TensorSpec
from whisperport.targets import RunOptions
from whisperport.targets.compiler import EmulationNeed
from whisperport.verification.bundle_check import reference_mel, words_of_features
from whisperport.verification.compare import compare
from whisperport.verification.precision import precisions
from whisperport.verification.reference import Reference
from whisperport.verification.tolerances import GATES, JUDGED_BY_WORDS

CLIPS = 2  # whose inputs a program besides the encoder is emulated with: several calls of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """The inputs of one program's emulation on disk, and what is expected of it."""

    spec: ProgramSpec
    need: EmulationNeed
    files: tuple[str, ...]  # of the inputs, in the program's folder
    clips: tuple[str, ...]  # names of the reference's clips that the inputs are of
    expected: tuple[Array, ...]  # (samples, ...) of every output, in float32


def prepare_emulation(
    bundle: Bundle,
    spec: ProgramSpec,
    need: EmulationNeed,
    folder: Path,
    run: RunOptions,
    progress: Progress,
) -> Emulation | None:
    """Write the inputs of a program for the reference's clips into its folder; None: there are no clips."""
    progress(f"{spec.name}: recording inputs for the vendor's emulator")
    clips = Reference.from_arrays(bundle.reference()).clips
    if spec.name != "encoder":  # of which every clip is decoded
        clips = clips[:CLIPS]
    mels = [reference_mel(bundle.manifest.dims, clip) for clip in clips]
    samples = list(program_inputs(bundle, spec, mels, run))
    if not samples:
        return None
    runner = _loaded(bundle, run)[1][spec.name]
    names = [tensor.name for tensor in spec.inputs]
    made = [list(runner.run(dict(zip(names, one, strict=True))).values()) for one in samples]
    files = tuple(f"{name}.npy" for name in need.inputs)
    for file, arrays in zip(files, zip(*samples, strict=True), strict=True):
        _write(folder / file, np.stack([need.layout(array) for array in arrays]))
    return Emulation(
        spec=spec,
        need=need,
        files=files,
        clips=tuple(clip.name for clip in clips),
        expected=tuple(np.stack(arrays) for arrays in zip(*made, strict=True)),
    )


def emulation_checks(
    bundle: Bundle, emulation: Emulation, folder: Path, run: RunOptions, progress: Progress
) -> tuple[Check, ...]:
    """Compare the outputs that the emulator wrote into the program's folder."""
    spec = emulation.spec
    progress(f"{spec.name}: comparing what the vendor's emulator computed")
    precision = precisions(bundle)[spec.name]
    outputs = [
        _read(folder / f"{name}.npy", tensor, len(expected))
        for name, tensor, expected in zip(
            emulation.need.outputs, spec.outputs, emulation.expected, strict=True
        )
    ]
    if spec.name != "encoder":
        return tuple(_output_checks(emulation, outputs, precision))
    features = outputs[0]
    checks = list(_clip_checks(emulation, features, precision))
    # Where a clip could not be compared, there is nothing to decode.
    if features is not None and all("worst_frame" in check.value for check in checks):
        decoder = _loaded(bundle, run)[0].decoder()
        checks += words_of_features(bundle, decoder, [*features[:, 0]], precision, progress)
    return tuple(checks)


def _clip_checks(emulation: Emulation, features: Array | None, precision: str) -> Iterator[Check]:
    """An encoder's features (N, 1, T, d), clip by clip and frame by frame."""
    gate = JUDGED_BY_WORDS.get(precision, GATES[precision])
    complete = emulation.expected[0]
    for index, clip in enumerate(emulation.clips):
        actual, expected = features, complete[index, 0]
        if features is not None and features.shape == complete.shape:
            actual = features[index, 0]
        compared = compare("features", actual, expected, gate, frame_axis=0)
        yield Check.of("arrays", emulation.spec.name, f"{clip}, emulated", compared)


def _output_checks(
    emulation: Emulation, outputs: list[Array | None], precision: str
) -> Iterator[Check]:
    """Every output of a program, of all samples together."""
    for tensor, actual, expected in zip(
        emulation.spec.outputs, outputs, emulation.expected, strict=True
    ):
        compared = compare(tensor.name, actual, expected, GATES[precision])
        yield Check.of("arrays", emulation.spec.name, f"{tensor.name}, emulated", compared)


def _read(path: Path, tensor: TensorSpec, samples: int) -> Array | None:
    """An output of all samples in the program's own shape; another number of values stays as it is."""
    try:
        array: Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):  # of another machine, perhaps
        return None
    if array.dtype.kind != "f":
        return array
    shape = (samples, *tensor.shape)
    found: Array = array.astype(np.float32)
    return found.reshape(shape) if found.size == np.prod(shape) else found


def _loaded(bundle: Bundle, run: RunOptions) -> tuple[Engine, Mapping[str, Runner]]:
    """The bundle's programs on the CPU, as an engine and by name."""
    runners: dict[str, Runner] = {}
    engine = load_engine(
        bundle, emulated(bundle, run), lambda runner: runners.setdefault(runner.spec.name, runner)
    )
    return engine, runners


def _write(path: Path, array: Array) -> None:
    """The same bytes for the same values, so that a finished stage is kept."""
    content = io.BytesIO()
    np.save(content, np.ascontiguousarray(array), allow_pickle=False)
    write_atomic(path, content.getvalue())

"""Compare the outputs of a vendor's emulator for a quantized program with those of the float32 program.

    clips of the bundle's reference ─► inputs of the program ─ the compiler's layout ─► arrays
                                        │                                                 │
                     the lowered program on the CPU, in float32           a stage of the vendor's SDK
                                        ▼                                                 ▼
                                expected outputs ───────── compared with ──────────── outputs

The outputs of an encoder are also decoded with the bundle's decoder, and the words are compared.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from whisperport.calibration import BundleSession
from whisperport.program.checks import Check
from whisperport.program.program_kind import ALIGN, ENCODER, PREFILL
from whisperport.program.runner import Array
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.system.atomic import write_atomic
from whisperport.system.npy_file import open_array
from whisperport.system.progress import Progress
from whisperport.targets.compiler import EmulationNeed
from whisperport.verification.bundle_check import check_decoded_features, reference_mel
from whisperport.verification.compare import Gate, compare
from whisperport.verification.precision import precisions
from whisperport.verification.reference import Reference
from whisperport.verification.tolerances import limit_of

CLIPS = (
    2  # clips that programs other than the encoder are emulated on; each clip gives several inputs
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """The files with the inputs of one program's emulation, and the expected outputs.

    Attributes:
        spec: signature of the program.
        need: what the vendor's emulator reads and writes.
        files: names of the input files in the program's folder.
        clips: names of the reference's clips that the inputs belong to.
        expected: (samples, ...) float32 for every output of the program.
        tokens: number of tokens of every sample; those after them are padding. Empty: there is none.
    """

    spec: ProgramSpec
    need: EmulationNeed
    files: tuple[str, ...]
    clips: tuple[str, ...]
    expected: tuple[Array, ...]
    tokens: tuple[int, ...] = ()


def prepare_emulation(
    session: BundleSession,
    spec: ProgramSpec,
    need: EmulationNeed,
    folder: Path,
    progress: Progress,
) -> Emulation | None:
    """Compute a program's inputs for the reference's clips, and write them to the program's folder.

    Returns:
        The inputs and the expected outputs; None if there are no inputs.
    """
    progress(f"{spec.name}: computing inputs for the vendor's emulator")
    clips = session.reference.clips
    if spec.kind.name != ENCODER:  # the encoder's outputs are decoded, and every clip counts
        clips = clips[:CLIPS]
    clips = clips[: need.clips or None]
    mels = [reference_mel(session.bundle.manifest.dims, clip) for clip in clips]
    samples = list(session.inputs(spec, mels))
    if not samples:
        return None
    runner = session.runners[spec.name]
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
        tokens=_tokens(spec, samples),
    )


def emulation_checks(
    session: BundleSession, emulation: Emulation, folder: Path, progress: Progress
) -> tuple[Check, ...]:
    """Compare the outputs that the emulator wrote to the program's folder with the expected outputs."""
    spec, reference = emulation.spec, session.reference
    progress(f"{spec.name}: comparing the outputs of the vendor's emulator")
    precision = precisions(session.bundle)[spec.name]
    outputs = [
        _read(folder / f"{name}.npy", tensor, len(expected))
        for name, tensor, expected in zip(
            emulation.need.outputs, spec.outputs, emulation.expected, strict=True
        )
    ]
    if spec.kind.name != ENCODER:
        gate = limit_of(precision, reference.loss(precision, "logits"))
        return tuple(_output_checks(emulation, outputs, gate))
    features = outputs[0]
    checks = list(_clip_checks(emulation, features, reference, precision))
    # If a clip could not be compared, its features cannot be decoded.
    if features is not None and all("worst_frame" in check.value for check in checks):
        checks += check_decoded_features(
            session.bundle, session.engine.decoder(), [*features[:, 0]], precision, progress
        )
    return tuple(checks)


def _clip_checks(
    emulation: Emulation, features: Array | None, reference: Reference, precision: str
) -> Iterator[Check]:
    """Compare an encoder's features, (clips, 1, T, d), clip by clip and frame by frame."""
    gate = limit_of(precision, reference.loss(precision, "features"), encoder=True)
    complete = emulation.expected[0]
    speech = {clip.name: clip.frames for clip in reference.clips}
    for index, clip in enumerate(emulation.clips):
        actual, expected = features, complete[index, 0]
        if features is not None and features.shape == complete.shape:
            actual = features[index, 0]
        compared = compare("features", actual, expected, gate, 0, speech[clip], {})
        yield Check.of("arrays", emulation.spec.name, f"{clip}, {emulation.need.kind}", compared)


def _output_checks(
    emulation: Emulation, outputs: list[Array | None], gate: Gate
) -> Iterator[Check]:
    """Compare every output of a program, all samples together, without the padding."""
    for tensor, actual, expected in zip(
        emulation.spec.outputs, outputs, emulation.expected, strict=True
    ):
        axis = _token_axis(tensor.name)
        if axis and emulation.tokens and actual is not None and actual.shape == expected.shape:
            actual = _without_padding(actual, axis, emulation.tokens)
            expected = _without_padding(expected, axis, emulation.tokens)
        compared = compare(tensor.name, actual, expected, gate)
        yield Check.of(
            "arrays", emulation.spec.name, f"{tensor.name}, {emulation.need.kind}", compared
        )


def _tokens(spec: ProgramSpec, samples: Sequence[Sequence[Array]]) -> tuple[int, ...]:
    """Return the number of tokens of every sample of a program that reads several tokens per run.

    The engine pads the embeddings x, (..., P, d), with zeros. What a program computes from them is not
    used, and it is not precise: the first layer norm divides by a variance of zero plus epsilon.
    """
    if spec.kind.name not in (PREFILL, ALIGN):
        return ()
    index = [tensor.name for tensor in spec.inputs].index("x")
    padded = (sample[index].reshape(-1, sample[index].shape[-1]).any(axis=-1) for sample in samples)
    return tuple(int(np.flatnonzero(rows)[-1]) + 1 if rows.any() else 0 for rows in padded)


def _token_axis(output: str) -> int:
    """Return the axis, from the end, that counts the tokens in an output; 0 if none does."""
    if output.startswith("new_k_"):
        return -1
    return -2 if output.startswith("new_v_") or output in ("rows", "scores") else 0


def _without_padding(array: Array, axis: int, tokens: Sequence[int]) -> Array:
    """Return a copy of (samples, ...) with zeros in place of what was computed from padding."""
    copy = np.moveaxis(array.copy(), axis, 1)
    for sample, count in zip(copy, tokens, strict=True):
        sample[count:] = 0
    return copy


def _read(path: Path, tensor: TensorSpec, samples: int) -> Array | None:
    """Read an output as (samples, ...) float32; None if the file cannot be read.

    An array with another number of values keeps its shape, so that the comparison fails.
    """
    try:
        array: Array = open_array(path)
    except ValueError:  # another machine may have written a damaged file
        return None
    if array.dtype.kind != "f":
        return array
    shape = (samples, *tensor.shape)
    found: Array = array.astype(np.float32)
    return found.reshape(shape) if found.size == np.prod(shape) else found


def _write(path: Path, array: Array) -> None:
    """Write an array. Equal values give equal bytes, so that a finished stage is not repeated."""
    content = io.BytesIO()
    np.save(content, np.ascontiguousarray(array), allow_pickle=False)
    write_atomic(path, content.getvalue())

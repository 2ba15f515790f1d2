"""Compare what a vendor's emulator computed from a bundle's clips with the lowered programs.

The outputs of an encoder are also decoded with the bundle's decoder, and the words are compared.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from whisperport.calibration import BundleSession
from whisperport.compilation.source import Emulation
from whisperport.program.checks import Check
from whisperport.program.program_kind import ALIGN, ENCODER, PREFILL
from whisperport.program.runner import Array
from whisperport.program.spec import ProgramSpec
from whisperport.system.progress import Progress
from whisperport.verification.bundle_check import check_decoded_features
from whisperport.verification.compare import Gate, compare
from whisperport.verification.precision import precisions
from whisperport.verification.reference import Reference
from whisperport.verification.tolerances import limit_of


def bundle_checks(
    session: BundleSession,
    emulation: Emulation,
    outputs: Sequence[Array | None],
    progress: Progress,
) -> tuple[Check, ...]:
    """Compare the outputs of an emulated program of a bundle with the expected ones; see `Emulation`."""
    spec, reference = emulation.spec, session.reference
    precision = precisions(session.bundle)[spec.name]
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
    for index, clip in enumerate(emulation.examples.names):
        actual, expected = features, complete[index, 0]
        if features is not None and features.shape == complete.shape:
            actual = features[index, 0]
        compared = compare("features", actual, expected, gate, 0, speech[clip], {})
        yield Check.of("arrays", emulation.spec.name, f"{clip}, {emulation.need.kind}", compared)


def _output_checks(
    emulation: Emulation, outputs: Sequence[Array | None], gate: Gate
) -> Iterator[Check]:
    """Compare every output of a program, all samples together, without the padding."""
    for tensor, actual, expected in zip(
        emulation.spec.outputs, outputs, emulation.expected, strict=True
    ):
        axis = _token_axis(tensor.name)
        if (
            axis
            and emulation.examples.tokens
            and actual is not None
            and actual.shape == expected.shape
        ):
            actual = _without_padding(actual, axis, emulation.examples.tokens)
            expected = _without_padding(expected, axis, emulation.examples.tokens)
        compared = compare(tensor.name, actual, expected, gate)
        yield Check.of(
            "arrays", emulation.spec.name, f"{tensor.name}, {emulation.need.kind}", compared
        )


def tokens_of(spec: ProgramSpec, samples: Sequence[Sequence[Array]]) -> tuple[int, ...]:
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

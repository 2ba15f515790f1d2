"""Compile the programs of a bundle; the compiled files are written into the bundle.

`bundle_checks` compares what a vendor's emulator computed from the bundle's clips with the lowered
programs. The outputs of an encoder are also decoded with the bundle's decoder, and the words are
compared.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from whisperport.build.calibration import CalibrationOptions, calibration_sets
from whisperport.build.compile.artifacts import Artifact, put_artifacts
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
from whisperport.build.compile.work_folder import work_folder, work_of
from whisperport.errors import LoweringError
from whisperport.program.bundle import Bundle
from whisperport.program.bundle.origin import is_trusted, record_own
from whisperport.program.bundle.writing import check_writable
from whisperport.program.checks import Check
from whisperport.program.program_kind import ALIGN, ENCODER, PREFILL
from whisperport.program.runner import Array
from whisperport.program.spec import ProgramSpec
from whisperport.runtime import Decoder
from whisperport.system.progress import begin_stage
from whisperport.targets import get_target
from whisperport.targets.compiler import EmulationNeed, Layout, same_layout
from whisperport.verification.array_comparison import Gate, compare
from whisperport.verification.bundle_check import check_decoded_features
from whisperport.verification.precision import precisions
from whisperport.verification.recording import BundleSession
from whisperport.verification.reference import Reference, reference_mel
from whisperport.verification.report import rejection
from whisperport.verification.tolerances import limit_of

CLIPS = (
    2  # clips that programs other than the encoder are emulated on; each clip gives several inputs
)


def compile_bundle(bundle: Bundle, options: CompileOptions) -> Compiled:
    """Compile the programs of a bundle. Their samples come from audio; see `compile`."""
    session, manifest = BundleSession(bundle, options.run), bundle.manifest
    work = work_of(bundle.folder, options.work)
    groups = groups_of(bundle.folder, manifest.programs, manifest.dims, options, work)
    _check_sizes(bundle, force=options.force)
    check_writable(Path(os.path.realpath(bundle.folder)))  # the bundle itself, also through a link
    for group in groups:
        group.check_sdk()
    with work_folder(work):
        calibration = CalibrationOptions(source=options.calibration, force=options.force)
        requests = calibration_requests(groups)
        sets = calibration_sets(session, requests, _encoder_layout(bundle), calibration)
        plans = plan_programs(groups, sets, bundle.path, partial(emulate, session))
        if not any(plan.emulation and plan.entry.spec.name == ENCODER for plan in plans):
            session.release()  # no features are decoded: leave the memory to the compilers
        artifacts = compile_plans(
            *(bundle.folder, groups, plans),
            partial(bundle_checks, session),
            partial(_rejection, session),
            allow_unverified=options.allow_unverified,
        )
        begin_stage(f"writing {bundle.folder.name}")
        return _written(bundle, artifacts)


def _check_sizes(bundle: Bundle, *, force: bool) -> None:
    """Check that the model is not too large for a target that compiles, before hours of work."""
    for name in dict.fromkeys(entry.target for entry in bundle.manifest.programs):
        target = get_target(name)
        reason = target.too_large(bundle.manifest.dims) if target.compiler else ""
        if reason and not force:
            raise LoweringError(
                f"the model is too large for `{name}`",
                why=reason,
                hint="`--force` compiles it anyway",
            )


def _encoder_layout(bundle: Bundle) -> Layout:
    """Return the layout of the encoder's compiler; the user's own spectrograms have this layout."""
    entry = bundle.manifest.program(ENCODER)
    compiler = get_target(entry.target).compiler
    if compiler is None:
        return same_layout
    need = compiler.calibration(entry.spec, bundle.manifest.dims, compiler.options())
    return need.layout if need is not None else same_layout


def emulate(
    session: BundleSession, spec: ProgramSpec, need: EmulationNeed, folder: Path
) -> Emulation | None:
    """Write inputs of a program of a bundle to its work folder; see `prepare_emulation`."""
    clips = session.reference.clips
    if spec.name != ENCODER:  # the encoder's outputs are decoded, and every clip counts
        clips = clips[:CLIPS]
    clips = clips[: need.clips or None]
    mels = [reference_mel(session.bundle.manifest.dims, clip) for clip in clips]
    inputs = list(session.inputs(spec, mels))
    names = tuple(clip.name for clip in clips)
    examples = Examples(names=names, inputs=inputs, tokens=tokens_of(spec, inputs))
    return prepare_emulation(
        *(spec, need, folder, examples),
        lambda sample: run_in_order(session.runners[spec.name], sample),
    )


def _rejection(session: BundleSession, failures: Sequence[Check]) -> tuple[str, str]:
    """Return, in words, why programs are rejected, and what to do."""
    programs = session.bundle.manifest.programs
    compiled = [entry for entry in programs if get_target(entry.target).compiler]
    hint = "choose another precision, or another target for these programs, and export again"
    return rejection(failures, session.reference, compiled), hint


def _written(bundle: Bundle, artifacts: Mapping[str, Artifact]) -> Compiled:
    """Write the compiled files into the bundle, completely or not at all."""
    new_bundle = put_artifacts(bundle, artifacts)
    if is_trusted(bundle):  # the programs that are not compiled are copies of its own
        record_own(new_bundle.manifest)
    programs = tuple(
        CompiledProgram.of(new_bundle.folder, new_bundle.manifest.program(name), artifact)
        for name, artifact in artifacts.items()
    )
    return Compiled(folder=new_bundle.folder, programs=programs, bundle=new_bundle)


def bundle_checks(
    session: BundleSession,
    emulation: Emulation,
    outputs: Sequence[Array | None],
) -> tuple[Check, ...]:
    """Compare the outputs of an emulated program of a bundle with the expected ones; see `Emulation`."""
    spec, reference = emulation.spec, session.reference
    precision = precisions(session.bundle)[spec.name]
    if spec.name != ENCODER:
        is_encoder = spec.kind.name == ENCODER
        loss = reference.loss(precision, "features" if is_encoder else "logits")
        gate = limit_of(precision, loss, encoder=is_encoder)
        return tuple(_output_checks(emulation, outputs, gate))
    features = outputs[0]
    checks = list(_clip_checks(emulation, features, reference, precision))
    # If a clip could not be compared, its features cannot be decoded.
    if features is not None and all("worst_frame" in check.value for check in checks):
        checks += check_decoded_features(
            session.bundle, Decoder(session.engine), [*features[:, 0]], precision
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

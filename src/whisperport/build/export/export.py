"""Export a checkpoint as a bundle: trace, rewrite, lower and verify the programs, then write the bundle."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from whisperport import targets
from whisperport.build.calibration import CalibrationOptions
from whisperport.build.export.lowering import grouped, lower_groups, traced_programs
from whisperport.build.export.masking import choose_masks
from whisperport.build.export.not_verified import not_verified
from whisperport.build.export.placing import Placed, PlacementRequest, place, target_name
from whisperport.build.export.quantizing import quantize_programs
from whisperport.errors import LoweringError, UsageError
from whisperport.program.bundle import (
    EMBEDDING,
    POSITIONS,
    REFERENCE,
    TOKENIZER,
    Bundle,
    BundleWriter,
    Manifest,
    writing_bundle,
)
from whisperport.program.bundle.origin import record_own
from whisperport.program.dims import Dims, published_dims
from whisperport.program.generation import Generation
from whisperport.program.program_kind import (
    COARSE_PROJECTION,
    ENCODER,
    UNCACHED_DECODER,
    VOCAB_PROJECTION,
)
from whisperport.program.spec import TargetSpec, UncachedForm
from whisperport.program.window import Window, WindowOptions
from whisperport.system.option import Option
from whisperport.system.process import return_freed_memory
from whisperport.system.progress import Progress, begin_stage
from whisperport.targets import RunOptions, Target, get_target
from whisperport.targets.preflight import check_fits, estimate_export, requires_torch
from whisperport.verification import machine, versions
from whisperport.verification.alignment_heads import find_alignment_heads
from whisperport.verification.bundle_check import verify
from whisperport.verification.clips import N_CLIPS, Clip, clips_in, shipped_clips
from whisperport.verification.evidence import with_evidence
from whisperport.verification.partitions import with_partitions
from whisperport.verification.recording import BundleSession
from whisperport.verification.reference import Reference

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from whisperport.model.checkpoint import Checkpoint
    from whisperport.model.network.whisper import Whisper

BUILD_PACKAGES = ("whisperport", "torch", "onnx", "onnxscript", "numpy")  # of every export

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of `export`.

    Args:
        window: length of the window and its padding. Default: the longest window known to compile for the
            encoder's target, or else the checkpoint's window.
        precision: precision of all programs on the given target, such as "fp16". Default: "", the target's
            default precision.
        precisions: program -> precision, for single programs; overrides `precision`. Default: none.
        options: lowering options of targets, "TARGET.NAME" -> value. Default: none.
        batch: number of texts that the program `step_B` decodes together: 2, 4, 8 or 16; 1: do not export
            this program. Default: None, the default of the target of `step`.
        clips: audio clips that the bundle is verified with. Default: None, the clips of the package.
        preflight: raise an error before the export starts if memory or disk space is too small, or if the
            checkpoint is too large for the target. Default: True.
        run: how the bundle's programs are run for verification; `run.threads` also sets torch's threads.
    """

    window: WindowOptions = field(default_factory=WindowOptions)
    placement: Annotated[
        Mapping[str, str],
        Option(
            "Run one program on another target, for example encoder=xnnpack; may be repeated. "
            "vocab_projection=TARGET makes the computation of the logits a program of its own. "
            "coarse_projection=onnxruntime computes the logits in 8 bits first, and in float32 only those "
            "of the tokens that can win: a step is faster, and the text is the same",
            metavar="PROGRAM=TARGET",
            default="the target of --target",
            flag="--placement",
        ),
    ] = field(default_factory=dict)
    precision: str = ""
    precisions: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    calibration: Annotated[
        Path | None,
        Option(
            "Folder of audio files that resemble what the device will record, or an .npy file of log-mel "
            "spectrograms (clips, mel bins, frames of one window), for targets that quantize to w8a8 or "
            "w8a16 during the export",
            metavar="PATH",
            exists=True,
            default="the few audio files that come with whisperport",
        ),
    ] = None
    batch: int | None = None
    uncached_decoder: Annotated[
        bool,
        Option(
            "Also export uncached_decoder, a decoder without KV cache. An error if the target cannot run "
            "it"
        ),
    ] = False
    clips: Sequence[Clip] | None = None
    allow_unverified: Annotated[
        bool,
        Option("Write the bundle even if its verification failed. It stays marked as unverified"),
    ] = False
    verify_with: Annotated[
        Path | None,
        Option(
            "Verify the bundle with the audio files in this folder: the first window of each. A file "
            "NAME.txt beside NAME.wav is its transcript, from which the word error rate is counted; "
            "without one, the words are those of the checkpoint in float32",
            metavar="DIR",
            exists=True,
            default="six clips that come with whisperport",
        ),
    ] = None
    language: Annotated[
        str | None,
        Option(
            "Language spoken in the audio files of `verify_with`, as a code or a name",
            metavar="LANG",
            default="en, or a language of the checkpoint if it knows no English",
        ),
    ] = None
    preflight: bool = True
    run: RunOptions = field(default_factory=RunOptions)


def export(
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    target: str,
    out: str | os.PathLike[str],
    options: ExportOptions | None = None,
    *,
    progress: Progress = begin_stage,
) -> Bundle:
    """Lower every program of a checkpoint, verify that the result still transcribes, and write a bundle.

    Args:
        checkpoint: a loaded checkpoint, or anything that `load_checkpoint` accepts.
        target: name of a target, as `whisperport targets` lists them. `options.placement` can name another
            target for single programs.
        out: folder of the bundle. A bundle that already exists there is replaced when the new one is
            complete.
        options: see `ExportOptions`. Default: None, all defaults.
        progress: called with the name of each stage, a few words.

    Returns:
        The bundle that was written.

    Raises:
        UsageError: the target, a program or an option does not exist, or the checkpoint cannot have this
            window.
        CheckpointError: the checkpoint is missing, unknown, damaged, or has unexpected shapes.
        MissingPackageError: torch or an exporter is not installed.
        LoweringError: a compiler rejects a program, or the checkpoint is too large for the target.
        WhisperportError: the machine has too little memory or disk space.
        BundleError: `out` cannot be written.
        VerificationError: the bundle disagrees with its reference; nothing was written.
    """
    options, out = options or ExportOptions(), Path(out)
    with requires_torch("export"):
        import torch
    placed = _placed(target, options)
    if isinstance(checkpoint, str | os.PathLike):
        options.window.check(published_dims(os.fspath(checkpoint)))
    if options.run.threads:
        torch.set_num_threads(options.run.threads)
    with writing_bundle(out) as writer:
        draft = _drafted(checkpoint, placed, options, writer.folder, progress)
        return_freed_memory()  # of torch, for the verification
        verified = _verified(draft, placed, options, writer, out, progress)
        progress("moving the bundle to its folder")
        bundle = writer.commit(verified)
    record_own(bundle.manifest)
    return bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """What is read of the user's: a checkpoint, and the forms in which its programs will be made."""

    checkpoint: "Checkpoint"
    window: Window | None
    uncached: UncachedForm | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Original:
    """The model in torch, and what it computes. `further` makes a reference of more clips; None: cannot."""

    model: "Whisper"
    generation: Generation
    reference: Reference
    further: Callable[[], Reference] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A bundle whose files are written and not verified; programs may still be in float32."""

    manifest: Manifest
    further: Callable[[], Reference] | None


def _drafted(
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    placed: Placed,
    options: ExportOptions,
    folder: Path,
    progress: Progress,
) -> _Draft:
    """Write the files of a bundle. Only this part needs torch, whose memory is free when it returns."""
    source = _read(checkpoint, placed, options, folder, progress)
    path = checkpoint if isinstance(checkpoint, str | os.PathLike) else None
    original = _original(source, path, placed, options, progress)
    manifest = _lowered(source, original, placed, folder, progress)
    original.model.unload()
    return _Draft(manifest=manifest, further=original.further)


def _read(
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    placed: Placed,
    options: ExportOptions,
    folder: Path,
    progress: Progress,
) -> _Source:
    """Read the checkpoint, and check before the work that it and the export fit."""
    read = loaded(checkpoint, progress)
    if options.preflight:
        _preflight(read.dims, list(placed.targets.values()), folder, progress)
    for warning in read.warnings:
        log.warning("%s", warning)
    known = _known_window(options.window, placed.target_of(ENCODER).spec, read.dims)
    uncached = _uncached_form(placed, read.dims) if options.uncached_decoder else None
    return _Source(checkpoint=read, window=known.of(read.dims), uncached=uncached)


def _original(
    source: _Source,
    path: "str | os.PathLike[str] | None",
    placed: Placed,
    options: ExportOptions,
    progress: Progress,
) -> _Original:
    """Build the model in torch, and run it on the clips that the bundle is verified with.

    Args:
        path: where the checkpoint can be read again; None: it was given loaded, and is not kept.
    """
    from whisperport.model.network.whisper import build_model
    from whisperport.verification.eager import run_eager

    checkpoint, window = source.checkpoint, source.window
    model = build_model(checkpoint, window)
    generation = with_alignment_heads(
        find_alignment_heads(checkpoint.generation, checkpoint.tokenizer_json, model, progress),
        checkpoint.dims,
    )
    # Those of targets with a program below float32; a rejection names the target's other precisions too.
    lower = {
        placement.target
        for placement in placed.placements.values()
        if placement.precision != "fp32"
    }
    precisions = {p for name in lower for p in placed.targets[name].spec.runs.precisions}
    reference = run_eager(
        model,
        generation,
        _clips(options, generation),
        uncached=source.uncached,
        precisions=precisions,
        progress=progress,
    )
    further = None
    if path is not None and options.clips is None and options.verify_with is None:
        further = partial(_further_reference, path, window, generation, progress)
    return _Original(model=model, generation=generation, reference=reference, further=further)


def _lowered(
    source: _Source, original: _Original, placed: Placed, folder: Path, progress: Progress
) -> Manifest:
    """Trace, rewrite and lower every program to the folder; write the tables and the reference."""
    checkpoint, model, reference = source.checkpoint, original.model, original.reference
    programs = traced_programs(model, original.generation, placed, source.uncached)
    entries, rewrites = lower_groups(grouped(programs, placed, progress), placed, folder, progress)
    masks = choose_masks([entry.spec for entry in entries], placed, model, reference)
    progress("writing the embedding, the tokenizer and the reference")
    (folder / TOKENIZER).write_bytes(checkpoint.tokenizer_json)
    np.save(folder / EMBEDDING, _table(checkpoint, "decoder.token_embedding.weight"))
    np.save(folder / POSITIONS, _table(checkpoint, "decoder.positional_embedding"))
    np.savez_compressed(folder / REFERENCE, allow_pickle=False, **reference.to_arrays())
    return Manifest(
        name=f"{checkpoint.source.name} on {', '.join(placed.targets)}",
        source=checkpoint.source.to_json(),
        dims=model.dims,
        window=source.window,
        generation=original.generation,
        programs=tuple(
            replace(entry, placement=replace(placed.placements[name], mask=masks[name]))
            for entry in entries
            for name in [entry.spec.name]
        ),
        rewrites=rewrites,
        versions=versions(build_packages(placed.targets)),
        machine=machine(),
    )


def _verified(
    draft: _Draft,
    placed: Placed,
    options: ExportOptions,
    writer: BundleWriter,
    out: Path,
    progress: Progress,
) -> Manifest:
    """Quantize what calibrated ranges are for, and verify the bundle; return its manifest with evidence."""
    run = replace(options.run.with_emulation(placed.targets.values()), trust=True)  # no trial run
    session = BundleSession(writer.preview(draft.manifest), run)
    calibration = CalibrationOptions(source=options.calibration)
    programs = quantize_programs(session, placed, calibration, progress)
    preview = writer.preview(replace(draft.manifest, programs=programs))
    report = verify(preview, run=run, progress=progress)
    if not report and not options.allow_unverified:
        raise not_verified(out, report, preview, run, draft.further, progress)
    manifest = with_evidence(preview.manifest, report, run.options)
    manifest = with_partitions(manifest, writer.folder, progress)
    return replace(manifest, verification=report.to_json())


def build_packages(names: Iterable[str]) -> list[str]:
    """Return the packages that write and run a bundle at its export.

    Args:
        names: of the bundle's targets. Their specs name the packages.
    """
    specs = [get_target(name).spec for name in names]
    installed = {
        extra: some for one in targets.TARGETS for extra, some in one.spec.software.packages.items()
    }
    packages = [
        package.name for spec in specs for package in installed.get(spec.software.extra, ())
    ]
    runtimes = [spec.software.emulation_runtime or spec.software.runtime for spec in specs]
    return list(dict.fromkeys((*BUILD_PACKAGES, *packages, *filter(None, runtimes))))


def with_alignment_heads(generation: Generation, dims: Dims) -> Generation:
    """Return `generation` with alignment heads; if it has none, all heads of the upper half of the layers.

    Source: the default of openai-whisper, whisper/model.py:262-269.
    """
    if generation.alignment_heads:
        return generation
    layers = range(dims.n_text_layer // 2, dims.n_text_layer)
    heads = [(layer, head) for layer in layers for head in range(dims.n_text_head)]
    return replace(generation, alignment_heads=tuple(heads))


def _placed(target: str, options: ExportOptions) -> Placed:
    from whisperport.model.trace.variants import program_names

    request = PlacementRequest(
        target=target,
        programs=options.placement,
        precision=options.precision,
        precisions=options.precisions,
        options=options.options,
    )
    request, batch = _with_batch(request, options.batch)
    names = [*program_names(), *batch]
    if options.uncached_decoder:
        names.append(UNCACHED_DECODER)
    if COARSE_PROJECTION in request.programs:  # float32 is needed too
        names.append(VOCAB_PROJECTION)
    return place(request, names, [VOCAB_PROJECTION, COARSE_PROJECTION])


def _with_batch(
    request: PlacementRequest, rows: int | None
) -> tuple[PlacementRequest, tuple[str, ...]]:
    """Place the program `step_B` as `step` is placed, unless the user places it.

    Args:
        request: the placement that the user asks for.
        rows: B; None: the default of the target of `step`.

    Returns:
        The request with the program, and its name; no name: the program is not exported.

    Raises:
        UsageError: there is no program for this number of texts.
    """
    from whisperport.model.trace.variants import BATCHES

    target = target_name("step", request)
    rows = get_target(target).spec.lowering.batch if rows is None else rows
    if rows == 1:
        return request, ()
    if rows not in BATCHES:
        raise UsageError(
            f"`batch` is {rows}",
            why=f"expected 1 or one of {', '.join(map(str, BATCHES))}",
            hint="choose one of these numbers of texts",
        )
    name = f"step_{rows}"
    precision = {name: request.precisions["step"]} if "step" in request.precisions else {}
    return replace(
        request,
        programs={name: target, **request.programs},
        precisions={**precision, **request.precisions},
    ), (name,)


def _clips(options: ExportOptions, generation: Generation) -> Sequence[Clip]:
    """Return the clips of the options, or those in its folder, or else the package's English clips.

    A checkpoint without English decodes the package's clips as one of its own languages.
    """
    if options.clips is not None:
        return options.clips
    if options.verify_with is not None:
        return clips_in(options.verify_with, options.language or generation.any_language)
    return [replace(clip, language=generation.any_language) for clip in shipped_clips()]


def _further_reference(
    given: "str | os.PathLike[str]",
    window: Window | None,
    generation: Generation,
    progress: Progress,
) -> Reference:
    """Read the checkpoint again, and return its reference of the shipped clips that `_clips` leaves out."""
    from whisperport.model.network.whisper import build_model
    from whisperport.verification.eager import run_eager

    language = generation.any_language
    clips = [replace(clip, language=language) for clip in shipped_clips(None)[N_CLIPS:]]
    model = build_model(loaded(given, progress), window)
    return run_eager(model, generation, clips, progress=progress)


def _preflight(dims: Dims, targets: Sequence[Target], out: Path, progress: Progress) -> None:
    for target in targets:
        if reason := target.too_large(dims):
            raise LoweringError(
                f"the checkpoint is too large for `{target.spec.name}`",
                why=reason,
                hint="use a smaller checkpoint; `--no-preflight` tries the export anyway",
            )
    needed = estimate_export(dims, {target.spec.name for target in targets})
    check_fits(needed, out)
    progress(f"building the model; the export needs {needed}")


def _known_window(asked: WindowOptions, spec: TargetSpec, dims: Dims) -> WindowOptions:
    """Return the requested window, or else the longest one known to compile; warn if they differ."""
    if not spec.runs.windows_s:
        return asked
    width = min(
        (w for w in spec.runs.windows_s if w >= dims.n_audio_state),
        default=max(spec.runs.windows_s),
    )
    known_s = spec.runs.windows_s[width]
    if asked.seconds is None:
        return replace(asked, seconds=min(known_s, dims.window_s))
    if asked.seconds != known_s:
        log.warning(
            "a window of %g s is not known to compile for %s; a window of %g s is, for models of width %d",
            *(asked.seconds, spec.name, known_s, width),
        )
    return asked


def loaded(checkpoint: "Checkpoint | str | os.PathLike[str]", progress: Progress) -> "Checkpoint":
    """Return a checkpoint; it is read if it is given by a name or path, see `load_checkpoint`."""
    if not isinstance(checkpoint, str | os.PathLike):
        return checkpoint
    from whisperport.model.checkpoint import load_checkpoint

    progress(f"reading {checkpoint}")
    source = checkpoint if isinstance(checkpoint, str) else Path(checkpoint)
    return load_checkpoint(source, progress=progress)


def _uncached_form(placed: Placed, dims: Dims) -> UncachedForm:
    target = placed.target_of(UNCACHED_DECODER)
    form = target.uncached_form(dims)
    if form is None:
        raise UsageError(
            f"`{target.spec.name}` does not run a decoder without KV cache",
            hint="omit `--uncached-decoder`, or place `uncached_decoder` on a target that runs it",
        )
    return form


def _table(checkpoint: "Checkpoint", name: str) -> NDArray[np.floating[Any]]:
    """Return a weight as an array: float16 if the checkpoint stores it in float16, else float32."""
    import torch

    weight = checkpoint.weights[name]
    array = (weight if weight.dtype == torch.float16 else weight.float()).numpy()
    return np.ascontiguousarray(array)

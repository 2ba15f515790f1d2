"""From a checkpoint to a bundle: trace, rewrite, lower, verify, and only then put it in place."""

import gc
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whisperport.bundle import (
    EMBEDDING,
    POSITIONS,
    REFERENCE,
    TOKENIZER,
    Bundle,
    Manifest,
    ProgramEntry,
    check_writable,
    writing_bundle,
)
from whisperport.bundle.origin import record_own
from whisperport.checks import UNCACHED_DECODER
from whisperport.dims import Dims
from whisperport.errors import LoweringError, MissingPackageError, UsageError, VerificationError
from whisperport.generation import Generation
from whisperport.placing import Placed, PlacementRequest, place
from whisperport.preflight import check_fits, estimate_export
from whisperport.progress import Progress
from whisperport.spec import TargetSpec, UncachedForm
from whisperport.targets import RunOptions, Target
from whisperport.targets.options import with_target
from whisperport.verification import Report, machine, versions
from whisperport.verification.alignment_heads import find_alignment_heads
from whisperport.verification.bundle_check import verify
from whisperport.verification.clips import Clip, shipped_clips
from whisperport.verification.evidence import with_evidence
from whisperport.window import WindowOptions

if TYPE_CHECKING:  # boards have no torch
    from whisperport.checkpoint import Checkpoint
    from whisperport.programs.program import Program

BUILD_PACKAGES = (
    "whisperport",
    "torch",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "executorch",
    "numpy",
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How a bundle is made."""

    window: WindowOptions = field(default_factory=WindowOptions)  # shorter than the checkpoint's
    placement: Mapping[str, str] = field(default_factory=dict)  # program -> target, where another
    precision: str = ""  # of the programs on the target named; empty: its default
    precisions: Mapping[str, str] = field(default_factory=dict)  # program -> precision
    options: Mapping[str, str] = field(default_factory=dict)  # "TARGET.NAME" -> value
    uncached_decoder: bool = False  # export `uncached_decoder` too, where the target can run it
    clips: Sequence[Clip] | None = None  # recordings to verify with; None: those of the package
    allow_unverified: bool = False  # write the bundle although it failed, permanently marked so
    preflight: bool = True  # refuse at once what memory or disk have no room for
    run: RunOptions = field(default_factory=RunOptions)  # also the threads of torch


def export(
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    target: str,
    out: str | os.PathLike[str],
    options: ExportOptions | None = None,
    *,
    progress: Progress = lambda _: None,
) -> Bundle:
    """Lower every program of a checkpoint, prove that the result still transcribes, and write it.

    Args:
        checkpoint: a loaded one, or what `load_checkpoint` takes.
        target: a name from `TARGETS`; `options.placement` names another for single programs.
        out: the bundle's folder. A bundle already there stays whole until the new one is complete.
        progress: told what is being done, in a few words.

    Raises:
        UsageError: no such target, program or option, or no such window for this checkpoint.
        CheckpointError: see there.
        LoweringError: a compiler refused, or would refuse a checkpoint of this size.
        WhisperportError: this machine is too small.
        BundleError: `out` cannot be written.
        VerificationError: the bundle disagrees with its reference; nothing was written.
    """
    options, out = options or ExportOptions(), Path(out)
    _check_torch()
    placed = _placed(target, options)
    check_writable(out)
    checkpoint = _load(checkpoint, progress)
    if options.preflight:
        _preflight(checkpoint.dims, list(placed.targets.values()), out, progress)
    uncached = _uncached_form(placed, checkpoint.dims) if options.uncached_decoder else None
    encoder = placed.target_of("encoder").spec
    window = _known_window(options.window, encoder, checkpoint.dims).of(checkpoint.dims)
    for warning in checkpoint.warnings:
        log.warning("%s", warning)

    import torch

    from whisperport.model.whisper import build_model
    from whisperport.verification.eager import run_eager

    if options.run.threads:
        torch.set_num_threads(options.run.threads)
    model = build_model(checkpoint, window)
    generation = with_alignment_heads(
        find_alignment_heads(checkpoint.generation, checkpoint.tokenizer_json, model, progress),
        checkpoint.dims,
    )
    clips = _clips(options, generation)
    progress(f"running the model in torch on {len(clips)} clips")
    reference = run_eager(model, generation, clips, uncached=uncached)

    with writing_bundle(out) as writer:
        programs = _programs(model, generation, placed, uncached)
        entries, rewrites = _lower(_grouped(programs, placed, progress), writer.folder, progress)
        progress("writing the embedding, the tokenizer and the reference")
        (writer.folder / TOKENIZER).write_bytes(checkpoint.tokenizer_json)
        np.save(writer.folder / EMBEDDING, _table(checkpoint, "decoder.token_embedding.weight"))
        np.save(writer.folder / POSITIONS, _table(checkpoint, "decoder.positional_embedding"))
        np.savez_compressed(writer.folder / REFERENCE, allow_pickle=False, **reference.to_arrays())
        manifest = Manifest(
            name=f"{checkpoint.source.name} on {', '.join(placed.targets)}",
            source=checkpoint.source.to_json(),
            dims=model.dims,
            window=window,
            generation=generation,
            programs=tuple(
                replace(entry, placement=placed.placements[entry.spec.name]) for entry in entries
            ),
            rewrites=rewrites,
            versions=versions(BUILD_PACKAGES),
            machine=machine(),
        )
        model.unload()  # verifying needs memory of its own
        del model, programs, checkpoint
        gc.collect()  # graphs refer to themselves
        run = _emulated(options.run, placed)
        preview = writer.preview(manifest)
        report = verify(preview, run=run, progress=progress)
        if not report and not options.allow_unverified:
            raise _not_verified(out, report)
        progress("putting the bundle in its place")
        manifest = with_evidence(preview.manifest, report, run.options)
        bundle = writer.commit(replace(manifest, verification=report.to_json()))
    record_own(bundle.manifest)
    return bundle


def with_alignment_heads(generation: Generation, dims: Dims) -> Generation:
    """The alignment heads, or where there are none all heads of the upper half.

    Source: the latter is openai-whisper's default, whisper/model.py:262-269.
    """
    if generation.alignment_heads:
        return generation
    layers = range(dims.n_text_layer // 2, dims.n_text_layer)
    heads = [(layer, head) for layer in layers for head in range(dims.n_text_head)]
    return replace(generation, alignment_heads=tuple(heads))


def _placed(target: str, options: ExportOptions) -> Placed:
    from whisperport.programs.variants import program_names

    request = PlacementRequest(
        target=target,
        programs=options.placement,
        precision=options.precision,
        precisions=options.precisions,
        options=options.options,
    )
    return place(request, (*program_names(), *[UNCACHED_DECODER] * options.uncached_decoder))


def _clips(options: ExportOptions, generation: Generation) -> Sequence[Clip]:
    """Those asked for, or the package's: English, decoded as another language where that is unknown."""
    if options.clips is not None:
        return options.clips
    return [replace(clip, language=generation.any_language) for clip in shipped_clips()]


def _preflight(dims: Dims, targets: Sequence[Target], out: Path, progress: Progress) -> None:
    for target in targets:
        if reason := target.too_large(dims):
            raise LoweringError(
                f"the checkpoint is too large for `{target.spec.name}`",
                why=reason,
                hint="take a smaller one; `--no-preflight` tries it all the same",
            )
    needed = estimate_export(dims, {target.spec.name for target in targets})
    check_fits(needed, out)
    progress(f"building the model; the export will take {needed}")


def _known_window(asked: WindowOptions, spec: TargetSpec, dims: Dims) -> WindowOptions:
    """The window that is known to compile, unless another is asked for, which is warned of."""
    if not spec.windows_s:
        return asked
    width = min((w for w in spec.windows_s if w >= dims.n_audio_state), default=max(spec.windows_s))
    known_s = spec.windows_s[width]
    if asked.seconds is None:
        return replace(asked, seconds=min(known_s, dims.window_s))
    if asked.seconds != known_s:
        log.warning(
            "a window of %g s is not known to compile for %s; %g s is, at width %d",
            *(asked.seconds, spec.name, known_s, width),
        )
    return asked


def _emulated(run: RunOptions, placed: Placed) -> RunOptions:
    """Run options for verifying: with emulation of every target that can be emulated, and no trial run."""
    emulation: dict[str, str] = {}
    for name, target in placed.targets.items():
        emulation |= with_target(target.spec.emulation, name)
    return replace(run, options={**emulation, **run.options}, trust=True)


def _check_torch() -> None:
    try:
        import torch  # noqa: F401  # everything on the build side needs it
    except ImportError as error:
        raise MissingPackageError(
            "cannot export: torch and its exporters are not installed",
            why=str(error),
            hint='pip install "whisperport[export]"',
        ) from error


def _load(checkpoint: "Checkpoint | str | os.PathLike[str]", progress: Progress) -> "Checkpoint":
    if not isinstance(checkpoint, str | os.PathLike):
        return checkpoint
    from whisperport.checkpoint import load_checkpoint

    progress(f"reading {checkpoint}")
    return load_checkpoint(checkpoint if isinstance(checkpoint, str) else Path(checkpoint))


def _programs(
    model: Any, generation: Generation, placed: Placed, uncached: UncachedForm | None
) -> Iterator["Program"]:
    """Every program, in the variant that its target chooses."""
    from whisperport.programs.variants import whisper_programs
    from whisperport.programs.whisper import Parts

    chosen = {name: placed.target_of(name).spec.variants for name in placed.placements}
    variants = {name: of[name] for name, of in chosen.items() if name in of}
    parts = Parts(model, generation.alignment_heads, uncached)
    yield from whisper_programs(parts, tuple(placed.placements), variants)


def _uncached_form(placed: Placed, dims: Dims) -> UncachedForm:
    target = placed.target_of(UNCACHED_DECODER)
    form = target.uncached_form(dims)
    if form is None:
        raise UsageError(
            f"`{target.spec.name}` does not run a decoder without KV cache",
            hint="leave out `--uncached-decoder`",
        )
    return form


def _grouped(
    programs: Iterable["Program"], placed: Placed, progress: Progress
) -> list[tuple[Target, list["Program"]]]:
    """The programs of each target."""
    groups: dict[str, list[Program]] = {}
    for program in programs:
        progress(f"traced {program.name}")
        groups.setdefault(placed.placements[program.name].target, []).append(program)
    return [(placed.targets[name], group) for name, group in groups.items()]


def _lower(
    placed: list[tuple[Target, list["Program"]]], folder: Path, progress: Progress
) -> tuple[list[ProgramEntry], dict[str, Any]]:
    """Rewrite and lower each group; returns the manifest's entries and what each rewrite did."""
    from whisperport.rewrites import run_rewrites

    entries: list[ProgramEntry] = []
    rewrites: dict[str, Any] = {}
    for target, programs in placed:
        rewritten = []
        for program in programs:
            progress(f"rewriting {program.name} for {target.spec.name}")
            program, outcomes = run_rewrites(program, target.spec.rewrites)
            rewritten.append(program)
            rewrites[program.name] = [asdict(outcome) for outcome in outcomes]
        entries += target.lower(rewritten, folder, progress)
    return entries, rewrites


def _table(checkpoint: "Checkpoint", name: str) -> NDArray[np.floating[Any]]:
    """A weight as the host looks it up: float16 where the checkpoint has it so, else float32."""
    import torch

    weight = checkpoint.weights[name]
    kept = weight if weight.dtype == torch.float16 else weight.float()
    return np.ascontiguousarray(kept.numpy())


def _not_verified(out: Path, report: Report) -> VerificationError:
    failures = report.failures()
    more = f" (and {len(failures) - 3} more)" if len(failures) > 3 else ""
    return VerificationError(
        f"the bundle for {out} does not agree with its checkpoint, and was not written",
        why="; ".join(failures[:3]) + more,
        hint="`--allow-unverified` writes it anyway, permanently marked as failed",
    )

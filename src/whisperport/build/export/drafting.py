"""The stages of an export that need torch: read the checkpoint, run the model, and lower its programs."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whisperport import targets
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.export.masking import choose_masks
from whisperport.build.export.placing import Placed, PlacementRequest, of_one_length, place
from whisperport.errors import LoweringError, UsageError
from whisperport.program.bundle import (
    EMBEDDING,
    POSITIONS,
    REFERENCE,
    SILENCE,
    TOKENIZER,
    Manifest,
    ProgramEntry,
)
from whisperport.program.dims import SECONDS_PER_POSITION, Dims
from whisperport.program.generation import Generation
from whisperport.program.json_records import to_json
from whisperport.program.low_rank import LowRank, parse_low_rank
from whisperport.program.program_kind import (
    COARSE_PROJECTION,
    ENCODER,
    PREFILL,
    UNCACHED_DECODER,
    VOCAB_PROJECTION,
)
from whisperport.program.spec import TargetSpec, UncachedForm
from whisperport.program.window import Window, WindowOptions
from whisperport.speech.text.tokenizer import with_merges_as_texts
from whisperport.system.process import return_freed_memory
from whisperport.system.progress import begin_stage
from whisperport.targets import Target, get_target
from whisperport.targets.preflight import check_fits, estimate_export
from whisperport.verification import machine, versions
from whisperport.verification.alignment_heads import find_alignment_heads
from whisperport.verification.clips import N_CLIPS, Clip, clips_in, shipped_clips
from whisperport.verification.reference import Reference
from whisperport.verification.tolerances import BY_WORDS

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from whisperport.model.checkpoint import Checkpoint
    from whisperport.model.network.whisper import Whisper
    from whisperport.model.trace.program import Program

BUILD_PACKAGES = ("whisperport", "torch", "onnx", "onnxscript", "numpy")  # of every export
STATIC = ("w8a8", "w8a16")  # precisions with activations of a fixed scale

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is read of the user's: a checkpoint, and the forms in which its programs will be made."""

    checkpoint: "Checkpoint"
    window: Window | None
    uncached: UncachedForm | None
    low_rank: LowRank | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """The model in torch, and what it computes."""

    model: "Whisper"
    generation: Generation
    reference: Reference
    silence: NDArray[np.floating[Any]] | None  # features (T, d) of silence; None: not needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A bundle whose files are written and not verified; programs may still be in float32.

    Attributes:
        manifest: of these files.
        original: the model, if a rejection may have to run it on more clips; else None.
    """

    manifest: Manifest
    original: Original | None


@contextmanager
def drafting(
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    placed: Placed,
    options: ExportOptions,
    folder: Path,
) -> Iterator[Draft]:
    """Write the files of a bundle to a folder. The weights are in memory no longer than they are needed."""
    draft = _drafted(checkpoint, placed, options, folder)
    return_freed_memory()  # of torch, for the verification
    try:
        yield draft
    finally:
        if draft.original:
            draft.original.model.unload()


def _drafted(
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    placed: Placed,
    options: ExportOptions,
    folder: Path,
) -> Draft:
    source = _read(checkpoint, placed, options, folder)
    original = _run(source, placed, options)
    manifest = _lowered(source, original, placed, folder)
    # Where the words decide, the few clips may show no loss. A search, which gives a loaded checkpoint,
    # tries the next candidate instead.
    shipped = options.clips is None and options.verify_with is None
    by_words = any(placement.precision in BY_WORDS for placement in placed.placements.values())
    if shipped and by_words and isinstance(checkpoint, str | os.PathLike):
        return Draft(manifest=manifest, original=original)
    original.model.unload()
    return Draft(manifest=manifest, original=None)


def _read(
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    placed: Placed,
    options: ExportOptions,
    folder: Path,
) -> Source:
    """Read the checkpoint, and check before the work that it and the export fit."""
    checkpoint = loaded(checkpoint, options.adapter)
    if options.preflight:
        _preflight(checkpoint.dims, list(placed.targets.values()), folder)
    for warning in checkpoint.warnings:
        log.warning("%s", warning)
    known = _known_window(options.window, placed.target_of(ENCODER).spec, checkpoint.dims)
    uncached = _uncached_form(placed, checkpoint.dims) if options.uncached_decoder else None
    window = known.of(checkpoint.dims)
    _check_lengths(placed, window, checkpoint.dims)
    low_rank = _low_rank(placed, options)
    return Source(checkpoint=checkpoint, window=window, uncached=uncached, low_rank=low_rank)


def _run(source: Source, placed: Placed, options: ExportOptions) -> Original:
    """Build the model in torch, and run it on the clips that the bundle is verified with."""
    from whisperport.model.network.short_window import silent_features
    from whisperport.model.network.whisper import build_model
    from whisperport.verification.eager import run_eager

    checkpoint = source.checkpoint
    model = build_model(checkpoint, source.window)
    settings = checkpoint.generation, checkpoint.tokenizer_json
    generation, warning = find_alignment_heads(*settings, model)
    if warning:
        log.warning("%s", warning)
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
        lengths=placed.lengths,
        low_rank=source.low_rank,
    )
    silence = None
    reads_any = not of_one_length(placed.target_of)
    if (reads_any or placed.lengths) and source.window is None:
        silence = _in_float16(silent_features(model.encoder, model.dims)[0].numpy())
    return Original(model=model, generation=generation, reference=reference, silence=silence)


def run_further_clips(original: Original) -> Reference:
    """Run the model on the shipped clips that are not in its reference."""
    from whisperport.verification.eager import run_eager

    language = original.generation.any_language
    clips = [replace(clip, language=language) for clip in shipped_clips(None)[N_CLIPS:]]
    return run_eager(original.model, original.generation, clips)


def _lowered(source: Source, original: Original, placed: Placed, folder: Path) -> Manifest:
    """Trace, rewrite and lower every program to the folder; write the tables and the reference."""
    checkpoint, model, reference = source.checkpoint, original.model, original.reference
    programs = traced_programs(model, original.generation, placed, source.uncached, source.low_rank)
    entries, rewrites = lower_groups(grouped(programs, placed), placed, folder)
    masks = choose_masks([entry.spec for entry in entries], placed, model, reference)
    begin_stage("writing the embedding, the tokenizer and the reference")
    (folder / TOKENIZER).write_bytes(with_merges_as_texts(checkpoint.tokenizer_json))
    np.save(folder / EMBEDDING, _table(checkpoint, "decoder.token_embedding.weight"))
    np.save(folder / POSITIONS, _table(checkpoint, "decoder.positional_embedding"))
    if original.silence is not None:
        np.save(folder / SILENCE, original.silence)
    np.savez_compressed(folder / REFERENCE, allow_pickle=False, **reference.to_arrays())
    return Manifest(
        name=f"{checkpoint.source.name} on {', '.join(placed.targets)}",
        source=to_json(checkpoint.source),
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
        adapters=source.low_rank,
    )


def lower_programs(
    model: "Whisper",
    generation: Generation,
    request: PlacementRequest,
    names: Sequence[str],
    folder: Path,
) -> list[ProgramEntry]:
    """Trace, rewrite and lower single programs of a model to a folder, without a verification.

    Raises:
        UsageError, LoweringError: see `export`.
    """
    further = [name for name in names if name in (VOCAB_PROJECTION, COARSE_PROJECTION)]
    request = replace(
        request, programs={**request.programs, **dict.fromkeys(further, request.target)}
    )
    placed = place(request, [name for name in names if name not in further], further)
    programs = traced_programs(model, generation, placed, None)
    return lower_groups(grouped(programs, placed), placed, folder)[0]


def traced_programs(
    model: "Whisper",
    generation: Generation,
    placed: Placed,
    uncached: UncachedForm | None,
    low_rank: LowRank | None = None,
) -> Iterator["Program"]:
    """Yield every program, in the variant that its target uses."""
    from whisperport.model.network.equalization import equalize
    from whisperport.model.trace.variants import whisper_programs
    from whisperport.model.trace.whisper import Parts

    chosen = {name: placed.target_of(name).spec.lowering.variants for name in placed.placements}
    variants = {name: of[name] for name, of in chosen.items() if name in of}
    projected = VOCAB_PROJECTION not in placed.placements
    # One multiplication in float32 for B texts takes less time than B coarse ones.
    batch_projected = projected or COARSE_PROJECTION in placed.placements
    # In 8 bits, `step` and every `prefill` may run in one session, so that all return the same.
    summed = frozenset(
        name
        for name, placement in placed.placements.items()
        if placed.target_of(name).spec.lowering.sums_exponentials
        and placement.precision in (("w8",) if name.startswith(PREFILL) else ("fp32", "w8"))
    )
    encoder = placed.placements[ENCODER]
    compiled = placed.target_of(ENCODER).compiler is not None
    # An adapter is for the inputs that its layers had when it was trained.
    if low_rank is None and (encoder.precision in STATIC or compiled):
        equalize(model.encoder)
    parts = Parts(
        model, generation.alignment_heads, uncached, projected, batch_projected, summed, low_rank
    )
    yield from whisper_programs(parts, tuple(placed.placements), variants)


def grouped(programs: Iterable["Program"], placed: Placed) -> list[tuple[Target, list["Program"]]]:
    """Return every target with its programs."""
    groups: dict[str, list[Program]] = {}
    for program in programs:
        begin_stage(f"traced {program.name}")
        groups.setdefault(placed.placements[program.name].target, []).append(program)
    return [(placed.targets[name], group) for name, group in groups.items()]


def lower_groups(
    groups: list[tuple[Target, list["Program"]]], placed: Placed, folder: Path
) -> tuple[list[ProgramEntry], dict[str, Any]]:
    """Rewrite and lower the programs of each target.

    Returns:
        The manifest's entries, and program -> outcomes of its rewrites as JSON.
    """
    from whisperport.model.rewrites import run_rewrites

    entries: list[ProgramEntry] = []
    rewrites: dict[str, Any] = {}
    for target, programs in groups:
        rewritten = []
        for program in programs:
            begin_stage(f"rewriting {program.name} for {target.spec.name}")
            program, outcomes = run_rewrites(program, target.spec.lowering.rewrites)
            rewritten.append(program)
            rewrites[program.name] = [asdict(outcome) for outcome in outcomes]
        precisions = {p.name: placed.placements[p.name].precision for p in rewritten}
        entries += target.with_precisions(precisions).lower(rewritten, folder)
    return entries, rewrites


def loaded(
    checkpoint: "Checkpoint | str | os.PathLike[str]", adapter: Path | None = None
) -> "Checkpoint":
    """Return a checkpoint; it is read if it is given by a name or path, see `load_checkpoint`.

    Args:
        checkpoint: a loaded one, a name or a path.
        adapter: merged with a checkpoint that is read; None: none.
    """
    if not isinstance(checkpoint, str | os.PathLike):
        return checkpoint
    from whisperport.model.checkpoint import load_checkpoint

    begin_stage(f"reading {checkpoint}")
    source = checkpoint if isinstance(checkpoint, str) else Path(checkpoint)
    return load_checkpoint(source, adapter=adapter)


def build_packages(names: Iterable[str]) -> list[str]:
    """Return the packages that write and run a bundle at its export.

    Args:
        names: of the bundle's targets. Their specs name the packages.
    """
    specs = [get_target(name).spec for name in names]
    installed = {
        extra: installs
        for target in targets.TARGETS
        for extra, installs in target.spec.software.packages.items()
    }
    packages = [
        package.name for spec in specs for package in installed.get(spec.software.extra, ())
    ]
    runtimes = [spec.software.emulation_runtime or spec.software.runtime for spec in specs]
    return list(dict.fromkeys((*BUILD_PACKAGES, *packages, *filter(None, runtimes))))


def _preflight(dims: Dims, targets: Sequence[Target], out: Path) -> None:
    for target in targets:
        if reason := target.too_large(dims):
            raise LoweringError(
                f"the checkpoint is too large for `{target.spec.name}`",
                why=reason,
                hint="use a smaller checkpoint; `--no-preflight` tries the export anyway",
            )
    needed = estimate_export(dims, {target.spec.name for target in targets})
    check_fits(needed, out)
    begin_stage(f"building the model; the export needs {needed}")


def _known_window(requested: WindowOptions, spec: TargetSpec, dims: Dims) -> WindowOptions:
    """Return the requested window, or else the longest one known to compile; warn if they differ."""
    if not spec.runs.windows_s:
        return requested
    width = min(
        (w for w in spec.runs.windows_s if w >= dims.n_audio_state),
        default=max(spec.runs.windows_s),
    )
    known_s = spec.runs.windows_s[width]
    if requested.seconds is None:
        return replace(requested, seconds=min(known_s, dims.window_s))
    if requested.seconds != known_s:
        log.warning(
            "a window of %g s is not known to compile for %s; a window of %g s is, for models of width %d",
            *(requested.seconds, spec.name, known_s, width),
        )
    return requested


def _check_lengths(placed: Placed, window: Window | None, dims: Dims) -> None:
    """Check that the programs for lengths of audio are for a checkpoint with its own, longer window.

    Raises:
        UsageError: they are not.
    """
    longest = max(placed.lengths, default=0)
    if longest and window:
        seconds = window.positions * SECONDS_PER_POSITION
        raise UsageError(
            f"`--windows` cannot be used with a longest window of {seconds:g} s",
            why="the runtime takes the checkpoint's window where it does not trust a shorter one",
            hint="omit `--windows`",
        )
    if longest >= dims.n_audio_ctx:
        raise UsageError(
            f"a window of `--windows` cannot have {longest * SECONDS_PER_POSITION:g} s",
            why=f"the checkpoint's own has {dims.window_s:g} s",
            hint="give shorter lengths",
        )


def _low_rank(placed: Placed, options: ExportOptions) -> LowRank | None:
    """Return which adapters the programs take.

    Raises:
        UsageError: a program cannot take one.
    """
    if not options.adapters_as_inputs:
        return None
    low_rank = parse_low_rank(options.adapters_as_inputs)
    if options.uncached_decoder:
        raise UsageError(
            "`uncached_decoder` takes no adapter as inputs",
            hint="omit `--uncached-decoder`, or `--adapters-as-inputs`",
        )
    for name, placement in placed.placements.items():
        if placement.precision in STATIC:
            raise UsageError(
                f"`{name}` in {placement.precision} takes no adapter as inputs",
                why="the scales of its activations are fixed at the export, before an adapter is known",
                hint="choose another precision, or merge the adapter: `--adapter`",
            )
    return low_rank


def _uncached_form(placed: Placed, dims: Dims) -> UncachedForm:
    target = placed.target_of(UNCACHED_DECODER)
    form = target.uncached_form(dims)
    if form is None:
        raise UsageError(
            f"`{target.spec.name}` does not run a decoder without KV cache",
            hint="omit `--uncached-decoder`, or place `uncached_decoder` on a target that runs it",
        )
    return form


def _clips(options: ExportOptions, generation: Generation) -> Sequence[Clip]:
    """Return the clips of the options, or those in its folder, or else the package's English clips.

    A checkpoint without English decodes the package's clips as one of its own languages.
    """
    if options.clips is not None:
        return options.clips
    if options.verify_with is not None:
        return clips_in(options.verify_with, options.language or generation.any_language)
    return [replace(clip, language=generation.any_language) for clip in shipped_clips()]


def _table(checkpoint: "Checkpoint", name: str) -> NDArray[np.floating[Any]]:
    """Return a weight as an array: float16 if the checkpoint stores it in float16, else float32."""
    import torch

    weight = checkpoint.weights[name]
    array = (weight if weight.dtype == torch.float16 else weight.float()).numpy()
    return np.ascontiguousarray(array)


def _in_float16(table: NDArray[np.float32]) -> NDArray[np.floating[Any]]:
    """Return a table in float16, or as it is if a value is too large for it."""
    with np.errstate(over="ignore"):
        half = table.astype(np.float16)
    return half if np.isfinite(half).all() else table

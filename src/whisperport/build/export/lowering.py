"""Trace, rewrite and lower the programs of a model, each for its own target."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.build.export.placing import Placed, PlacementRequest, place
from whisperport.program.bundle import ProgramEntry
from whisperport.program.generation import Generation
from whisperport.program.program_kind import COARSE_PROJECTION, ENCODER, PREFILL, VOCAB_PROJECTION
from whisperport.program.spec import UncachedForm
from whisperport.system.progress import Progress, begin_stage
from whisperport.targets import Target

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from whisperport.model.network.whisper import Whisper
    from whisperport.model.trace.program import Program

STATIC = ("w8a8", "w8a16")  # precisions with activations of a fixed scale


def lower_programs(
    model: "Whisper",
    generation: Generation,
    request: PlacementRequest,
    names: Sequence[str],
    folder: Path,
    progress: Progress = begin_stage,
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
    return lower_groups(grouped(programs, placed, progress), placed, folder, progress)[0]


def traced_programs(
    model: "Whisper", generation: Generation, placed: Placed, uncached: UncachedForm | None
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
    if encoder.precision in STATIC or placed.target_of(ENCODER).compiler is not None:
        equalize(model.encoder)
    parts = Parts(model, generation.alignment_heads, uncached, projected, batch_projected, summed)
    yield from whisper_programs(parts, tuple(placed.placements), variants)


def grouped(
    programs: Iterable["Program"], placed: Placed, progress: Progress
) -> list[tuple[Target, list["Program"]]]:
    """Return every target with its programs."""
    groups: dict[str, list[Program]] = {}
    for program in programs:
        progress(f"traced {program.name}")
        groups.setdefault(placed.placements[program.name].target, []).append(program)
    return [(placed.targets[name], group) for name, group in groups.items()]


def lower_groups(
    groups: list[tuple[Target, list["Program"]]], placed: Placed, folder: Path, progress: Progress
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
            progress(f"rewriting {program.name} for {target.spec.name}")
            program, outcomes = run_rewrites(program, target.spec.lowering.rewrites)
            rewritten.append(program)
            rewrites[program.name] = [asdict(outcome) for outcome in outcomes]
        precisions = {p.name: placed.placements[p.name].precision for p in rewritten}
        entries += target.with_precisions(precisions).lower(rewritten, folder, progress)
    return entries, rewrites

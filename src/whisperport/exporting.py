"""From a checkpoint to a bundle: trace, rewrite, lower, verify, and only then put it in place."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
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
from whisperport.dims import Dims
from whisperport.errors import MissingPackageError, UsageError, VerificationError
from whisperport.generation import Generation
from whisperport.preflight import check_fits, estimate_export
from whisperport.targets import RunOptions, Target, get_target
from whisperport.verification import Report, machine, versions
from whisperport.verification.alignment_heads import find_alignment_heads
from whisperport.verification.bundle_check import verify
from whisperport.verification.clips import Clip, shipped_clips
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

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How a bundle is made."""

    window: WindowOptions = field(default_factory=WindowOptions)  # shorter than the checkpoint's
    place: Mapping[str, str] = field(default_factory=dict)  # program -> target, where another
    clips: Sequence[Clip] | None = None  # recordings to verify with; None: those of the package
    allow_unverified: bool = False  # write the bundle although it failed, marked so for ever
    preflight: bool = True  # refuse at once what memory or disk have no room for
    run: RunOptions = field(default_factory=RunOptions)  # also the threads of torch


def export(
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    target: str,
    out: str | os.PathLike[str],
    options: ExportOptions | None = None,
    *,
    say: Say = lambda _: None,
) -> Bundle:
    """Lower every program of a checkpoint, prove that the result still transcribes, and write it.

    Args:
        checkpoint: a loaded one, or what `load_checkpoint` takes.
        target: a name from `TARGETS`; `options.place` puts single programs elsewhere.
        out: the bundle's folder. A bundle already there stays whole until the new one is complete.
        say: told what is being done, in a few words.

    Raises:
        UsageError: no such target or program, or no such window for this checkpoint.
        CheckpointError: see there.
        LoweringError: a compiler refused.
        WhisperportError: this machine is too small.
        BundleError: `out` cannot be written.
        VerificationError: the bundle disagrees with its reference; nothing was written.
    """
    options, out = options or ExportOptions(), Path(out)
    _check_targets(target, options.place)
    check_writable(out)
    _check_torch()
    _check_programs(options.place)
    checkpoint = _load(checkpoint, say)
    if options.preflight:
        needed = estimate_export(checkpoint.dims, {target, *options.place.values()})
        check_fits(needed, out)
        say(f"building the model; the export will take {needed}")
    window = options.window.of(checkpoint.dims)
    for warning in checkpoint.warnings:
        log.warning("%s", warning)

    import torch

    from whisperport.model.whisper import build_model
    from whisperport.verification.eager import run_eager

    if options.run.threads:
        torch.set_num_threads(options.run.threads)
    model = build_model(checkpoint, window)
    generation = with_alignment_heads(
        find_alignment_heads(checkpoint.generation, checkpoint.tokenizer_json, model, say),
        checkpoint.dims,
    )
    clips = shipped_clips() if options.clips is None else options.clips
    say(f"running the model in torch on {len(clips)} clips")
    reference = run_eager(model, generation, clips)

    with writing_bundle(out) as writer:
        placed = _place(model, generation, target, options.place, say)
        entries, rewrites = _lower(placed, writer.folder, say)
        say("writing the embedding, the tokenizer and the reference")
        (writer.folder / TOKENIZER).write_bytes(checkpoint.tokenizer_json)
        np.save(writer.folder / EMBEDDING, _table(checkpoint, "decoder.token_embedding.weight"))
        np.save(writer.folder / POSITIONS, _table(checkpoint, "decoder.positional_embedding"))
        np.savez_compressed(writer.folder / REFERENCE, allow_pickle=False, **reference.to_arrays())
        manifest = Manifest(
            name=f"{checkpoint.source.name} on {', '.join(dict.fromkeys(t.spec.name for t, _ in placed))}",
            source=checkpoint.source.to_json(),
            dims=model.dims,
            window=window,
            generation=generation,
            programs=tuple(entries),
            rewrites=rewrites,
            versions=versions(BUILD_PACKAGES),
            machine=machine(),
        )
        report = verify(writer.preview(manifest), run=options.run, say=say)
        if not report and not options.allow_unverified:
            raise _not_verified(out, report)
        say("putting the bundle in its place")
        return writer.commit(
            replace(manifest, verification=report.to_json(), verified=bool(report))
        )


def with_alignment_heads(generation: Generation, dims: Dims) -> Generation:
    """The alignment heads, or where there are none all heads of the upper half.

    Source: the latter is openai-whisper's default, whisper/model.py:262-269.
    """
    if generation.alignment_heads:
        return generation
    layers = range(dims.n_text_layer // 2, dims.n_text_layer)
    heads = [(layer, head) for layer in layers for head in range(dims.n_text_head)]
    return replace(generation, alignment_heads=tuple(heads))


def _check_targets(target: str, place: Mapping[str, str]) -> None:
    """Before any work: every target named exists."""
    for name in (target, *place.values()):
        get_target(name)


def _check_programs(place: Mapping[str, str]) -> None:
    from whisperport.programs.whisper import program_names

    unknown = [name for name in place if name not in program_names()]
    if unknown:
        raise UsageError(
            f"there is no program `{unknown[0]}` to place",
            hint=f"programs are {', '.join(program_names())}",
        )


def _check_torch() -> None:
    try:
        import torch  # noqa: F401  # everything on the build side needs it
    except ImportError as error:
        raise MissingPackageError(
            "cannot export: torch and its exporters are not installed",
            why=str(error),
            hint='pip install "whisperport[export]"',
        ) from error


def _load(checkpoint: "Checkpoint | str | os.PathLike[str]", say: Say) -> "Checkpoint":
    if not isinstance(checkpoint, str | os.PathLike):
        return checkpoint
    from whisperport.checkpoint import load_checkpoint

    say(f"reading {checkpoint}")
    return load_checkpoint(checkpoint if isinstance(checkpoint, str) else Path(checkpoint))


def _place(
    model: Any, generation: Generation, target: str, place: Mapping[str, str], say: Say
) -> list[tuple[Target, list["Program"]]]:
    """Trace every program, and group them by the target that each one goes to."""
    from whisperport.programs.whisper import whisper_programs

    groups: dict[str, list[Program]] = {}
    for program in whisper_programs(model, generation.alignment_heads):
        say(f"traced {program.name}")
        groups.setdefault(place.get(program.name, target), []).append(program)
    return [(get_target(name), programs) for name, programs in groups.items()]


def _lower(
    placed: list[tuple[Target, list["Program"]]], folder: Path, say: Say
) -> tuple[list[ProgramEntry], dict[str, Any]]:
    """Rewrite and lower each group; returns the manifest's entries and what each rewrite did."""
    from whisperport.rewrites import run_rewrites

    entries: list[ProgramEntry] = []
    rewrites: dict[str, Any] = {}
    for target, programs in placed:
        rewritten = []
        for program in programs:
            say(f"rewriting {program.name} for {target.spec.name}")
            program, outcomes = run_rewrites(program, target.spec.rewrites)
            rewritten.append(program)
            rewrites[program.name] = [asdict(outcome) for outcome in outcomes]
        entries += target.lower(rewritten, folder, say)
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
        hint="`--allow-unverified` writes it all the same, marked as unverified for ever",
    )

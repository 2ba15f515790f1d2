"""The table of all variants of every program; a target's spec selects a variant by name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from whisperport.model.network.whisper import shortened
from whisperport.model.trace.program import Program, Untraced
from whisperport.model.trace.whisper import (
    Parts,
    adaptable,
    align,
    batch_step,
    coarse_projection,
    cross_kv,
    encoder,
    nchw_encoder,
    prefill,
    rank4_cross_kv,
    rank4_step,
    step,
    uncached_decoder,
    vocab_projection,
)
from whisperport.program.program_kind import kind_of

PREFILLS = (4, 64)  # tokens per run: the start tokens (at most 4); a text prompt in pieces of 64

BATCHES = (2, 4, 8, 16)  # numbers of texts that a `step_B` decodes together

PIECES = 4  # of the vocabulary, in the published graphs that have pieces

Builder = Callable[[Parts], Untraced]

# (program, variant) -> the function that returns it. The first variant of a program is its default.
VARIANTS: Mapping[tuple[str, str], Builder] = {
    ("encoder", "sequence"): encoder,
    ("encoder", "nchw"): nchw_encoder,
    ("cross_kv", "sequence"): cross_kv,
    ("cross_kv", "rank4"): rank4_cross_kv,
    **{(f"prefill_{tokens}", "cached"): partial(prefill, tokens=tokens) for tokens in PREFILLS},
    **{
        (f"prefill_{tokens}", "rank4"): partial(prefill, tokens=tokens, rank4=True)
        for tokens in PREFILLS
    },
    ("step", "cached"): step,
    ("step", "rank4"): rank4_step,
    **{(f"step_{rows}", "cached"): partial(batch_step, rows=rows) for rows in BATCHES},
    ("align", "cached"): align,
    ("uncached_decoder", "uncached"): uncached_decoder,
    ("vocab_projection", "whole"): vocab_projection,
    ("vocab_projection", "pieces"): partial(vocab_projection, pieces=PIECES),
    ("coarse_projection", "whole"): coarse_projection,
}
# Programs that only some bundles have: on request, or because the target of `step` asks for a batch.
OPTIONAL = (
    *("uncached_decoder", "vocab_projection", "coarse_projection"),
    *(f"step_{rows}" for rows in BATCHES),
)


def program_names() -> tuple[str, ...]:
    """Return the names of the programs of every bundle, in the order of export."""
    return tuple(dict.fromkeys(name for name, _ in VARIANTS if name not in OPTIONAL))


def whisper_programs(
    parts: Parts,
    names: Sequence[str] = program_names(),
    variants: Mapping[str, str] | None = None,
) -> Iterator[Program]:
    """Trace programs one after another; they share the weights of the model.

    Args:
        parts: the model and the settings that programs are traced from.
        names: of the programs; `encoder_T` and `cross_kv_T` are of the same variants as `encoder` and
            `cross_kv`.
        variants: program -> its variant; other programs use their default variant.
    """
    for untraced in untraced_programs(parts, names, variants):
        yield untraced.traced()


def untraced_programs(
    parts: Parts,
    names: Sequence[str] = program_names(),
    variants: Mapping[str, str] | None = None,
) -> Iterator[Untraced]:
    """Return programs that are not traced yet; see `whisper_programs`."""
    defaults = dict(reversed(tuple(VARIANTS)))
    chosen = defaults | dict(variants or {})
    for name in names:
        if positions := kind_of(name).positions:
            short = replace(parts, model=shortened(parts.model, positions))
            longest = kind_of(name).name
            yield adaptable(short, replace(VARIANTS[longest, chosen[longest]](short), name=name))
        else:
            yield adaptable(parts, VARIANTS[name, chosen[name]](parts))

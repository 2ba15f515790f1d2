"""The variants of every program, in one table: a target chooses among them by name, in its spec."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from whisperport.programs.program import Program
from whisperport.programs.whisper import (
    Parts,
    align,
    cross_kv,
    encoder,
    nchw_encoder,
    prefill,
    step,
    uncached_decoder,
)

PREFILLS = (
    4,
    64,
)  # tokens per run: the start tokens (at most 4), and a text prompt in pieces of 64

Builder = Callable[[Parts], Program]

# (program, variant) -> what traces it. The first variant of a program is its default.
VARIANTS: Mapping[tuple[str, str], Builder] = {
    ("encoder", "sequence"): encoder,
    ("encoder", "nchw"): nchw_encoder,
    ("cross_kv", "sequence"): cross_kv,
    **{(f"prefill_{tokens}", "cached"): partial(prefill, tokens=tokens) for tokens in PREFILLS},
    ("step", "cached"): step,
    ("align", "cached"): align,
    ("uncached_decoder", "uncached"): uncached_decoder,
}
ON_REQUEST = ("uncached_decoder",)  # programs that are exported only where they are asked for


def program_names() -> tuple[str, ...]:
    """The programs of every bundle, in the order in which they are exported."""
    return tuple(dict.fromkeys(name for name, _ in VARIANTS if name not in ON_REQUEST))


def whisper_programs(
    parts: Parts,
    names: Sequence[str] = program_names(),
    variants: Mapping[str, str] | None = None,
) -> Iterator[Program]:
    """Trace programs in turn; they share the weights of the model.

    Args:
        names: which programs.
        variants: program -> its variant; of other programs, the default.
    """
    defaults = dict(reversed(tuple(VARIANTS)))
    chosen = defaults | dict(variants or {})
    for name in names:
        yield VARIANTS[name, chosen[name]](parts)

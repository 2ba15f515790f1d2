"""What the name of a program tells: what it computes, and the sizes that the name states."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

ENCODER, CROSS_KV, STEP, PREFILL, ALIGN = "encoder", "cross_kv", "step", "prefill", "align"
UNCACHED_DECODER = "uncached_decoder"
VOCAB_PROJECTION = "vocab_projection"
COARSE_PROJECTION = "coarse_projection"

_NUMBERED = re.compile("(prefill|step|encoder|cross_kv)_([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class ProgramKind:
    """What a program computes, and how often.

    Attributes:
        name: name of the kind, such as "prefill" for `prefill_64`; "" for a program that is not Whisper's.
        reads: what the program computes from: a spectrogram, the encoder's features, tokens and the caches
            of the decoder, or hidden states.
        runs: how often a window runs it: once, once per P tokens of a prompt, or once per token.
        tokens: P, tokens of a prompt that one run of a prefill program reads; 0 for other kinds.
        batch: B, texts that `step_B` decodes together; 1 for other programs.
        positions: T, encoder positions that `encoder_T` and `cross_kv_T` read, fewer than `encoder` and
            `cross_kv`; 0 for other programs.
    """

    name: str
    reads: Literal["mel", "features", "caches", "hidden", ""] = ""
    runs: Literal["window", "prompt", "token", ""] = ""
    tokens: int = 0
    batch: int = 1
    positions: int = 0

    @property
    def is_batch(self) -> bool:
        """Whether it is a program `step_B`."""
        return self.batch > 1


_KINDS = {
    kind.name: kind
    for kind in (
        ProgramKind(ENCODER, "mel", "window"),
        ProgramKind(CROSS_KV, "features", "window"),
        ProgramKind(STEP, "caches", "token"),
        ProgramKind(ALIGN, "caches", "window"),
        ProgramKind(VOCAB_PROJECTION, "hidden", "token"),
        ProgramKind(COARSE_PROJECTION, "hidden", "token"),
        ProgramKind(UNCACHED_DECODER, "features", "token"),
    )
}


@lru_cache(maxsize=256)
def kind_of(program: str) -> ProgramKind:
    """Return the kind of a program by its name. `step_1` is none: `step` decodes one text."""
    match = _NUMBERED.fullmatch(program)
    if match is None:
        return _KINDS.get(program, ProgramKind(""))
    number = int(match[2])
    if match[1] in (ENCODER, CROSS_KV):
        return replace(_KINDS[match[1]], positions=number)
    if match[1] == PREFILL:
        return ProgramKind(PREFILL, "caches", "prompt", tokens=number)
    return ProgramKind(STEP, "caches", "token", batch=number) if number > 1 else ProgramKind("")

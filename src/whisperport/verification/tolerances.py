"""Tolerances of all numeric comparisons: one table per purpose, with the source of each limit.

| Compared | Limit | With |
|---|---|---|
| a bundle's programs | `limit_of`: torch's own loss and `MARGINS_DB` | the reference in the bundle |
| the same, where that is not known | `GATES`, by precision | the reference in the bundle |
| a rewritten program, by dtype | `REWRITTEN` | the program before the rewrite, both run by torch |
| a lowered program, by dtype | `LOWERED` | the program before lowering, run by torch |

Below float32 a single largest error never decides: in a model with massive activations, torch's own float16
is off by a tenth of the largest value in one of 576,000 values, and every word is right.
"""

import math
from collections.abc import Iterable, Mapping

from whisperport.verification.array_comparison import Gate
from whisperport.verification.loss import Loss

FLOOR_DB = 10.0
"""Below it an output fails, whatever its checkpoint loses and whatever the words are.

The vendor of a chip of 8 bits flags less than 10 dB at the output in its layer noise analysis
(docs/explanation/verification.md).
For a clip of 5 s in a window of 30 s, an encoder that got silence or another clip has 4 to 6 dB."""

MARGINS_DB: Mapping[str, float] = {
    "fp16": 26.0,
    "w16a16": 26.0,
    "bf16": 20.0,
    "w8": 20.0,
    "w8a16": 20.0,
}
"""What an output may lose beside what torch loses in the same precision.

These margins are this project's choice, not calibrated: wide, because runtimes add in float16 where torch
adds in float32, and quantize activations on the fly where torch does not. On this project's checkpoints
with massive activations, 8-bit weights on two CPU runtimes lost at most 3 dB. The identity checks and
the words have to catch what such a margin lets through.
"""

BY_WORDS = frozenset({"w8", "w8a16", "w8a8"})
"""Precisions below float16: above the limit, the words decide. A WER does not follow from decibels."""


def _of_noise(min_sqnr_db: float, because: str) -> Gate:
    """Return a gate that limits the SQNR only."""
    return Gate(min_cosine=-1.0, min_sqnr_db=min_sqnr_db, max_relative=math.inf, because=because)


GATES: Mapping[str, Gate] = {
    "fp32": Gate(
        min_cosine=0.99999,
        min_sqnr_db=60.0,
        max_relative=1e-3,
        because="another order of summation in float32; AWS's guide allows 1e-2 for a complete model and "
        "1e-5 for an operator",
    ),
    "fp16": _of_noise(
        35.0,
        "WhisperKit requires PSNR > 35 dB of encoder and decoder in float16",
    ),
    "bf16": _of_noise(
        28.0,
        "AWS's NxD Inference allows 0.05 of the tensor's largest value for bfloat16",
    ),
    "w8": _of_noise(
        27.0,
        "8-bit weights alone lose no more than 8-bit weights with 16-bit activations, so this is the limit "
        "of w8a16; 38 dB was measured of this project's trained encoder on LiteRT",
    ),
    "w8a16": _of_noise(
        27.0,
        "a cosine of 0.999 is 27 dB, by cos = 1/√(1 + 10^(−SQNR/10))",
    ),
    "w16a16": _of_noise(
        35.0,
        "the limit of fp16, whose 11 significant bits are fewer; an encoder and a decoder step of this "
        "project's trained model had 57 dB in a vendor's simulator",
    ),
    "w8a8": _of_noise(
        14.0,
        "this project's choice for a program that does not affect the transcript, such as the uncached "
        "decoder: a cosine of 0.98 is 14 dB",
    ),
}

REWRITTEN: Mapping[str, Gate] = {
    "float32": Gate(
        min_cosine=0.99999,
        min_sqnr_db=80.0,
        max_relative=1e-4,
        because="a rewrite is the same function in real arithmetic, so only the order of summation in "
        "float32 differs: up to 4e-6 of the largest value was measured in decoders and encoders of the "
        "size of Whisper tiny; a wrong operator causes errors of 1e-2 and more",
    ),
    "float16": GATES["fp16"],
    "bfloat16": GATES["bf16"],
}

LOWERED: Mapping[str, Gate] = {
    "float32": Gate(
        min_cosine=0.99999,
        min_sqnr_db=60.0,
        max_relative=1e-4,
        because="another order of summation in float32 changed Whisper's outputs by 5e-6 of their largest "
        "value in measurements; a wrong operator changes them by 1e-2 and more",
    ),
    "float16": GATES["fp16"],
    "bfloat16": GATES["bf16"],
}


def gate_for(table: Mapping[str, Gate], dtypes: Iterable[str]) -> Gate:
    """Return the gate with the widest limits of all `dtypes` in the table; float32's if there is none."""
    known = [table[dtype] for dtype in dtypes if dtype in table]
    return min(known, key=lambda gate: gate.min_sqnr_db, default=table["float32"])


def limit_of(precision: str, own: Loss | None, *, encoder: bool = False) -> Gate:
    """Return the limit of an output of a bundle's program.

    Args:
        precision: precision of the program.
        own: what torch loses in this precision for the same checkpoint; None: not known.
        encoder: whether it is the encoder's output, whose words are decoded and compared too.
    """
    if own is not None and precision in MARGINS_DB:
        margin = MARGINS_DB[precision]
        return _of_noise(
            max(FLOOR_DB, round(own.sqnr_db - margin, 1)),
            f"torch has {own.sqnr_db:.1f} dB in it for this checkpoint; {margin:g} dB may be lost",
        )
    if precision == "w8a8" and encoder:
        return _of_noise(FLOOR_DB, "above it the words decide")
    return GATES[precision]

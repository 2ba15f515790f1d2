"""Every tolerance of a numeric comparison: one table per purpose, each limit with its source.

| Purpose | Table | Held against |
|---|---|---|
| a bundle's programs, by precision | `GATES` | the recorded reference of the checkpoint |
| an encoder that is judged by the words, by precision | `JUDGED_BY_WORDS` | the same |
| a rewritten program, by dtype | `REWRITTEN` | the program before the rewrite, both run by torch |
| a lowered program, by dtype | `LOWERED` | the program before lowering, run by torch |
"""

import math
from collections.abc import Iterable, Mapping

from whisperport.verification.compare import Gate

GATES: Mapping[str, Gate] = {
    "fp32": Gate(
        min_cosine=0.99999,
        min_sqnr_db=60.0,
        max_relative=1e-3,
        because="another summation order in float32; AWS's guide puts a full model at 1e-2, an "
        "operator at 1e-5",
    ),
    "fp16": Gate(
        min_cosine=0.9998,
        min_sqnr_db=35.0,
        max_relative=1e-2,
        because="WhisperKit asks PSNR > 35 dB of encoder and decoder in float16; cosine 0.9998 is "
        "the same error, by cos = 1/√(1 + 10^(−SQNR/10))",
    ),
    "bf16": Gate(
        min_cosine=0.999,
        min_sqnr_db=28.0,
        max_relative=5e-2,
        because="AWS's NxD Inference allows 0.05 of the tensor's maximum for bfloat16",
    ),
    "w8a16": Gate(
        min_cosine=0.999,
        min_sqnr_db=27.0,
        max_relative=5e-2,
        because="cosine 0.999 is 27 dB, by cos = 1/√(1 + 10^(−SQNR/10))",
    ),
    "w8a8": Gate(
        min_cosine=0.98,
        min_sqnr_db=14.0,
        max_relative=math.inf,
        because="this project's choice for a program that no words are decoded with, such as the "
        "uncached decoder: cosine 0.98 is 14 dB, by cos = 1/√(1 + 10^(−SQNR/10))",
    ),
}

JUDGED_BY_WORDS: Mapping[str, Gate] = {
    "w8a8": Gate(
        min_cosine=-1.0,
        min_sqnr_db=-math.inf,
        max_relative=math.inf,
        because="compiled encoders in 8 bits that transcribe as well as in float32 were measured at "
        "14 to 16 dB (mean error 0.189, largest 13.0, of features that spread by 1.2), so no number of "
        "decibels separates good ones from bad ones; the words do",
    ),
}

REWRITTEN: Mapping[str, Gate] = {
    "float32": Gate(
        min_cosine=0.99999,
        min_sqnr_db=80.0,
        max_relative=1e-4,
        because="a rewrite is the same function in real arithmetic, so only float32's order of sums "
        "differs: seen up to 4e-6 of the largest value in decoders and encoders of the size of "
        "Whisper tiny; a wrong operator is off by 1e-2 and more",
    ),
    "float16": GATES["fp16"],
    "bfloat16": GATES["bf16"],
}

LOWERED: Mapping[str, Gate] = {
    "float32": Gate(
        min_cosine=0.99999,
        min_sqnr_db=60.0,
        max_relative=1e-4,
        because="another order of sums in float32 was seen to change Whisper's outputs by 5e-6 of "
        "their largest value; a wrong operator changes them by 1e-2 and more",
    ),
    "float16": GATES["fp16"],
    "bfloat16": GATES["bf16"],
}


def gate_for(table: Mapping[str, Gate], dtypes: Iterable[str]) -> Gate:
    """The gate of the coarsest of `dtypes` that the table has, else that of float32."""
    known = [table[dtype] for dtype in dtypes if dtype in table]
    return min(known, key=lambda gate: gate.min_sqnr_db, default=table["float32"])

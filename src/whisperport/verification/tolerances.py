"""Tolerances of all numeric comparisons: one table per purpose, with the source of each limit.

| Compared | Table | With |
|---|---|---|
| a bundle's programs, by precision | `GATES` | the reference in the bundle |
| an encoder that its words judge too, by precision | `JUDGED_BY_WORDS` | the reference in the bundle |
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
        because="another order of summation in float32; AWS's guide allows 1e-2 for a complete model and "
        "1e-5 for an operator",
    ),
    "fp16": Gate(
        min_cosine=0.9998,
        min_sqnr_db=35.0,
        max_relative=1e-2,
        because="WhisperKit requires PSNR > 35 dB of encoder and decoder in float16; cosine 0.9998 is "
        "the same error, by cos = 1/√(1 + 10^(−SQNR/10))",
    ),
    "bf16": Gate(
        min_cosine=0.999,
        min_sqnr_db=28.0,
        max_relative=5e-2,
        because="AWS's NxD Inference allows 0.05 of the tensor's largest value for bfloat16",
    ),
    "w8": Gate(
        min_cosine=0.999,
        min_sqnr_db=27.0,
        max_relative=5e-2,
        because="8-bit weights alone lose no more than 8-bit weights with 16-bit activations, so these are "
        "the limits of w8a16; 38 dB was measured of this project's trained encoder on LiteRT",
    ),
    "w8a16": Gate(
        min_cosine=0.999,
        min_sqnr_db=27.0,
        max_relative=5e-2,
        because="cosine 0.999 is 27 dB, by cos = 1/√(1 + 10^(−SQNR/10))",
    ),
    "w16a16": Gate(
        min_cosine=0.9998,
        min_sqnr_db=35.0,
        max_relative=1e-2,
        because="the limits of fp16, whose 11 significant bits are fewer; an encoder and a decoder step "
        "of this project's trained model had 57 dB in a vendor's simulator",
    ),
    "w8a8": Gate(
        min_cosine=0.98,
        min_sqnr_db=14.0,
        max_relative=math.inf,
        because="this project's choice for a program that does not affect the transcript, such as the "
        "uncached decoder: cosine 0.98 is 14 dB, by cos = 1/√(1 + 10^(−SQNR/10))",
    ),
}

JUDGED_BY_WORDS: Mapping[str, Gate] = {
    "w8a16": Gate(
        min_cosine=0.999,
        min_sqnr_db=27.0,
        max_relative=math.inf,
        because="the limits of a program in w8a16, without that of the largest error: where functions are "
        "tables of 16 bits, one of 192,000 values of this project's trained encoder was off by 6% of the "
        "largest, at 32 dB and with the tokens of float32. The word error rate decides",
    ),
    "w8a8": Gate(
        min_cosine=-1.0,
        min_sqnr_db=10.0,
        max_relative=math.inf,
        because="the vendor of a chip of 8 bits flags less than 10 dB at the output in its layer noise "
        "analysis (docs/explanation/verification.md); compiled 8-bit encoders that transcribe as well as "
        "in float32 were measured at 14 to 16 dB (mean error 0.189, largest 13.0, of features with a "
        "standard deviation of 1.2). Above the limit the word error rate decides; below it, the words of a "
        "few clear clips can still be right",
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

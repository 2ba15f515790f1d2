"""Error codes of AWS's compiler, `neuronx-cc`: what they mean for a Whisper program, and what to do next.

A message has a code as `NCC_EVRF007`. The table has the codes that a Whisper program can meet; each has a
page in the SDK's documents, compiler/error-codes/CODE.rst. The other codes are about kernels and operators
that whisperport does not use.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from whisperport.targets.vendors.aws_neuron.chips import RELEASE

SOURCE = f"{RELEASE} compiler/error-codes"
_CODE = re.compile(r"\bNCC_([A-Z]{4}[0-9]{3})\b")
_LONGEST = 100_000  # characters of a log that are searched


@dataclass(frozen=True, slots=True)
class Code:
    """One error code.

    Attributes:
        what: what the compiler reports, as words that follow its name.
        hint: what to do next. `{program}` stands for the program's name.
    """

    what: str
    hint: str


_MEMORY = Code(
    "needs more device memory than one core has",
    "export with a smaller batch or a shorter `--window`; or use `bf16`, which halves weights and state; "
    "`whisperport plan` estimates the memory of each chip",
)
_INSTRUCTIONS = Code(
    "generated more instructions than its limit",
    "use `--option aws-neuron.optlevel=1`; or export with a smaller batch or a shorter `--window`, so that "
    "the program has fewer instructions",
)
_OPERATOR = Code(
    "does not support an operator",
    "run `neuronx-cc list-operators --framework XLA` for its list, and report the operator with the log of "
    "the stage",
)
_FLOAT8 = Code(
    "does not support this 8-bit floating-point type", "export the program in `fp32` or `bf16`"
)
_REPORT = "report this with the log of the stage: the modules of this target should not cause it"

CODES: Mapping[str, Code] = {
    "EARG001": Code(
        "does not support this size of a logical core on this chip",
        "leave `--option aws-neuron.lnc` at its default; only trn2 and trn3 can combine two cores",
    ),
    "EBVF030": _INSTRUCTIONS,
    "EHCA005": Code(
        "does not know a kernel that the program calls",
        "compile without the options that use kernels; they are listed on the target's page",
    ),
    "EMOD025": Code(
        "found a shape that is not static",
        f"{_REPORT}. In a program of your own, give every input a fixed shape, and pad or bucket it",
    ),
    "EOOM001": _MEMORY,
    "EOOM002": _MEMORY,
    "ESFH002": Code(
        "found a 64-bit integer that does not fit 32 bits",
        f"{_REPORT}. In a program of your own, use int32 for positions and tokens",
    ),
    "ESPP004": Code(
        "does not support the type of a tensor",
        "export the program in `fp32` or `bf16`",
    ),
    "ESPP047": _FLOAT8,
    "EUOC002": _OPERATOR,
    "EVRF001": _OPERATOR,
    "EVRF004": Code(
        "found complex numbers, which the device does not have",
        "compute the spectrogram on the host, as whisperport does: the encoder takes a log-mel spectrogram",
    ),
    "EVRF005": _FLOAT8,
    "EVRF007": _INSTRUCTIONS,
    "EVRF009": _MEMORY,
    "EVRF013": Code(
        "cannot find the largest of integers",
        f"{_REPORT}. In a program of your own, convert to float32 before `topk`",
    ),
    "EVRF016": Code(
        "cannot add integers in a scatter",
        f"{_REPORT}. In a program of your own, scatter float32 or bfloat16",
    ),
    "EVRF031": Code(
        "found a scatter beyond the end of its tensor",
        f"{_REPORT}. In a program of your own, check that the cache has a row for each position written",
    ),
    "EVRF035": Code(
        "found a matrix multiplication of integers",
        f"{_REPORT}. In a program of your own, convert to float32; "
        "`--option aws-neuron.flags=--implicit-integer-downcast=dot` lets the compiler do it, with a loss "
        "above 2^24",
    ),
    "EVRF051": Code(
        "does not support the 8-bit floating-point type float8_e4m3fn on this chip",
        "export the program in `fp32` or `bf16`",
    ),
    "EVRF056": Code(
        "found a lookup beyond the end of its table",
        f"{_REPORT}. In a program of your own, check that the table of positions has at least as many "
        "rows as the sequence",
    ),
    "EVRF059": Code(
        "cannot find the file of a kernel that the program calls",
        "delete the cache of NKI kernels and compile again; or compile without the options that use them",
    ),
    "EVRF060": Code(
        "found a scatter that adds integers",
        f"{_REPORT}. In a program of your own, scatter float32 or bfloat16",
    ),
    "EVRF062": Code(
        "found a 64-bit integer operation that the device does not have",
        f"{_REPORT}. In a program of your own, use int32",
    ),
    "EVRF064": Code(
        "was given a graph with shapes that do not fit each other",
        "check that torch-neuronx, torch-xla and neuronx-cc are of one release of the SDK",
    ),
    "EVRF065": Code(
        "was given a kernel of another version of NKI",
        "install the version of `nki` of the same release of the SDK",
    ),
    "EXSP001": _MEMORY,
    "EXTP004": _INSTRUCTIONS,
}


def code_in(text: str) -> str:
    """Return the first error code in a message or a log, without `NCC_`; "" if it has none."""
    match = _CODE.search(text[:_LONGEST])
    return match[1] if match else ""


def explained(code: str, program: str) -> tuple[str, str] | None:
    """Return what a code means and what to do next; None: the table does not have it."""
    known = CODES.get(code)
    if known is None:
        return None
    return f"{known.what} (NCC_{code})", known.hint.replace("{program}", program)

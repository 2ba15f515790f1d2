"""Sentences about two compared programs, as the text and the page of `compare` show them."""

import math

from whisperport.verification.diagnosis.divergence import ComparedPrograms, ComparedValue


def divergence_sentences(comparison: ComparedPrograms) -> list[str]:
    """Say where the programs diverge, and what to do next."""
    last = comparison.values[-1]
    if comparison.first is None:
        largest = max(value.error for value in comparison.values)
        if largest == 0:
            return ["The programs are equal: every matched value is identical."]
        grown = f"The largest error of a value is {largest:.1e}"
        return [f"No layer diverges: the errors are those of rounding. {grown}."]
    first = comparison.values[comparison.first]
    place = f" ({first.line})" if first.line else ""
    texts = [
        f"The programs diverge first at {first.fault}{place}: the error of `{first.name}` is "
        f"{error_text(first)}, that of what it is computed from at most {first.before:.1e}. "
        f"At the last matched value, `{last.name}`, it is {error_text(last)}."
    ]
    if joined_modules := [module for module in first.modules if module != first.fault]:
        texts.append(
            f"One of the programs joins it with {', '.join(joined_modules)}, where the fault may be too."
        )
    if first.between:
        extra = ", ".join(f"{operator} in {side}" for side, operator, _ in first.between[:6])
        texts.append(f"Before it, only one of the programs computes: {extra}.")
    if comparison.worst is not None and comparison.worst != comparison.first:
        worst = comparison.values[comparison.worst]
        texts.append(
            f"The error grows most at {worst.fault}: from {worst.before:.1e} to {error_text(worst)}."
        )
    operators = dict.fromkeys(filter(None, (first.operator, first.other_operator)))
    texts.append(
        f"Compare the weights and the arguments of this layer ({', '.join(operators)}) in both programs. "
        "If it is quantized, give it more bits, or leave it in float."
    )
    return texts


def error_text(value: ComparedValue) -> str:
    """Return the error of a value, also in dB."""
    return f"{value.error:.1e} ({decibels(value.sqnr_db)})"


def decibels(number: float) -> str:
    """Return an SQNR in words."""
    if number == math.inf:
        return "equal"
    return f"{number:.0f} dB" if math.isfinite(number) else "NaN"


def operators(value: ComparedValue) -> str:
    """Return the operators that compute a value, of both programs if they differ."""
    if value.other_operator in ("", value.operator):
        return value.operator
    return f"{value.operator}/{value.other_operator}"

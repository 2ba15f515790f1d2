"""Verify that a bundle still transcribes: compare arrays, tokens and words with the reference model.

Every comparison fails unless it passed: a NaN on either side, an output that is empty, missing or of
another shape, and a comparison of nothing are failures.
"""

from whisperport.program.checks import LEVELS, Check, Level
from whisperport.verification.array_comparison import Comparison, Gate, compare, compare_output
from whisperport.verification.error_rate import (
    TextErrors,
    Unit,
    bootstrap_interval,
    text_errors,
    unit_of,
    whisper_text_errors,
)
from whisperport.verification.machine import machine, versions
from whisperport.verification.report import Report
from whisperport.verification.tokens import (
    TOKEN_GATES,
    TokenComparison,
    TokenGate,
    TokenIdentity,
    compare_logits,
    compare_tokens,
)
from whisperport.verification.tolerances import GATES, LOWERED, REWRITTEN, gate_for

__all__ = [
    "GATES",
    "LEVELS",
    "LOWERED",
    "REWRITTEN",
    "TOKEN_GATES",
    "Check",
    "Comparison",
    "Gate",
    "Level",
    "Report",
    "TextErrors",
    "TokenComparison",
    "TokenGate",
    "TokenIdentity",
    "Unit",
    "bootstrap_interval",
    "compare",
    "compare_logits",
    "compare_output",
    "compare_tokens",
    "gate_for",
    "machine",
    "text_errors",
    "unit_of",
    "versions",
    "whisper_text_errors",
]

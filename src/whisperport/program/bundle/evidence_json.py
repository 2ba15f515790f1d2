"""Convert evidence and its checks to JSON and back."""

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from whisperport.program.bundle.strict_json import Field
from whisperport.program.checks import ALL_LEVELS, Check
from whisperport.program.evidence import KINDS, Evidence

# JSON has no such numbers, and a check may have them: the SQNR of equal arrays is infinite.
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def evidence_to_json(evidence: Evidence) -> dict[str, Any]:
    """Convert evidence to a JSON object, as it is stored in a manifest."""
    return {
        "kind": evidence.kind,
        "files": dict(evidence.files),
        "runtime": dict(evidence.runtime),
        "machine": dict(evidence.machine),
        "date": evidence.date,
        "checks": [check_to_json(check) for check in evidence.checks],
    }


def read_evidence(evidence: Field) -> Evidence:
    """Read evidence from its JSON object.

    Raises:
        BundleError: a field is missing or has a value that `evidence_to_json` does not write; the message
            names the field.
    """
    m = evidence.members([f.name for f in fields(Evidence)])
    if not re.fullmatch(r"(\d{4}-\d{2}-\d{2})?", m["date"].text(), re.ASCII):
        m["date"].reject(f"is {m['date'].text()[:80]!r}; expected a date such as 2026-11-22")
    try:
        return Evidence(
            kind=m["kind"].one_of(KINDS),
            files={path: sha256.sha256() for path, sha256 in m["files"].mapping().items()},
            runtime={name: version.text() for name, version in m["runtime"].mapping().items()},
            machine=m["machine"].json_object(),
            date=m["date"].text(),
            checks=tuple(read_check(check) for check in m["checks"].elements()),
        )
    except ValueError as error:
        evidence.reject(f"is inconsistent: {error}")


def check_to_json(check: Check) -> dict[str, Any]:
    """Convert a check to a JSON object. NaN and the infinities are written as strings."""
    return {
        "level": check.level,
        "program": check.program,
        "what": check.what,
        "value": {name: _number(value) for name, value in check.value.items()},
        "rule": check.rule,
        "passed": check.passed,
        "reason": check.reason,
    }


def read_check(check: Field) -> Check:
    """Read a check from its JSON object.

    Raises:
        BundleError: a field is missing or has a value that `check_to_json` does not write; the message
            names the field.
    """
    m = check.members([f.name for f in fields(Check)])
    try:
        return Check(
            level=m["level"].one_of(ALL_LEVELS),
            program=m["program"].text(),
            what=m["what"].text(),
            value=_numbers(m["value"]),
            rule=m["rule"].text(),
            passed=m["passed"].boolean(),
            reason=m["reason"].text(),
        )
    except ValueError as error:
        check.reject(f"is inconsistent: {error}")


def _number(number: float) -> float | str:
    """Convert an int, a float or a numpy scalar to a value that JSON can store."""
    if isinstance(number, int):
        return number
    number = float(number)
    return number if math.isfinite(number) else str(number)


def _numbers(values: Field) -> Mapping[str, float]:
    return {name: _float(value) for name, value in values.mapping().items()}


def _float(number: Field) -> float:
    if isinstance(number.value, str) and number.value in NOT_FINITE:
        return NOT_FINITE[number.value]
    number.number()
    value: float = (
        number.value
    )  # an int stays an int, since counts are shown without a decimal point
    return value

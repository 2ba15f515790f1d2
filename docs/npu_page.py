"""Generate the page of what NPU compilers made of the embedded model, measured by benchmarks/chips/npu.py.

python docs/npu_page.py
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from whisperport.targets import get_target

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "chips.json"
PAGE = Path(__file__).parent / "reference" / "npu-compilers.md"

HEAD = """\
# NPU compilers: what they made of the embedded model

For each chip whose compiler was installed on the measuring machine, `python -m benchmarks.chips.npu`
exported
the model `default`, compiled it, and ran it in the vendor's simulator where there is one. No chip was
used. Chips with equal results share a row.

- *dB*: the lowest signal-to-quantization-noise ratio of any output of the program against float32, over
  the simulated clips or calls; *-* means that none was compared.
- *Tokens*: clips of which every token equals the one that PyTorch decodes.
- *WER*: the largest change of the word error rate on these clips. The encoder is simulated; its output is
  decoded on the CPU.

"""
COLUMNS = (
    "Chips",
    "Precision",
    "Evidence",
    "Programs",
    "Encoder dB",
    "Step dB",
    "Tokens",
    "WER",
)


def npu_page() -> str:
    """Return the page: a table of chips and precisions, and what was rejected with its reason."""
    rows = sorted(_recorded(), key=lambda row: (row["target"], row["precision"]))
    written = [row for row in rows if not row["refused"]]
    refused = [row for row in rows if row["refused"]]
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    chips = _joined((_cells(row), f"`{row['target']}`") for row in written)
    lines += [f"| {' | '.join([had, *cells])} |" for cells, had in chips.items()]
    text = HEAD + "\n".join(lines) + "\n"
    if refused:
        text += "\n## Rejected\n\nwhisperport wrote no bundle for these: "
        text += "the simulated programs disagree with the model.\n\n"
        reasons = _joined(
            ((row["precision"], row["refused"].splitlines()[0]), f"`{row['target']}`")
            for row in refused
        )
        text += "".join(
            f"- {chips} in {precision}: {reason}\n"
            for (precision, reason), chips in reasons.items()
        )
    return text + _notes(written) + _where(rows)


def _joined(pairs: Iterable[tuple[tuple[str, ...], str]]) -> dict[tuple[str, ...], str]:
    """Join the names that have equal values: values -> names."""
    found: dict[tuple[str, ...], list[str]] = {}
    for values, name in pairs:
        found.setdefault(values, []).append(name)
    return {values: ", ".join(dict.fromkeys(names)) for values, names in found.items()}


def _recorded() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))["npu"]["rows"]
    return rows


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    programs = row["programs"]
    checks = [check for program in programs for check in program["checks"]]
    free = [c for c in checks if c["level"] == "tokens" and c["what"].endswith(", free")]
    words = [check for check in checks if check["level"] == "words"]
    return (
        row["precision"],
        _evidence(
            {kind for program in programs for kind in program["kinds"]}, compared=bool(checks)
        ),
        str(len(programs)),
        _lowest(checks, "encoder"),
        _lowest(checks, "step"),
        f"{sum(c['passed'] for c in free)} of {len(free)}" if free else "-",
        f"{max(100 * check['value']['change'] for check in words):+.1f}%" if words else "-",
    )


def _evidence(kinds: set[str], *, compared: bool) -> str:
    """Say what was done with the compiled programs; an emulator runs what the compiler read."""
    if "simulated" in kinds:
        return "simulated"
    return "compiled; its quantized graph run on the CPU" if compared else "compiled"


def _lowest(checks: list[dict[str, Any]], program: str) -> str:
    found = [
        check["value"]["sqnr_db"]
        for check in checks
        if (check["level"], check["program"]) == ("arrays", program) and "sqnr_db" in check["value"]
    ]
    return f"{min(found):.1f}" if found else "-"


def _notes(rows: list[dict[str, Any]]) -> str:
    """Return what the compilers noted of single programs, such as their own estimates."""
    notes = _joined(
        (
            (f"`{row['target']}` in {row['precision']}", re.sub(r" \(\d+ times\)", "", note)),
            f"`{program['name']}`",
        )
        for row in rows
        for program in row["programs"]
        for note in program["notes"]
    )
    merged = _joined(((programs, note), where) for (where, note), programs in notes.items())
    lines = [f"- {where}, {programs}: {note}\n" for (programs, note), where in merged.items()]
    return "\n## Notes of the compilers\n\n" + "".join(lines) if lines else ""


def _where(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "\nNot measured yet.\n"
    compilers = {
        f"{_sdk(row['target'])} ({program['compiler']})"
        for row in rows
        for program in row["programs"]
        if program["compiler"]
    }
    machines = {f"{row['machine']['cpu']}, {row['machine']['cores']} cores" for row in rows}
    dates = {row["date"] for row in rows}
    return (
        f"\nMeasured on {' and '.join(sorted(machines))}, {', '.join(sorted(dates))}. "
        f"Compilers: {', '.join(sorted(compilers))}.\n"
    )


def _sdk(target: str) -> str:
    compiler = get_target(target).compiler
    return compiler.toolchain if compiler else target


if __name__ == "__main__":
    PAGE.write_text(npu_page(), encoding="utf-8")
    print(PAGE.relative_to(RESULTS.parents[2]))

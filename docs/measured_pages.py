"""Generate the pages of measurements: NPU compilers, and predictions of `check` against partitioners.

python docs/measured_pages.py
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from whisperport.targets import get_target

ROOT = Path(__file__).parents[1]
NPU_RESULTS = ROOT / "benchmarks" / "results" / "chips.json"
NPU_PAGE = Path(__file__).parent / "reference" / "npu-compilers.md"

NPU_HEAD = """\
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
NOTES_HEAD = """
## Notes of the compilers

In quotes is what a compiler printed before it continued; its effect on a chip is not known.

"""
PRINTED = re.compile(
    r"the compiler printed ('.*') and continued(?: \(\d+ times\))?; its effect on a chip is not known"
)
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
    text = NPU_HEAD + "\n".join(lines) + "\n"
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
    rows: list[dict[str, Any]] = json.loads(NPU_RESULTS.read_text(encoding="utf-8"))["npu"]["rows"]
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
            (f"`{row['target']}` in {row['precision']}", PRINTED.sub(r"\1", note)),
            f"`{program['name']}`",
        )
        for row in rows
        for program in row["programs"]
        for note in program["notes"]
    )
    merged = _joined(((programs, note), where) for (where, note), programs in notes.items())
    lines = [f"- {where}, {programs}: {note}\n" for (programs, note), where in merged.items()]
    return NOTES_HEAD + "".join(lines) if lines else ""


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


PREDICTIONS_RESULTS = ROOT / "benchmarks" / "results" / "answers.json"
PREDICTIONS_PAGE = Path(__file__).parent / "reference" / "predictions.md"

PREDICTIONS_HEAD = """\
# Predictions of `check` against real partitioners

`whisperport check` predicts which nodes of a program a target does not delegate, and how many subgraphs it
makes. Here each prediction is compared with what the target's own partitioner did. The programs are models
of other libraries, small and with random weights.

- *Recall*: of the nodes that were not delegated, those that were predicted. *Precision*: of the nodes that
  were predicted, those that were not delegated. *-*: there were none.
- *Compute nodes*: nodes with operations, and lookups. The other nodes only move data.
- *Held out*: programs that were measured only after the last correction of the rules.
- `xnnpack`: nodes of the exported torch program, lowered as it is by ExecuTorch. `litert`: operators of the
  `.tflite` file that litert_torch wrote. `sm8550`: nodes of the ONNX file, for the simulator of Qualcomm's
  execution provider. For MediaTek's boards `check` asks the vendor's partitioner itself.

"""


def predictions_page() -> str:
    """Return the page: recall and precision of each target, and each wrong prediction."""
    result = json.loads(PREDICTIONS_RESULTS.read_text(encoding="utf-8"))["predictions"]
    rows = [row for row in result["rows"] if "failed" not in row]
    targets = list(dict.fromkeys(row["target"] for row in result["rows"]))
    lines = [
        "| Target | Programs | Not delegated | Recall | Precision | All nodes: recall | Precision | "
        "Subgraphs right |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for target in targets:
        of = [row for row in rows if row["target"] == target]
        lines.append(_total(f"`{target}`", of))
        if held := [row for row in of if row["held_out"]]:
            lines.append(_total("of these, held out", held))
    text = PREDICTIONS_HEAD + "\n".join(lines) + "\n\n"
    text += f"{result['measured_on']}, `{result['command']}`; "
    text += ", ".join(f"{name} {version}" for name, version in result["versions"].items()) + ".\n"
    text += f"\n{result['note']}\n" if result.get("note") else ""
    text += "\n## Wrong predictions\n\n"
    text += _wrong(rows, result["explained"]) or "There are none.\n"
    if failed := [row for row in result["rows"] if "failed" in row]:
        text += "\n## Not compared\n\n"
        programs: dict[tuple[str, str], list[str]] = {}
        for row in failed:
            reason = f"{row['failed']}: {row['why']}".rstrip(": ")
            programs.setdefault((row["target"], reason), []).append(row["program"])
        text += "".join(
            f"- `{target}`, {', '.join(names)}: {reason}\n"
            for (target, reason), names in programs.items()
        )
    return (
        text
        + f"\nEach program is in the [results](../../{PREDICTIONS_RESULTS.relative_to(ROOT)}).\n"
    )


def _total(name: str, rows: list[dict[str, Any]]) -> str:
    cells = [name, str(len(rows)), str(sum(row["compute"]["undelegated"] for row in rows))]
    for kind in ("compute", "all"):
        right, real, predicted = (
            sum(row[kind][key] for row in rows) for key in ("right", "undelegated", "predicted")
        )
        cells += [_ratio(right, real), _ratio(right, predicted)]
    known = [row for row in rows if row["predicted_subgraphs"] is not None]
    equal = sum(row["subgraphs"] == row["predicted_subgraphs"] for row in known)
    return f"| {' | '.join([*cells, f'{equal} of {len(known)}' if known else 'not predicted'])} |"


def _ratio(part: int, total: int) -> str:
    return f"{part / total:.3f}" if total else "-"


def _wrong(rows: list[dict[str, Any]], explained: dict[str, str]) -> str:
    """Return a table of nodes that were missed or predicted wrongly, those with one cause in one row."""
    lines: dict[tuple[str, ...], Counter[str]] = {}
    for row in rows:
        for kind, what in (("missed", "not predicted"), ("wrong", "predicted, but delegated")):
            for text in row[kind].values():
                reason = next((e for key, e in explained.items() if key in text), "not explained")
                key = (f"`{row['target']}`", row["program"], what, reason)
                lines.setdefault(key, Counter())[text.split(":")[0].replace(">", "")] += 1
    if not lines:
        return ""
    head = "| Target | Program | What | Nodes | Why |\n|---|---|---|---|---|\n"
    cells = (
        (target, program, what, ", ".join(f"{n} {op}" for op, n in operators.items()), reason)
        for (target, program, what, reason), operators in lines.items()
    )
    return head + "".join(f"| {' | '.join(row)} |\n" for row in cells)


PAGES = {NPU_PAGE: npu_page, PREDICTIONS_PAGE: predictions_page}

if __name__ == "__main__":
    for path, text in PAGES.items():
        path.write_text(text(), encoding="utf-8")
        print(path.relative_to(path.parents[2]))

"""Generate the page that compares predictions of `check` with real partitioners.

python docs/predictions_page.py
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "answers.json"
PAGE = Path(__file__).parent / "reference" / "predictions.md"

HEAD = """\
# Predictions of `check` against real partitioners

`whisperport check` predicts which nodes of a program a target does not delegate, and how many subgraphs it
makes. Here each prediction is compared, node by node, with what the target's own partitioner did with the
same program. The programs are models of other libraries, small and with random weights.

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
    result = json.loads(RESULTS.read_text(encoding="utf-8"))["predictions"]
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
    text = HEAD + "\n".join(lines) + "\n\n"
    text += f"{result['measured_on']}, `{result['command']}`; "
    text += ", ".join(f"{name} {version}" for name, version in result["versions"].items()) + ".\n"
    text += f"\n{result['note']}\n" if result.get("note") else ""
    text += "\n## Wrong predictions\n\n"
    text += _wrong(rows, result["explained"]) or "There are none.\n"
    if failed := [row for row in result["rows"] if "failed" in row]:
        text += "\n## Not compared\n\n"
        text += "".join(
            f"- `{r['target']}`, {r['program']}: {r['failed']}: {r['why']}\n" for r in failed
        )
    return text + f"\nEach program is in the [results](../../{RESULTS.relative_to(ROOT)}).\n"


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
    """Return a table of nodes that were missed or predicted wrongly, equal ones of a program in one row."""
    lines: dict[tuple[str, ...], int] = {}
    for row in rows:
        for kind, what in (("missed", "not predicted"), ("wrong", "predicted, but delegated")):
            for text in row[kind].values():
                reason = next((e for key, e in explained.items() if key in text), "not explained")
                key = (
                    f"`{row['target']}`",
                    row["program"],
                    what,
                    text.split(":")[0].replace(">", ""),
                    reason,
                )
                lines[key] = lines.get(key, 0) + 1
    if not lines:
        return ""
    head = "| Target | Program | Nodes | What | Operator | Why |\n|---|---|---|---|---|---|\n"
    cells = ((a, b, str(n), *rest) for (a, b, *rest), n in lines.items())
    return head + "".join(f"| {' | '.join(one)} |\n" for one in cells)


if __name__ == "__main__":
    PAGE.write_text(predictions_page(), encoding="utf-8")

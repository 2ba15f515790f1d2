"""Write the results of a campaign as a table and as a JSON file."""

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuzz.campaign import Campaign, Tally

RESULTS = Path(__file__).with_name("results.json")  # a list of campaigns
PACKAGES = (
    "whisperport",
    "onnxruntime",
    "executorch",
    "torch",
    "onnx",
    "tokenizers",
    "av",
    "numpy",
)
HEADINGS = ("format", "read by", "inputs", "rejected", "accepted", "findings", "slowest", "memory")


def table(campaign: Campaign) -> str:
    """Return a Markdown table with a row for each format, and the sum."""
    readers = {entry.name: entry.reader for entry in campaign.formats}
    rows = [_row(name, f"`{readers[name]}`", tally) for name, tally in campaign.tallies.items()]
    rows.append(_row("all", "", total(campaign.tallies)))
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def total(tallies: Mapping[str, Tally]) -> Tally:
    """Return the sums over all formats; for time and memory, the maximum."""
    found = Tally()
    for tally in tallies.values():
        found.inputs += tally.inputs
        found.rejected += tally.rejected
        found.accepted += tally.accepted
        found.seconds += tally.seconds
        found.slowest_s = max(found.slowest_s, tally.slowest_s)
        found.peak_bytes = max(found.peak_bytes, tally.peak_bytes)
        for kind, count in tally.findings.items():
            found.findings[kind] = found.findings.get(kind, 0) + count
    return found


def _row(name: str, reader: str, tally: Tally) -> tuple[str, ...]:
    findings = ", ".join(f"{count} {kind}" for kind, count in tally.findings.items()) or "0"
    counts = (str(tally.inputs), str(tally.rejected), str(tally.accepted), findings)
    return (
        name,
        reader,
        *counts,
        f"{tally.slowest_s:.1f} s",
        f"{tally.peak_bytes / 2**20:.0f} MiB",
    )


def save(campaign: Campaign, wall_s: float, command: str) -> Path:
    """Add the campaign to the JSON file, in place of those whose formats it has; return the file's path."""
    from whisperport.verification import machine, versions

    result: dict[str, Any] = {
        "what": "mutated inputs, each passed to the function or command that a user would call; limits "
        "30 s and 2 GiB per input",
        "seed": campaign.seed,
        "inputs": total(campaign.tallies).inputs,
        "wall_s": round(wall_s, 1),
        "formats": {name: vars(tally) for name, tally in campaign.tallies.items()},
        "findings": [
            {"format": name, "kind": kind, "where": where, "inputs": len(numbers)}
            for (name, kind, where), numbers in campaign.found.items()
        ],
        "machine": machine(),
        "versions": versions(PACKAGES),
        "measured_on": datetime.date.today().isoformat(),
        "command": command,
    }
    earlier = json.loads(RESULTS.read_text())
    kept = [each for each in earlier if not each["formats"].keys() <= result["formats"].keys()]
    RESULTS.write_text(json.dumps([*kept, result], indent=1) + "\n")
    return RESULTS

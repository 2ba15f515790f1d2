"""What `--target auto` measured: the time of each program on each target, and the choice."""

from typing import Any

from whisperport.cli.console import print_lines, print_table
from whisperport.fastest import Fastest


def print_timed(fastest: Fastest) -> None:
    """Print a row per program with its time on each target, and the targets that were not measured."""
    targets = list(dict.fromkeys(one.target for one in fastest.timed))
    cells = {
        (one.program, one.target): f"{one.ms:.2f} ms" if one.verified else "not verified"
        for one in fastest.timed
    }
    print_table(
        ("program", *targets, "chosen"),
        [
            (name, *(cells.get((name, target), "") for target in targets), entry.target)
            for entry in fastest.bundle.manifest.programs
            for name in [entry.spec.name]
        ],
    )
    print_lines("", *(f"not measured: {name}: {why}" for name, why in fastest.rejected.items()))


def timed_json(fastest: Fastest) -> dict[str, Any]:
    """Return the times, and the targets that were not measured, as a JSON object."""
    return {
        "programs": [
            {"program": one.program, "target": one.target, "ms": one.ms, "verified": one.verified}
            for one in fastest.timed
        ],
        "not_measured": dict(fastest.rejected),
    }

"""Print the results of this comparison as tables of at most 100 columns."""

from collections.abc import Iterable, Mapping
from typing import Any

NAME = 30
REASON = 65


def print_tables(result: Mapping[str, Any]) -> None:
    cases: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        cases.setdefault((row["model"], row["case"]), []).append(row)
    for (model, case), rows in cases.items():
        print(f"\n{model}: {case}")
        heading = f"{'s':>9}{'ratio':>8}{'CPU s / audio s':>17}{'CPU ratio':>11}{'MiB':>8}"
        print(
            f"{'':{NAME}}{heading}{'tokens' if any('tokens' in row for row in rows) else 'WER':>9}"
        )
        for row in sorted_by(rows, "wall_s"):
            print(f"{row['contender']:{NAME}}{row.get('reason') or figures(row)}"[: NAME + REASON])
    if result["start_up"]:
        print_start_up(result["start_up"])


def figures(row: Mapping[str, Any]) -> str:
    quality = str(row["tokens"]) if "tokens" in row else f"{row['wer']:.1%}"
    return (
        f"{row['wall_s']:9.3f}{number(row['ratio'], 8)}{row['cpu_s_per_audio_s']:17.4f}"
        f"{number(row['cpu_ratio'], 11)}{number(row['peak_mib'], 8, 0)}{quality:>9}"
    )


def print_start_up(rows: Iterable[Mapping[str, Any]]) -> None:
    print("\nembedded: start-up in a new process, seconds of CPU time (wall-clock time)")
    parts = ("import", "load", "first", "total")
    print(f"{'':{NAME}}{''.join(f'{part:>14}' for part in parts)}{'CPU ratio':>11}")
    for row in sorted_by(
        [r | {"total_s": r.get("total", {}).get("cpu_s")} for r in rows], "total_s"
    ):
        if "reason" in row:
            print(f"{row['contender']:{NAME}}{row['reason']}"[: NAME + REASON])
            continue
        times = (f"{row[part]['cpu_s']:.2f} ({row[part]['wall_s']:.2f})" for part in parts)
        shown = "".join(f"{time:>14}" for time in times)
        print(f"{row['contender']:{NAME}}{shown}{number(row.get('cpu_ratio'), 11)}")


def sorted_by(rows: Iterable[Mapping[str, Any]], what: str) -> list[Mapping[str, Any]]:
    """Return the fastest row first; those without a figure are last."""
    return sorted(rows, key=lambda row: (row.get(what) is None, row.get(what) or 0.0))


def number(value: float | None, width: int, digits: int = 2) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"

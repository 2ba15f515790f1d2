"""Compare the times that `whisperport plan` predicts with published ones that it does not follow from.

    python -m benchmarks.chips.predicted

Prints a Markdown table. Nothing is measured: the published times are those in the targets' own modules.
"""

from whisperport.build.predicted_times import PARTS, as_measured, ms_of, predict
from whisperport.targets import TARGETS

Row = tuple[str, str, str, str, float, float, float, float]


def rows() -> list[Row]:
    """Return target, software, model, part, published ms, predicted ms, and both ends of the interval."""
    return [
        (
            target.spec.name,
            f"{times.precision}, {times.software}",
            model,
            part,
            published,
            1e3 * prediction.seconds,
            1e3 * prediction.interval_s[0],
            1e3 * prediction.interval_s[1],
        )
        for target in TARGETS
        for times in target.published
        for part in PARTS
        for model, published in ms_of(times, part).items()
        if model not in times.fitted
        for prediction in predict(target, as_measured(model, times), times.precision)
        if (prediction.part, prediction.software) == (part, times.software)
        and prediction.interval_s
    ]


def main() -> None:
    """Print a row for each model and part, over all chips, and how many intervals hold the time."""
    found, held = rows(), 0
    print(
        "| Programs | Model | Part | Chips | Errors | In the interval |\n|---|---|---|---|---|---|"
    )
    for kind in dict.fromkeys((row[1], row[2], row[3]) for row in found):
        these = [row for row in found if (row[1], row[2], row[3]) == kind]
        inside = sum(low <= published <= high for *_, published, _, low, high in these)
        held += inside
        errors = ", ".join(f"{row[0]} {100 * (row[5] / row[4] - 1):+.0f}%" for row in these)
        print(f"| {' | '.join(kind)} | {len(these)} | {errors} | {inside} of {len(these)} |")
    print(f"\n{held} of {len(found)} published times are in their interval, which should hold 80%.")


if __name__ == "__main__":
    main()

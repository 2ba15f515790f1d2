"""Draw the ratios that `bench_peers.py` measured. It runs in the peers' environment, for matplotlib.

python plot.py RESULTS.json PLOT.svg
"""

import json
import sys
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib import rcParams

rcParams["svg.hashsalt"] = "peers"  # the same file for the same figures

OURS, PEER = "#1f6fb4", "#a8b0b8"
COLUMNS = 3


def main():
    source, plot = map(Path, sys.argv[1:])
    result = json.loads(source.read_text())
    cases = {}
    for row in result["rows"]:
        if row.get("ratio") is not None:
            cases.setdefault(f"{row['model']}: {row['case']}", []).append(row)
    n_rows = -(-len(cases) // COLUMNS)
    most = max(len(rows) for rows in cases.values())
    figure, axes = plt.subplots(
        n_rows,
        COLUMNS,
        figsize=(15, n_rows * (0.27 * most + 0.9)),
        squeeze=False,
        layout="constrained",
    )
    for axis, (title, rows) in zip(axes.flat, cases.items(), strict=False):
        draw(axis, title, sorted(rows, key=lambda row: -row["ratio"]))
    for axis in list(axes.flat)[len(cases) :]:
        axis.axis("off")
    machine = result["machine"]
    figure.suptitle(
        f"Time relative to whisperport's defaults; shorter is faster. {machine['cpu']}, "
        f"{result['threads']} threads, {result['measured_on']}",
        fontsize=11,
    )
    figure.savefig(plot, metadata={"Date": None})


def draw(axis, title, rows):
    names = [row["contender"] for row in rows]
    ratios = [row["ratio"] for row in rows]
    colours = [OURS if name.startswith("whisperport") else PEER for name in names]
    bars = axis.barh(names, ratios, color=colours)
    axis.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=3, fontsize=8)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_title(title, fontsize=10)
    axis.tick_params(labelsize=8)
    axis.set_xlim(0, 1.15 * max(ratios))
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()

"""The picture of infra/examples/pretrained/README.md, of what `tests.gpu.pretrained` found.

    python -m tests.gpu.pretrained_picture RESULT.json PNG
    python -m tests.gpu.pretrained_picture RESULT.json PNG BESIDE.json

`BESIDE` has other runs by name, as `tests.gpu.reasoner` finds them: under kills, of a peer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from tests.gpu.reasoner_picture import line

SEEDS = ("seed0", "seed1", "seed2")
CONTROL = "control"
APART = {"kl": ("with a KL term", "tab:cyan"), "long": ("600 steps", "black")}
OTHERS = ("tab:orange", "tab:red", "tab:brown", "tab:pink", "tab:olive")

LAST = 3  # points of a curve that are its end


def at_end(run: dict[str, Any]) -> dict[str, float]:
    """Accuracy of what a run exported, or of the last points of its curve."""
    if "after" in run:
        return {name: cell["pass@1"][0] for name, cell in run["after"]["accuracy"].items()}
    points = [point["accuracy"] for point in run["curve"][-LAST:]]
    return {name: sum(one[name][0] for one in points) / len(points) for name in points[0]}


def bars(axes: Any, told: dict[str, Any], seeds: Sequence[str]) -> None:
    """Of each kind and level that was trained: accuracy before, after, and of the control."""
    trained = told["runs"][seeds[0]]["curve"][0]["accuracy"]
    cells = [name for name in told["warm"]["accuracy"] if name in trained and name[:3] != "all"]
    before = {name: told["warm"]["accuracy"][name]["pass@1"][0] for name in cells}
    columns = {"before": [before], "after": [at_end(told["runs"][seed]) for seed in seeds]}
    if CONTROL in told["runs"]:
        columns["rewards permuted"] = [at_end(told["runs"][CONTROL])]
    colors = {"before": "0.8", "after": "tab:blue", "rewards permuted": "0.5"}
    width = 0.8 / len(columns)
    for place, (label, found) in enumerate(columns.items()):
        found_RC = [[one[cell] for cell in cells] for one in found]
        means = [sum(column) / len(column) for column in zip(*found_RC, strict=True)]
        x = [at + (place - (len(columns) - 1) / 2) * width for at in range(len(cells))]
        axes.bar(x, means, width, label=label, color=colors[label])
        for own in found_RC:
            axes.plot(x, own, ".", color="0.2", markersize=3)
    axes.set_xticks(range(len(cells)), cells, rotation=60, ha="right")


def main(argv: Sequence[str]) -> int:
    """Left: all trained kinds by GPU-seconds, of all runs. Right: each kind before and after, of
    the seeds."""
    told, *others = (json.loads(Path(n).read_text(encoding="utf-8")) for n in (argv[0], *argv[2:]))
    runs = {name: run for name, run in told["runs"].items() if run["curve"]}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    for number, name in enumerate(SEEDS):
        if name in runs:
            line(left, runs[name], "gpu_s", "all", label=f"seed {number}", color=f"C{number * 2}")
    for name, (label, color) in APART.items():
        if name in runs:
            line(left, runs[name], "gpu_s", "all", label=label, color=color)
    if CONTROL in runs:
        line(left, runs[CONTROL], "gpu_s", "all", label="rewards permuted", color="0.6")
    for number, (name, run) in enumerate(others[0]["runs"].items() if others else ()):
        line(left, run, "gpu_s", "all", label=name, color=OTHERS[number], linestyle="--")
    bars(right, told, [name for name in SEEDS if name in runs] or sorted(runs))
    left.set(
        title="Gemma 3 270M, kinds that it was trained on",
        xlabel="GPU-seconds behind the first step",
    )
    right.set(title="Each kind and level, mean of the seeds (dots: each)")
    for axes in (left, right):
        axes.set(ylabel="held-out accuracy", ylim=(0, 1))
        axes.grid(alpha=0.3, axis="y")
        axes.legend(loc="upper left", ncols=2, fontsize="small")
    figure.savefig(argv[1], dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

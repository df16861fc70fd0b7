"""The picture of infra/examples/reasoner/README.md, of a result file that `reasoner` runs make up.

python -m tests.gpu.reasoner_picture tests/bench/results/reasoner_one_h200-2026-11-23.json PNG
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

ALONE = {"ours": ("rlstreams", "tab:blue"), "trl": ("TRL GRPOTrainer", "tab:orange")}
SEEDS = ("ours", "seed1", "seed2")
WIDE = 1.96  # standard errors of a 95 % interval


def line(axes: Any, of: dict[str, Any], by: str, cell: str, **style: Any) -> None:
    """One run's accuracy with its interval, by `gpu_s` or by `step`."""
    points = [(point[by], *point["accuracy"][cell]) for point in of["curve"]]
    x, mean, num = zip(*points, strict=True)
    half = [WIDE * (m * (1 - m) / n) ** 0.5 for m, n in zip(mean, num, strict=True)]
    axes.errorbar(x, mean, half, marker="o", markersize=4, capsize=2, linewidth=1.6, **style)


def main(argv: Sequence[str]) -> int:
    """Left: over GPU-seconds beside the peer. Right: a hard level by step, three seeds, control."""
    runs = json.loads(Path(argv[0]).read_text(encoding="utf-8"))["runs"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, (label, color) in ALONE.items():
        line(left, runs[name], "gpu_s", "all", label=label, color=color)
    for number, name in enumerate(SEEDS):
        line(right, runs[name], "step", "all 4", label=f"seed {number}", color=f"C{number * 2}")
    line(right, runs["control"], "step", "all 4", label="rewards permuted", color="0.6")
    left.set(title="Levels 3 to 5, one H200 for all roles", xlabel="seconds since the first step")
    right.set(title="Level 4, three seeds and the control", xlabel="steps")
    for axes in (left, right):
        axes.set(ylabel="held-out accuracy (95 %)", ylim=(0, 0.8))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.savefig(argv[1], dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The learning curve as PNG, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlstreams.streams.views.feed import ViewState
from rlstreams.up.live.words import KillMark

INK, MUTED, GRID = "#24292f", "#8c959f", "#e4e7eb"
BLUE, GREY, RED = "#0969da", "#afb8c1", "#cf222e"


def save_curve(views: ViewState, kills: Sequence[KillMark], title: str, path: Path) -> None:
    """Write reward and held-out accuracy by step, with a stroke for each kill; 1280 x 640 pixels,
    legible at half of that."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8.0, 4.0), facecolor="white")
    # Measuring the labels instead (`layout="constrained"`) would take most of a report's time.
    figure.subplots_adjust(left=0.08, right=0.97, top=0.9, bottom=0.12)
    axes = figure.add_subplot()
    rewards, held_out = [(p.step, p.reward) for p in views.run.steps], views.held_out
    for points, color, label, mark in (
        (rewards, GREY, "reward, training batch", "o" if len(rewards) == 1 else None),
        (held_out, BLUE, "accuracy, held-out problems", "o"),
    ):
        axes.plot(
            [x for x, _ in points], [y for _, y in points], color=color, label=label, marker=mark,
            linewidth=2.0, markersize=5, clip_on=False, zorder=3,
        )  # fmt: skip
    for kill in kills:
        axes.axvline(kill.step, color=RED, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    shown = [y for _, y in (*rewards, *held_out)]
    is_share = all(0 <= y <= 1 for y in shown)  # a reward function of a user's may give anything
    axes.set_xlim(0, max([1, *(x for x, _ in (*rewards, *held_out))]))
    if is_share:
        axes.set_ylim(0, 1.02)
    axes.set_title(title, loc="left", fontsize=12, color=INK, pad=12)
    axes.set_xlabel("optimizer step", color=MUTED)
    axes.set_ylabel("share of problems solved" if is_share else "reward", color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
    axes.tick_params(colors=MUTED, labelcolor=MUTED, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.legend(loc="lower right", fontsize=9, labelcolor=INK, framealpha=0.0)
    figure.savefig(path, dpi=160)

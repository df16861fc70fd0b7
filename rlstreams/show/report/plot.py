"""The learning curve as PNG, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rlstreams.streams.views.feed import ViewState
from rlstreams.up.live.words import KillMark

_Axes: TypeAlias = Any  # matplotlib is not typed here
_Figure: TypeAlias = Any
INK, MUTED, GRID = "#24292f", "#8c959f", "#e4e7eb"
BLUE, GREY, RED = "#0969da", "#afb8c1", "#cf222e"
_LABELS = 8  # of kills: more would lie over each other
_DPI = 160


def save_curve(views: ViewState, kills: Sequence[KillMark], title: str, path: Path) -> None:
    """Write the curve as PNG, 1280 x 640 pixels, legible at half of that."""
    figure, axes = _figure(8.0, 4.0)
    figure.set_facecolor("white")
    _draw_curve(axes, views, kills)
    figure.subplots_adjust(top=0.9, right=0.97)
    axes.set_title(title, loc="left", fontsize=12, color=INK, pad=12)
    figure.savefig(path, dpi=_DPI)


def _figure(width_inches: float, height_inches: float) -> tuple[_Figure, _Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches))
    FigureCanvasAgg(figure)
    left, bottom = 0.62 / width_inches, 0.45 / height_inches
    # Measuring the labels instead (`layout="constrained"`) would take most of a report's time.
    figure.subplots_adjust(left=left, right=0.985, top=1 - 0.12 / height_inches, bottom=bottom)
    return figure, figure.add_subplot()


def _draw_curve(axes: _Axes, views: ViewState, kills: Sequence[KillMark]) -> None:
    rewards = [(p.step, p.reward) for p in views.run.steps]
    held_out = views.held_out
    is_one = len(rewards) == 1
    for points, color, label, mark in (
        (rewards, GREY, "reward, training batch", "o" if is_one else None),
        (held_out, BLUE, "accuracy, held-out problems", "o"),
    ):
        axes.plot(
            [x for x, _ in points], [y for _, y in points], color=color, label=label, marker=mark,
            linewidth=2.0, markersize=5, clip_on=False, zorder=3,
        )  # fmt: skip
    shown = [y for _, y in (*rewards, *held_out)]
    is_share = all(0 <= y <= 1 for y in shown)  # a reward function of a user's may give anything
    axes.set_xlim(0, max([1, *(x for x, _ in (*rewards, *held_out))]))
    if is_share:
        axes.set_ylim(0, 1.02)
    _style(axes, "optimizer step", "share of problems solved" if is_share else "reward", 10)
    _marks(axes, kills)
    ends = [held_out[0], held_out[-1]] if len(held_out) > 1 else held_out
    for (x, y), offset in zip(ends, [(10, -15), (-26, 11)], strict=False):
        axes.annotate(
            f"{y:.2f}", (x, y), xytext=offset, textcoords="offset points", fontsize=11,
            fontweight="bold", color=BLUE, zorder=4,
        )  # fmt: skip
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 0.1), fontsize=9, labelcolor=INK, framealpha=0.0
    )


def _marks(axes: _Axes, kills: Sequence[KillMark]) -> None:
    for n, kill in enumerate(kills):
        axes.axvline(kill.step, color=RED, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
        if len(kills) > _LABELS:
            continue
        is_far = kill.step > 0.8 * axes.get_xlim()[1]  # its label goes to the left of the stroke
        axes.annotate(
            str(kill), (kill.step, 0.02 + 0.06 * (n % 2)), xytext=(-5 if is_far else 5, 0),
            xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="right" if is_far else "left", va="bottom", fontsize=9, color=RED,
        )  # fmt: skip


def _style(axes: _Axes, x_label: str, y_label: str, size: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(x_label, fontsize=size, color=MUTED)
    axes.set_ylabel(y_label, fontsize=size, color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
    axes.tick_params(colors=MUTED, labelcolor=MUTED, labelsize=size, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)

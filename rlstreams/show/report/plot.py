"""All pictures, by matplotlib: the learning curve as PNG and SVG, small charts as SVG.

In an SVG the colours are variables of the page's style sheet, so it follows light and dark.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from rlstreams.show.report.template import number
from rlstreams.streams.views.feed import ViewState
from rlstreams.up.live.words import KillMark

_Axes: TypeAlias = Any  # matplotlib is not typed here
_Figure: TypeAlias = Any
Points: TypeAlias = Sequence[tuple[float, float]]
INK, MUTED, GRID = "#24292f", "#8c959f", "#e4e7eb"
BLUE, GREY, RED, OCHRE, VIOLET = "#0969da", "#afb8c1", "#cf222e", "#bf8700", "#8250df"
COLORS = (BLUE, GREY, OCHRE, VIOLET)
_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "line", BLUE: "a", GREY: "b", RED: "bad",
              OCHRE: "c", VIOLET: "d"}  # fmt: skip
_LABELS = 8  # of kills: more would lie over each other
_DPI = 160
_NONE = '<p class="none">no data yet</p>'


def save_curve(views: ViewState, kills: Sequence[KillMark], title: str, path: Path) -> None:
    """Write the curve as PNG, 1280 x 640 pixels, legible at half of that."""
    figure, axes = _figure(8.0, 4.0)
    figure.set_facecolor("white")
    _draw_curve(axes, views, kills)
    figure.subplots_adjust(top=0.9, right=0.97)
    axes.set_title(title, loc="left", fontsize=12, color=INK, pad=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)


def curve(views: ViewState, kills: Sequence[KillMark]) -> str:
    """The same curve as SVG."""
    figure, axes = _figure(9.4, 3.6)
    _draw_curve(axes, views, kills)
    return _svg(figure, "Reward and held-out accuracy by step")


def lines(
    series: Mapping[str, Points], title: str, y_label: str, y_min: float | None = None
) -> str:
    """A small line chart by optimizer step, of the points that are numbers."""
    kept = {
        name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()
    }
    if not any(kept.values()):
        return _NONE
    figure, axes = _figure(4.6, 2.3)
    for (_, points), color in zip(kept.items(), COLORS, strict=False):
        mark = "o" if len(points) == 1 else None
        axes.plot(
            *zip(*points, strict=True), color=color, linewidth=1.6, marker=mark, clip_on=False
        )
    axes.set_xlim(left=0)
    if y_min is not None and max(y for points in kept.values() for _, y in points) > y_min:
        axes.set_ylim(bottom=y_min)
    _style(axes, "optimizer step", y_label, 8)
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    told = "; ".join(
        f"{name}: from {number(points[0][1])} to {number(points[-1][1])}"
        for name, points in kept.items()
        if points
    )
    return _svg(figure, f"{title}. {told}")


def bars(rows: Sequence[tuple[str, Mapping[str, float]]], unit: str, title: str) -> str:
    """Horizontal bars, one a row, stacked by part; parts take the colours in turn."""
    totals = [sum(parts.values()) for _, parts in rows]
    if max(totals, default=0.0) <= 0:
        return _NONE
    figure, axes = _figure(4.6, 0.1 + 0.32 * len(rows))
    figure.subplots_adjust(left=0.14, right=1, bottom=0, top=1)
    for (name, parts), total in zip(rows, totals, strict=True):
        left = 0.0
        for value, color in zip(parts.values(), COLORS, strict=False):
            axes.barh(name, value, left=left, color=color, height=0.7)
            left += value
        axes.text(total, name, f" {number(total)} {unit}", va="center", fontsize=8, color=MUTED)
    axes.set_xlim(0, 1.2 * max(totals))
    axes.invert_yaxis()
    axes.tick_params(labelcolor=INK, labelsize=8, length=0)
    axes.xaxis.set_visible(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    told = "; ".join(f"{row[0]}: {number(total)}" for row, total in zip(rows, totals, strict=True))
    return _svg(figure, f"{title}, {unit}. {told}")


def _figure(width_inches: float, height_inches: float) -> tuple[_Figure, _Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches))
    FigureCanvasAgg(figure)
    left, bottom = 0.62 / width_inches, 0.45 / height_inches
    # Measuring the labels instead (`layout="constrained"`) would take most of a report's time.
    figure.subplots_adjust(left=left, right=0.985, top=1 - 0.12 / height_inches, bottom=bottom)
    return figure, figure.add_subplot()


def _svg(figure: _Figure, told: str) -> str:
    """The figure without what a page needs not, fetches, or names twice.

    Args:
        told: read aloud.
    """
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": told}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    view_box = re.search(r'viewBox="([^"]*)"', out.getvalue())
    assert view_box is not None
    body = out.getvalue().partition("</metadata>")[2].partition("</svg>")[0]
    body = re.sub(r'<style type="text/css">.*?</style>|<!--.*?-->', "", body, flags=re.DOTALL)
    body = re.sub(r' id="[a-z0-9]+(\.[a-z]+)?_\d+"|xlink:', "", body)
    for color, name in _VARIABLES.items():
        body = body.replace(color, f"var(--{name})")
    body = re.sub(r"\s*\n\s*", "\n", body)
    return f'<svg viewBox="{view_box[1]}" role="img" aria-label="{escape(told)}">{body}</svg>'


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

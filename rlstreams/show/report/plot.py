"""The learning curve as a PNG: reward and held-out accuracy by step, kills marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rlstreams.show.report.page import ReportInput
from rlstreams.up.live.words import KillMark, ends, over

_Axes: TypeAlias = Any  # matplotlib is not typed here
_INK, _MUTED, _GRID = "#24292f", "#8c959f", "#e4e7eb"
_ACCURACY, _REWARD, _KILL = "#0969da", "#afb8c1", "#cf222e"
_LABELS = 8  # of kills: more would lie over each other
_SIZE_INCHES = (8.0, 4.0)
_DPI = 160


def save_curve(given: ReportInput, path: Path) -> None:
    """Write the curve to `path`; 1280 x 640 pixels, legible at half of that."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, held_out = given.views.run.steps, given.views.held_out
    x_max = max([1, *(p.step for p in steps), *(step for step, _ in held_out)])
    axes.plot(
        [p.step for p in steps],
        [p.reward for p in steps],
        color=_REWARD,
        linewidth=1.6,
        label="reward, training batch",
    )
    axes.plot(
        [step for step, _ in held_out],
        [accuracy for _, accuracy in held_out],
        color=_ACCURACY,
        linewidth=2.4,
        marker="o",
        markersize=5,
        label="accuracy, held-out problems",
        clip_on=False,
        zorder=3,
    )
    shown = [*(p.reward for p in steps), *(accuracy for _, accuracy in held_out)]
    _style(axes, x_max, shown)
    _marks(axes, given.kills)
    _ends(axes, held_out)
    axes.set_title(_title(given), loc="left", fontsize=12, color=_INK, pad=12)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 0.1),
        fontsize=10,
        labelcolor=_INK,
        framealpha=1.0,
        edgecolor="none",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _title(given: ReportInput) -> str:
    curve = given.views.evaluation.curve
    if len(curve) < 2:
        return f"Run {given.run}"
    num = len(given.kills)
    killed = f"; {num} process{'es' if num > 1 else ''} {ends(given.kills)}" if num else ""
    first, last = curve[0].accuracy, curve[-1].accuracy
    answers = over(curve[0], curve[-1])
    return f"Held-out accuracy {first:.2f} to {last:.2f}, {answers}{killed}"


def _marks(axes: _Axes, kills: Sequence[KillMark]) -> None:
    for kill in kills:
        axes.axvline(kill.step, color=_KILL, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    if len(kills) > _LABELS:
        return
    for kill in kills:
        is_far = kill.step > 0.8 * axes.get_xlim()[1]  # its label goes to the left of the stroke
        axes.annotate(
            f"kill -9 {kill.worker}" if kill.killed_at_ms else str(kill),
            (kill.step, 0.02),
            xytext=(-5 if is_far else 5, 0),
            textcoords="offset points",
            ha="right" if is_far else "left",
            va="bottom",
            fontsize=9.5,
            color=_KILL,
        )


def _ends(axes: _Axes, points: Sequence[tuple[int, float]]) -> None:
    """The first and the last value, written beside their dots."""
    for (x, y), offset in zip(
        [points[0], points[-1]] if len(points) > 1 else points, [(10, -15), (-26, 11)], strict=False
    ):
        axes.annotate(
            f"{y:.2f}",
            (x, y),
            xytext=offset,
            textcoords="offset points",
            fontsize=11,
            fontweight="bold",
            color=_ACCURACY,
            zorder=4,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )


def _style(axes: _Axes, x_max: int, shown: Sequence[float]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, x_max)
    is_share = all(0 <= y <= 1 for y in shown)  # a reward function of a user's may give anything
    if is_share:
        axes.set_ylim(0, 1.02)
    axes.set_xlabel("optimizer step", fontsize=11, color=_INK)
    axes.set_ylabel("share of problems solved" if is_share else "reward", fontsize=11, color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(colors=_MUTED, labelcolor=_INK, labelsize=10, length=0)
    axes.grid(axis="y", color=_GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_MUTED)

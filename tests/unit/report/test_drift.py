"""Evaluations are of versions, curves go by step: a redo that drifted moves no point."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from rlstreams.show.report.charts import series
from rlstreams.streams.views.feed import ViewState
from rlstreams.up.live.panels import learning
from tests.unit.report.drifted_run import DRIFTS, STEPS, views_after
from tests.unit.report.sample_run import FoldOf
from tests.unit.report.test_live import live_input


def page(views: ViewState) -> object:
    """The points of the page's curves."""
    found = series(FoldOf(views))
    return found["step"], found["held_out"], found["lines"]["reward"]


def panel(views: ViewState) -> str:
    """The panel of the live view."""
    console = Console(width=60, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(learning(live_input(views=views), 60, 12))
    return captured.get()


@pytest.mark.parametrize("draw", [page, panel])
def test_a_drift_moves_no_point_of_the_curve(draw: Callable[[ViewState], object]) -> None:
    """Versions run ahead of the steps from then on, and the axis says optimizer step."""
    straight, drifted = views_after(0), views_after(DRIFTS)
    assert STEPS + DRIFTS == drifted.evaluation.curve[-1].policy_version
    assert draw(straight) == draw(drifted)

"""One set of figures: what terminal, page and report say of a run are the same values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlstreams.debug.loss.formula import _figures
from rlstreams.show.metrics.figures import NONE, of_run, of_step, parted
from rlstreams.show.report.charts import series
from rlstreams.show.report.facts import STEP_HEAD, SUMMARY, step_cells, summary
from rlstreams.show.report.html import environment
from rlstreams.show.report.page import steps_csv
from rlstreams.streams.views.feed import ViewState
from rlstreams.up.live.screen import PlainLines
from tests.factories import step_completed
from tests.unit.report.sample_run import FoldOf, views_at
from tests.unit.report.test_live import drawn, full_input


def test_the_terminal_shows_figures_of_the_run() -> None:
    """Its head and its learning pane; in words and numbers of `of_run` and `of_step`."""
    given = full_input()
    found, step = of_run(given.views, target=given.target), of_step(given.views.run.steps[-1])
    text = "\n".join(drawn(given, 120, 40))
    assert f"step {found['steps'].value} " in text
    assert f"held-out {found['held_out'].value} " in text
    assert f"{found['rate'].unit} {found['rate'].value}" in text
    for key in ("loss", "kl", "entropy", "grad_norm"):
        assert f"{step[key].name} {step[key].value}" in text
    line = [text for text in PlainLines().new(given) if text.startswith("step ")][-1]
    assert all(f"{figure.name} {figure.value}" in line for figure in step.values())


def test_a_step_shows_its_divergence_from_a_reference_where_it_has_one() -> None:
    """Beside that from the sampler, which has the shorter name; in the terminal's line too."""
    given = full_input()
    *before, point = given.views.run.steps
    assert "kl_reference" not in of_step(point)
    compared = replace(point, metrics={**point.metrics, "kl_reference": 0.038})
    run = replace(given.views.run, steps=(*before, compared))
    shown = replace(given, views=replace(given.views, run=run))
    line = [text for text in PlainLines().new(shown) if text.startswith("step ")][-1]
    assert "KL 0.0034  KL from reference 0.038  " in line
    assert "KL from reference 0.038" in "\n".join(drawn(shown))


@pytest.mark.parametrize(
    ("loss", "kl", "shown"),
    [(-4e-9, 9e-13, ("0", "0")), (-2e-6, 6e-7, ("-2e-06", "6e-07")), (math.nan, 0.0, ("nan", "0"))],
)
def test_what_rounding_alone_makes_is_shown_as_0(
    loss: float, kl: float, shown: tuple[str, str]
) -> None:
    """The first step of a run samples and trains the same weights: its KL is noise."""
    point = full_input().views.run.steps[-1]
    point = replace(point, loss=loss, metrics={**point.metrics, "kl": kl})
    found = of_step(point)
    assert (found["loss"].value, found["kl"].value) == shown
    cells = dict(zip(STEP_HEAD, step_cells(point), strict=True))
    assert (cells["loss"], cells["KL"]) == shown, "in the table of report and page"


def test_charts_have_no_rounding_and_exports_have_its_bits() -> None:
    """A chart of noise looks like one of a policy that moves."""
    views = views_at(5)
    steps = [
        replace(p, loss=(-1) ** p.step * 4e-9, metrics={**p.metrics, "kl": 9e-13})
        for p in views.run.steps
    ]
    lines = series(FoldOf(replace(views, run=replace(views.run, steps=steps))))["lines"]
    assert {0.0} == {*lines["loss"], *lines["kl"]}
    assert all(lines["entropy"])
    event = step_completed(1, loss=-4e-9, metrics={"kl": 9e-13, "entropy": 0.5})
    assert "kl 0, entropy 0.5" == _figures(event), "what `config loss` shows of a step"
    row = steps_csv(steps).splitlines()[1]
    assert ",9e-13," in row
    assert "4e-09," in row


def test_page_and_report_lay_out_all_of_them() -> None:
    """The run's progress on top and its cost below: value, name, unit, and what each means."""
    found = of_run(full_input().views, kills=full_input().kills, lost=0)
    parts = (
        environment()
        .get_template("parts.html")
        .make_module({"step_head": (), "answer_figures": ()})
    )
    progress, costs = parted(found)
    assert [*found.values()] == [*progress, *costs]
    html = str(parts.figures(progress)) + str(parts.costs(costs))  # type: ignore[attr-defined]
    for figure in progress:
        assert f"<b>{figure.value}</b><span>{figure.title}</span>" in html
    for figure in costs:
        assert f"<dt>{figure.value}</dt><dd>{figure.title}</dd>" in html
    for figure in found.values():
        assert f'title="{figure.about}"' in html
        assert figure.about.endswith(".")


def test_a_comparison_shows_some_of_them() -> None:
    views = full_input().views
    assert ["one", *(of_run(views)[key].value for key in SUMMARY)] == summary("one", views)


def test_before_the_first_step_there_are_no_values() -> None:
    """But of what is counted; the target is what the configuration says."""
    found = of_run(ViewState(), target=60)
    values = {key: figure.value for key, figure in found.items()}
    assert "0 of 60" == values["steps"]
    assert {NONE} == {values[key] for key in ("held_out", "reward", "rate")}
    assert "lost" not in values
    one = replace(full_input().views, evaluation=ViewState().evaluation)
    assert NONE == of_run(one)["held_out"].value

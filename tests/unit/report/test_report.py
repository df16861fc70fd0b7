"""The report: one self-contained page, well-formed charts, a curve."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from rlstreams.cli.named import configuration, opened_run
from rlstreams.schemas.events import NO_VERSION
from rlstreams.show.report.charts import charts_of, series, spoken
from rlstreams.show.report.facts import facts
from rlstreams.show.report.fold import RunFold
from rlstreams.show.report.html import STATIC
from rlstreams.show.report.page import kill_marks, steps_csv
from rlstreams.show.report.page import render_report as render
from rlstreams.streams.audit.report import Breach, BreachKind
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.views.evaluation import SamplesState, TokenRun
from rlstreams.streams.views.feed import Views, ViewState
from rlstreams.streams.workers import Restart
from rlstreams.words.screen import KillMark, number
from rlstreams.workers.config.load import load, resolved_json
from tests import factories
from tests.factories import NOW_MS
from tests.html_pages import Balance
from tests.unit.report.sample_run import FoldOf, audit_report, fold_at, report_input, views_at
from tests.unit.report.test_live import drawn, live_input


@pytest.mark.parametrize("views", [views_at(20), ViewState()], ids=["a run", "nothing yet"])
def test_the_page_is_whole_and_needs_nothing_else(views: ViewState) -> None:
    """Tags balance, charts are well-formed, no address is fetched."""
    page = render(report_input(views=views))
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert not re.search(r"https?://|src=|@import|url\((?!#)", page)
    assert json.loads(page.partition('id="data">')[2].partition("</script>")[0])["runs"]["demo"]
    for file in STATIC.iterdir():
        assert not re.search(r"https?://|@import|url\(", file.read_text("utf-8"))


def test_the_page_says_what_happened() -> None:
    """Accuracy, audit, kill, staleness, the same problem, every chart."""
    page = render(report_input())
    for words in (
        "0.42 to 0.80",
        "lost 0, trained twice 0 (read from the log)",
        "Every sample is accounted for.",
        "rollout-0 killed",
        "Entropy",
        "Engine mismatch",
        "Staleness",
        "Throughput",
        "Timeline of the processes",
        "7+8+3+9=",
        "policy version 21",
        "stale 1",
        "16 groups",
    ):
        assert words in page


def test_the_page_of_a_recording_promises_no_more_than_it_proves() -> None:
    """A recording has no consumer positions: what is in flight is not proven."""
    given = report_input()
    assert given.audit is not None
    page = render(dataclasses.replace(given, audit=audit_report(has_positions=False)))
    assert "Every sample is accounted for" not in page
    assert "Nothing is lost as far as a recording shows" in page


def test_dead_letters_are_shown_by_reason_and_spoil_the_verdict() -> None:
    """In the page with the newest detail, on the screen in red; nothing green above a few."""
    view = Views()
    for reason in ("reward", "decode", "reward"):
        view.apply(factories.dead_letter(reason=reason, detail=f"my/{reason}.py:3: KeyError"))
    views = dataclasses.replace(views_at(5), dead=view.state.dead)
    given = report_input(views=views)
    audit = dataclasses.replace(given.audit, dead_lettered=given.audit.issued // 2)
    page = render(dataclasses.replace(given, audit=audit))
    assert "my/reward.py:3: KeyError" in page
    assert "verdict bad" in page
    assert "Every sample is accounted for" not in page
    told = "dead letters: reward 2, decode 1   rlstreams dead-letters list"
    assert any(told in line for line in drawn(live_input(views=views)))


def test_what_the_environment_said_is_told_apart() -> None:
    """No policy version's colour, and no version."""
    views = views_at(5)
    first, *others = views.samples.problems
    said = TokenRun(token_ids=(1, 2), policy_version=NO_VERSION)
    then = dataclasses.replace(first.then, runs=(*first.then.runs, said))
    problems = (dataclasses.replace(first, then=then), *others)
    samples = SamplesState(problems=problems)
    page = render(report_input(views=dataclasses.replace(views, samples=samples)))
    assert 1 == page.count('<span class="muted">')
    assert "version -1" not in page


def test_parts_of_the_reward_have_charts() -> None:
    """One for each part that a step has a mean of; none where there are no parts."""
    views = views_at(5)
    steps = [
        dataclasses.replace(p, reward=2.5, metrics={**p.metrics, "reward/form": 0.5})
        for p in views.run.steps
    ]
    run = dataclasses.replace(views.run, steps=steps)
    changed = FoldOf(dataclasses.replace(views, run=run))
    _, _, flat = charts_of([series(changed)])
    assert [("reward/form", "0.5")] == [(chart.id, value) for chart, value in flat][:1]
    assert "reward/form" in render(report_input(fold=changed))
    assert "reward/form" not in render(report_input(views=views))


def test_a_breach_is_shown_as_one() -> None:
    """The verdict changes and the details are open."""
    breach = Breach(kind=BreachKind.LOST, id="5/1", detail="no trajectory")
    audit = audit_report(lost=1, breaches=(breach,), breach_counts={"lost": 1})
    page = render(report_input(audit=audit))
    assert "The log violates a guarantee." in page
    assert "<details open>" in page
    assert "5/1" in page


def test_what_a_model_wrote_is_not_html() -> None:
    page = render(report_input(decode=lambda _: "<script>alert(1)</script>\x1b[2J\u202e"))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J\\u202e" in page


def test_a_kill_is_a_process_that_came_back_without_goodbye() -> None:
    """It is marked at the step that was being made; a drained worker is not marked."""
    steps = views_at(5).run.steps
    seen_ms = steps[2].started_at_ms

    def restart(worker: str, *, was_clean: bool) -> Restart:
        return Restart(
            worker=worker,
            role="rollout",
            at_ms=seen_ms + 9000,
            last_seen_ms=seen_ms,
            was_clean=was_clean,
        )

    restarts = (restart("rollout-0", was_clean=False), restart("rollout-1", was_clean=True))
    assert kill_marks(restarts, steps) == (KillMark(step=3, worker="rollout-0"),)


def test_killed_is_said_only_of_what_up_killed() -> None:
    """Memory that ran out looks the same in the log: of that the page says restarted."""
    steps, ends_ms = views_at(5).run.steps, NOW_MS + 5000

    def restart(worker: str) -> Restart:
        return Restart(
            worker=worker, role="rollout", at_ms=ends_ms + 900, last_seen_ms=ends_ms - 100,
            was_clean=False,
        )  # fmt: skip

    restarts = (restart("rollout-0"), restart("rollout-1"))
    asked = [
        KillMark(step=4, worker="rollout-0", killed_at_ms=ends_ms),
        KillMark(step=1, worker="rollout-1", killed_at_ms=ends_ms - 3000),  # an earlier process
    ]
    killed, other = kill_marks(restarts, steps, asked)
    assert ["rollout-0 killed", "rollout-1 restarted"] == [str(killed), str(other)]
    for marks, expected in (([killed], "processes killed"), ([killed, other], "restarted")):
        assert expected in render(report_input(kills=marks))
    assert "killed" not in render(report_input(kills=[other], audit=None))


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "0"), (0.25, "0.25"), (1234.6, "1,235"), (0.0002, "2e-04")]
)
def test_numbers_are_short(value: float, expected: str) -> None:
    """Three figures at most below a hundred."""
    assert expected == number(value)


def test_values_that_are_no_numbers_are_left_out() -> None:
    """A NaN in a metric is no JSON: it is a gap in its line."""
    views = views_at(5)
    first, *others = views.run.steps
    changed = dataclasses.replace(first, loss=float("nan"))
    run = dataclasses.replace(views.run, steps=(changed, *others))
    found = series(FoldOf(dataclasses.replace(views, run=run)))
    assert [None, 0.25] == found["lines"]["loss"][:2]
    json.dumps(found, allow_nan=False)


def test_what_never_changes_is_a_number() -> None:
    """A flat line says nothing that its value does not."""
    first, others, flat = charts_of([series(fold_at(20))])
    assert ["learning", "loss", "kl", "entropy", "grad_norm"] == [c.id for c in first][:5]
    assert ("lr", "2e-04") in [(chart.id, value) for chart, value in flat]
    assert {"ratio_max", "mismatch_max"} <= {chart.id for chart in others}


def test_held_out_rows_have_an_accuracy_only_where_answers_are_right_or_wrong() -> None:
    """The name that `up` prints in its last lines, in a chart's title and in its words."""
    right_or_wrong = series(fold_at(20))
    graded = {**right_or_wrong, "measure": "reward"}
    for found, measure in (
        ([right_or_wrong], "accuracy"),
        ([graded], "reward"),
        ([right_or_wrong, graded], "reward"),
    ):
        chart = charts_of(found)[0][0]
        assert f"Reward and held-out {measure}" == chart.title
    assert "held-out accuracy 0" in spoken(chart, right_or_wrong)
    assert "held-out reward 0" in spoken(chart, graded)


def test_only_new_steps_are_sent_again() -> None:
    """With the same numbers as at first; evaluations and marks are whole each time."""
    whole, new = series(fold_at(20)), series(fold_at(20), after=17)
    assert [18, 19, 20] == new["step"]
    assert whole["held_out"] == new["held_out"]
    assert {name: line[17:] for name, line in whole["lines"].items()} == new["lines"]


def test_the_steps_are_a_table_for_others() -> None:
    head, *rows = steps_csv(views_at(5).run.steps).splitlines()
    assert {"step", "reward", "entropy", "lr"} <= set(head.split(","))
    assert [1, 2, 3, 4, 5] == [int(row.split(",")[1]) for row in rows]


def light_of(color: str) -> float:
    """Relative luminance, as WCAG 2 defines it; `color` as `#fff` or `#1f2328`."""
    digits = "".join(digit * 2 for digit in color) if len(color) == 3 else color
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(x * share for x, share in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def test_text_can_be_read() -> None:
    """Each colour of text against both grounds, light and dark: 4.5 and more (WCAG AA)."""
    style = (STATIC / "page.css").read_text("utf-8")
    schemes = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert 2 == len(schemes)
    for scheme in schemes:
        colors = dict(re.findall(r"--(\w+): #(\w+)", scheme))
        for ground in (colors.pop("paper"), colors.pop("panel")):
            for name in colors.keys() - {"line"}:
                low, high = sorted([light_of(colors[name]), light_of(ground)])
                assert (high + 0.05) / (low + 0.05) >= 4.5, (name, ground)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        configuration([str(tmp_path)], [])


def test_a_run_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    """Beside the folder that was named; without any, what may be named at all."""
    with pytest.raises(ConfigError, match="demmo is not there; there "):
        configuration([str(tmp_path / "demmo")], [])
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/config.json").write_text('{"run": {}}')
    with pytest.raises(ConfigError, match=r"demmo is not there; did you mean .*/demo\?"):
        configuration([str(tmp_path / "demmo")], [])


def test_a_run_that_never_started_is_told_so(tmp_path: Path) -> None:
    """Starting an empty broker, as a worker is told to, would show nothing."""
    config = load([], [f"--run.dir={tmp_path}", "--run.id=never"])
    with pytest.raises(ConfigError, match="run never has left no log under"), opened_run(config):
        pass


def test_a_runs_folder_brings_its_own_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"run": {"id": "demo", "dir": "elsewhere"}}))
    config = configuration([str(tmp_path)], [])
    assert (config.run.id, config.folder) == ("demo", str(tmp_path))
    with pytest.raises(ConfigError, match="alone"):
        configuration([str(tmp_path)], ["--run.id", "other"])


def test_what_is_run_names_the_gpu_and_what_rewards_are_compared_with() -> None:
    """A GPU as its maker does; a server's device is not in our configuration."""
    words = ["rollout.engine=vllm", "trainer.loss.advantage=rloo", "trainer.ranks=2"]
    claim = factories.trainer_started(
        config=resolved_json(load([], words)), versions={"device": "NVIDIA H200"}
    )
    fold = RunFold()
    fold.apply(claim)
    found = dict(facts(fold.state))
    assert "NVIDIA H200 x 2" == found["trainer's device"]
    assert "ppo, advantages by rloo" in found["algorithm"]
    assert not found.get("rollout's device")

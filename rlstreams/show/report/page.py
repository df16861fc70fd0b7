"""The report of a run as one HTML page that needs nothing else, and a comparison of several."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rlstreams.show.metrics.figures import of_agents, of_run, parted
from rlstreams.show.metrics.rows import CsvTable, step_row
from rlstreams.show.report import facts
from rlstreams.show.report.answers import FIGURES, answer_rows
from rlstreams.show.report.charts import charts_of, series, spoken, timeline
from rlstreams.show.report.fold import RunFold
from rlstreams.show.report.html import environment, inlined, render
from rlstreams.show.report.html import short as number
from rlstreams.show.report.rows import histogram, newest_group
from rlstreams.streams.audit.report import AuditReport
from rlstreams.streams.views.dead import list_command
from rlstreams.streams.views.learning import hindrance
from rlstreams.streams.views.run import StepPoint
from rlstreams.streams.workers import Restart
from rlstreams.words.sample_detail import SampleDetail
from rlstreams.words.screen import KillMark, redone_lines, spell, spelled
from rlstreams.words.texts import SampleText

FEW_DEAD = 0.05  # of the samples; the verdict is not green above it
_NEWEST = 20  # steps that the histogram is of
environment().globals |= {"step_head": facts.STEP_HEAD, "answer_figures": FIGURES}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportInput:
    """All that the report shows."""

    run: str
    fold: RunFold
    audit: AuditReport | None = None
    kills: Sequence[KillMark] = ()
    made_at: str = ""  # when the page was made, as text
    stopped: str = ""  # why the run stopped before its end; empty: it did not, or goes on
    command: str = ""  # that started it; empty: not known
    samples: Sequence[tuple[str, SampleDetail]] = ()  # why it is shown, and the sample
    texts: Mapping[str, SampleText] = field(default_factory=dict)  # by the sample's name
    decode: Callable[[Sequence[int]], str] = field(default=spell)


def chart_values(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Values with which the templates place the charts of runs, by the `series` of each."""
    first, others, flat = charts_of(list(found.values()))
    said = {
        chart.id: "; ".join(
            f"{f'{name}: ' if len(found) > 1 else ''}{spoken(chart, one)}"
            for name, one in found.items()
        )
        for chart in (*first, *others)
    }
    themes = [(theme, list(charts)) for theme, charts in groupby(others, lambda c: c.theme)]
    return {"first": first, "themes": themes, "flat": flat, "said": said}


def render_report(given: ReportInput) -> str:
    """The page, complete."""
    state = given.fold.state
    found = {given.run: series(given.fold, given.kills)}
    lives = timeline(given.fold, given.kills, state.throughput.restarts)
    lost = given.audit.lost if given.audit else None
    progress, costs = parted(of_run(state, kills=given.kills, lost=lost))
    dropped = ", ".join(f"{name} {num:,}" for name, num in sorted(state.run.dropped.items()))
    return render(
        "report.html",
        title=f"run {given.run}",
        run_name=given.run,
        runs=[given.run],
        inline=inlined({"runs": found, "timeline": lives}),
        made_at=given.made_at,
        stopped=given.stopped,
        command=given.command,
        figures=progress,
        costs=costs,
        agents=of_agents(state),
        facts=facts.facts(state),
        verdict=_verdict(given.audit),
        redone=redone_lines(state.run.redone),
        charts=_with_numbers(chart_values(found)),
        pace=facts.pace_of(state),
        hindrance=hindrance(state),
        problems=_problems(given),
        samples=[_sample(given, label, detail) for label, detail in given.samples],
        group=_group(given),
        histogram=_histogram(given.fold, state.run.steps),
        state=state,
        list_command=list_command(),
        workers=facts.workers(state),
        pulls=facts.pulls_line(state),
        dropped=dropped,
        changed=facts.claim_changes(state.run.claims),
        rows=[facts.step_cells(point) for point in reversed(state.run.steps)],
    )


def _with_numbers(charts: dict[str, Any]) -> dict[str, Any]:
    """Leave out charts that stay empty: nothing is to come on this page."""
    return {**charts, "first": [chart for chart in charts["first"] if chart.lines]}


def steps_csv(steps: Sequence[StepPoint]) -> str:
    """The steps as a table for other programs: the rows of `rlstreams metrics`."""
    out = io.StringIO()
    table = CsvTable(out)
    table.write([step_row(point) for point in steps])
    table.close()
    return out.getvalue()


def kill_marks(
    restarts: Sequence[Restart], steps: Sequence[StepPoint], kills: Sequence[KillMark] = ()
) -> tuple[KillMark, ...]:
    """Processes that came back without having said goodbye, by the step that was being made.

    Args:
        kills: those that `up` sent itself. The log does not distinguish them from a crash, from
            memory that ran out, or from a machine that was switched off.
    """
    last = steps[-1].step if steps else 0

    def killed_at_ms(restart: Restart) -> int:
        times_ms = (k.killed_at_ms for k in kills if k.worker == restart.worker)
        return next((t for t in times_ms if restart.last_seen_ms <= t <= restart.at_ms), 0)

    return tuple(
        KillMark(
            step=next((p.step for p in steps if p.finished_at_ms > restart.last_seen_ms), last),
            worker=restart.worker,
            killed_at_ms=killed_at_ms(restart),
        )
        for restart in restarts
        if not restart.was_clean
    )


def _verdict(audit: AuditReport | None) -> dict[str, Any] | None:
    if audit is None:
        return None
    share = audit.dead_lettered / max(1, audit.issued - sum(audit.in_flight.values()))
    word = "Every sample is accounted for." if audit.ok else "The log violates a guarantee."
    if audit.ok and not audit.is_proven:
        word = "Nothing is lost as far as a recording shows: what is in flight is not proven."
    if audit.ok and share > FEW_DEAD:
        word = f"Nothing is lost, but {100 * share:.0f} % of the samples were dead-lettered."
    is_fine = audit.ok and share <= FEW_DEAD
    return {
        "ok": audit.ok,
        "fine": is_fine,
        "word": word,
        "line": audit.line(),
        "text": audit.text(),
    }


def _problems(given: ReportInput) -> list[dict[str, Any]]:
    problems = given.fold.state.samples.problems
    return [
        {
            "text": given.decode(p.then.prompt_ids),
            "answers": [
                facts.shown_answer(answer, spelled(answer, given.decode))
                for answer in (p.then, p.now)
            ],
        }
        for p in sorted(problems, key=lambda p: p.then.is_right or not p.now.is_right)
    ]


def _sample(given: ReportInput, label: str, detail: SampleDetail) -> dict[str, Any]:
    name = str(detail.lineage.sample)
    row = given.fold.samples.get(*detail.lineage.sample)
    assert row is not None, "it was picked from these"
    (shown,) = answer_rows([row], given.texts.get)
    return {
        **shown,
        "label": f"{name}, {label}",
        "shown": facts.shown_tokens(detail),
        "detail": detail,
    }


def _group(given: ReportInput) -> list[dict[str, Any]]:
    with given.fold.lock:
        rows = newest_group(given.fold.samples)
    known = [row for row in rows if row.name in given.texts]
    return answer_rows(known, given.texts.get)


def _histogram(fold: RunFold, steps: Sequence[StepPoint]) -> list[list[str]]:
    with fold.lock:
        rewards = histogram(fold.samples, [p.step for p in steps[-_NEWEST:]])
    most = max((num for _, num in rewards), default=1)
    return [[number(reward), f"{num:,}", "█" * round(24 * num / most)] for reward, num in rewards]

"""From a run's topics to the report's files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from rlstreams.schemas.events import TensorError
from rlstreams.show.report.fold import FIRST, THEN, RunFold
from rlstreams.show.report.page import (
    ReportInput,
    curve_title,
    kill_marks,
    render_report,
    steps_csv,
)
from rlstreams.show.report.rows import newest_group
from rlstreams.show.report.rows import picks as picked
from rlstreams.streams.audit.auditor import ReplayedError, audit
from rlstreams.streams.audit.report import AuditReport
from rlstreams.streams.lineage.fold import Lineage
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import TopicMismatchError
from rlstreams.streams.log.topics import Topic
from rlstreams.streams.run.run_log import RunLog
from rlstreams.streams.views.feed import Feed, ViewState
from rlstreams.words.sample_detail import SampleDetail, sample_detail
from rlstreams.words.screen import KillMark
from rlstreams.words.spelling import NUMBERS, Spelling
from rlstreams.words.texts import SampleText, text_of

INK, MUTED, GRID = "#24292f", "#8c959f", "#e4e7eb"
BLUE, GREY, RED = "#0969da", "#afb8c1", "#cf222e"


def save_curve(views: ViewState, kills: Sequence[KillMark], title: str, path: Path) -> None:
    """Write reward and held-out reward by step, with a stroke for each kill; 1280 x 640 pixels,
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
        (held_out, BLUE, f"{views.evaluation.measure}, held-out rows", "o"),
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


PAGE_FILE, CURVE_FILE, STEPS_FILE = "report.html", "curve.png", "steps.csv"
READ_DEADLINE_S = 60.0


def collect(
    log: RunLog,
    run: str,
    *,
    spelling: Spelling = NUMBERS,
    audited: AuditReport | None = None,
    kills: Sequence[KillMark] = (),
    stopped: str = "",
    command: str = "",
) -> ReportInput:
    """All that the topics say of the run by now.

    Args:
        audited: the audit, if it was made already.

    Raises:
        DeadlineError: the topics could not be read up to their ends.
    """
    report = audited
    if report is None:
        with suppress(ReplayedError):  # the page of a replay has no verdict
            report = audit(log.bus)
    fold = RunFold()
    feed = Feed(log.bus, fold, there(log.bus, (*FIRST, *THEN)))
    try:
        feed.catch_up(READ_DEADLINE_S)
    finally:
        feed.close()
    shown, group = picked(fold.samples), newest_group(fold.samples)
    names = dict.fromkeys([row.name for _, row in shown] + [row.name for row in group])
    lineages = log.samples(*names) if names else []
    state = fold.state
    return ReportInput(
        run=run,
        fold=fold,
        audit=report,
        kills=kill_marks(state.throughput.restarts, state.run.steps, kills),
        made_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        stopped=stopped,
        command=command,
        samples=[
            (label, readable(lineage, spelling))
            for (label, _), lineage in zip(shown, lineages, strict=False)
        ],
        texts=_texts(lineages, spelling),
        decode=spelling.plain,
    )


def _texts(lineages: Sequence[Lineage], spelling: Spelling) -> dict[str, SampleText]:
    """Those that can be read, by name."""
    found = {}
    for lineage in lineages:
        if lineage.rollout is not None:
            with suppress(TensorError, ValueError):
                found[str(lineage.sample)] = text_of(lineage.rollout, spelling)
    return found


def readable(lineage: Lineage, spelling: Spelling) -> SampleDetail:
    """A sample to be shown; as numbers where a foreign writer's ids are no tokens of the model."""
    try:
        return sample_detail(lineage, spelling)
    except (OverflowError, TypeError):
        problem = "tokens are numbers: the tokenizer refuses them"
        return dataclasses.replace(sample_detail(lineage, NUMBERS), problem=problem)


def there(bus: Bus, topics: Sequence[Topic]) -> tuple[Topic, ...]:
    """Those of the topics that the log has: a recording may lack some."""

    def is_there(topic: Topic) -> bool:
        try:
            bus.beginnings(topic.name)
        except TopicMismatchError:
            return False
        return True

    return tuple(filter(is_there, topics))


def write(given: ReportInput, folder: Path) -> None:
    """Write `report.html`, `steps.csv` and `curve.png` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    state = given.fold.state
    (folder / PAGE_FILE).write_text(render_report(given), encoding="utf-8")
    (folder / STEPS_FILE).write_text(steps_csv(state.run.steps), encoding="utf-8")
    save_curve(state, given.kills, curve_title(given), folder / CURVE_FILE)

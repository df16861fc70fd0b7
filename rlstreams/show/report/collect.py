"""From a run's topics to the report's files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlstreams.debug.inspect.sample_detail import SampleDetail, sample_detail
from rlstreams.debug.inspect.words import NUMBERS, Spelling
from rlstreams.show.report.fold import FIRST, THEN, RunFold
from rlstreams.show.report.page import (
    ReportInput,
    curve_title,
    kill_marks,
    render_report,
    steps_csv,
)
from rlstreams.streams.audit.auditor import ReplayedError, audit
from rlstreams.streams.audit.report import AuditReport
from rlstreams.streams.lineage.fold import Lineage
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import TopicMismatchError
from rlstreams.streams.log.topics import Topic
from rlstreams.streams.run.run_log import RunLog
from rlstreams.streams.views.feed import Feed
from rlstreams.up.live.words import KillMark

PAGE_FILE, CURVE_FILE, STEPS_FILE = "report.html", "curve.png", "steps.csv"
READ_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Where the report lies."""

    page: Path
    curve: Path


def collect(
    log: RunLog,
    run: str,
    *,
    spelling: Spelling = NUMBERS,
    made_at: str = "",
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
    picks = fold.samples.picks()
    details = log.samples(*(row.name for _, row in picks)) if picks else []
    state = fold.state
    return ReportInput(
        run=run,
        fold=fold,
        audit=report,
        kills=kill_marks(state.throughput.restarts, state.run.steps, kills),
        made_at=made_at,
        stopped=stopped,
        command=command,
        samples=[
            (label, readable(lineage, spelling))
            for (label, _), lineage in zip(picks, details, strict=True)
        ],
        decode=spelling.plain,
    )


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


def write(given: ReportInput, folder: Path) -> Written:
    """Write `report.html`, `steps.csv` and `curve.png` into `folder`."""
    from rlstreams.show.report.plot import save_curve

    folder.mkdir(parents=True, exist_ok=True)
    written, state = Written(page=folder / PAGE_FILE, curve=folder / CURVE_FILE), given.fold.state
    written.page.write_text(render_report(given), encoding="utf-8")
    (folder / STEPS_FILE).write_text(steps_csv(state.run.steps), encoding="utf-8")
    save_curve(state, given.kills, curve_title(given), written.curve)
    return written

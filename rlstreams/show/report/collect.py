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
    kill_marks,
    render_report,
    steps_csv,
)
from rlstreams.show.report.rows import newest_group
from rlstreams.show.report.rows import picks as picked
from rlstreams.streams.audit.auditor import ReplayedError, audit
from rlstreams.streams.audit.report import AuditReport
from rlstreams.streams.lineage.fold import Lineage
from rlstreams.streams.log.bus import present
from rlstreams.streams.log.topics import CALLS
from rlstreams.streams.run.run_log import RunLog
from rlstreams.streams.synced import write_whole
from rlstreams.streams.views.feed import Feed
from rlstreams.words.sample_detail import SampleDetail, sample_detail
from rlstreams.words.screen import KillMark
from rlstreams.words.spelling import NUMBERS, Spelling
from rlstreams.words.texts import SampleText, text_of

PAGE_FILE, STEPS_FILE = "report.html", "steps.csv"


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
    """Read the run's topics, up to their ends, into the report's input.

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
    feed = Feed(log.bus, fold, present(log.bus, (*FIRST, *THEN, CALLS)))
    try:
        feed.catch_up()
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
    """Texts of the samples that can be read, by name."""
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


def write(given: ReportInput, folder: Path) -> None:
    """Write `report.html` and `steps.csv` into `folder`."""
    write_whole(folder / PAGE_FILE, render_report(given).encode())
    write_whole(folder / STEPS_FILE, steps_csv(given.fold.state.run.steps).encode())

"""From a run's topics to the report's files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlstreams.show.report.page import ReportInput, curve_title, render
from rlstreams.streams.audit.auditor import audit
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.views.feed import Feed, Views
from rlstreams.streams.views.run import StepPoint
from rlstreams.streams.views.workers import Restart
from rlstreams.up.live.words import KillMark, spell

PAGE_FILE = "report.html"
CURVE_FILE = "curve.png"
READ_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Where the report lies."""

    page: Path
    curve: Path


def collect(
    bus: Bus,
    run: str,
    *,
    decode: Callable[[Sequence[int]], str] = spell,
    made_at: str = "",
    settle_s: float = 0.0,
) -> ReportInput:
    """All that the topics say of the run by now.

    Raises:
        DeadlineError: the topics could not be read up to their ends.
    """
    report = audit(bus, settle_s=settle_s)
    views = Views()
    feed = Feed(bus, views)
    try:
        feed.catch_up(READ_DEADLINE_S)
    finally:
        feed.close()
    state = views.state
    return ReportInput(
        run=run,
        views=state,
        audit=report,
        kills=kill_marks(state.throughput.restarts, state.run.steps),
        made_at=made_at,
        decode=decode,
    )


def write(given: ReportInput, folder: Path) -> Written:
    """Write `report.html` and `curve.png` into `folder`."""
    from rlstreams.show.report.plot import save_curve

    folder.mkdir(parents=True, exist_ok=True)
    written = Written(page=folder / PAGE_FILE, curve=folder / CURVE_FILE)
    written.page.write_text(render(given), encoding="utf-8")
    save_curve(given.views, given.kills, curve_title(given), written.curve)
    return written


def kill_marks(
    restarts: Sequence[Restart], steps: Sequence[StepPoint], kills: Sequence[KillMark] = ()
) -> tuple[KillMark, ...]:
    """Processes that came back without having said goodbye, by the step that was being made.

    Args:
        kills: those that `up` sent itself. The log does not tell them from a crash, from memory
            that ran out, or from a machine that was switched off.
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

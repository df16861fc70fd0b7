"""Words of an agent on its session: rewards, and that it is done.

A reward that is said again is the same one, if nothing else was said since: a client tries again
whose answer was lost. Else it is a new one: who says 1, then 0, then 1 means 1. A start that is
resumed says its rewards anew, and only the newest start's count (`Session.standing`).
"""

from __future__ import annotations

import asyncio

from rlstreams.schemas.calls import ABANDONED, AGENT, ENDED, ENVIRONMENT_FAILED, LIMIT
from rlstreams.schemas.events import OutcomeReported
from rlstreams.streams.sessions.session import Session
from rlstreams.workers.gateway.port import CallRefusedError, Report
from rlstreams.workers.gateway.records import SessionRecords
from rlstreams.workers.sandbox.reward import Judgement, check_judgement

KINDS = (ENDED, LIMIT, AGENT, ENVIRONMENT_FAILED, ABANDONED)  # of an end


class Word:
    """The words of one start's agent."""

    def __init__(self, records: SessionRecords, log: Session, *, goes_on: bool) -> None:
        """
        Args:
            goes_on: its client did not begin anew with this start.
        """
        self.ended: asyncio.Event = asyncio.Event()
        """Set once the agent said that it is done."""
        self.end = ("", "")  # then: kind and detail
        self.last: OutcomeReported | None = None
        """The reward that the agent ended with; not written yet."""
        self._records = records
        self._log = log
        self._goes_on = goes_on
        self._in_order = asyncio.Lock()  # rewards are written in the order in which they are said

    @property
    def _own(self) -> dict[str, OutcomeReported]:
        """Its outcomes so far, by id."""
        start, goes_on = self._records.start, self._goes_on
        return {
            name: one
            for name, one in self._log.outcomes.items()
            if one.grader == AGENT and (one.start == start or goes_on)
        }

    async def report(self, report: Report) -> str:
        """Write a reward; see `Calls.report`."""
        if report.call_id is not None and report.call_id not in self._log.nodes:
            raise _bad("call_id", f"the session has no call {report.call_id}")
        try:
            check_judgement(Judgement(reward=report.reward, parts=dict(report.parts)))
        except ValueError as err:
            raise CallRefusedError(400, "invalid_value", str(err), param="reward") from None
        async with self._in_order:
            outcome = self.outcome(report)
            if outcome.outcome_id not in self._log.outcomes:
                await self._records.committed(outcome)
                self._log.judge(outcome)
        return outcome.outcome_id

    def outcome(self, report: Report) -> OutcomeReported:
        """Make a reward's record; one that was said before is the recorded one.

        Raises:
            CallRefusedError: 400; it replaces what was not said, or another has its id.
        """
        own, replaced = self._own, report.supersedes
        if replaced is not None and (replaced := self._name(replaced)) not in own:
            raise _bad("supersedes", f"this agent reported no outcome {report.supersedes}")
        named = self._name(report.outcome_id) if report.outcome_id else ""
        made = self._records.outcome(
            report,
            AGENT,
            named=named,
            replaced=replaced,
            start=self._records.start,
            number=len(own),
        )
        known = self._log.outcomes.get(named) if named else next(reversed(own.values()), None)
        if known is not None and _is_same(known, made):
            return known
        if known is not None and named:
            raise _bad(
                "outcome_id",
                f"{report.outcome_id} is the id of another outcome; leave it out, or choose one",
            )
        return made

    def _name(self, name: str) -> str:
        """The id in the log of a name that the agent gave: each start gives its names anew."""
        is_first = self._goes_on or not self._records.start or name in self._own
        return name if is_first else f"{name}#{self._records.start}"

    def say_end(self, kind: str, detail: str) -> None:
        """Note the end that the agent states; only its first word counts."""
        if kind not in KINDS:
            raise _bad("kind", f"must be one of {', '.join(KINDS)}, got {kind!r}")
        if not self.ended.is_set():
            self.end = (kind, detail)
            self.ended.set()


def _is_same(one: OutcomeReported, other: OutcomeReported) -> bool:
    return _says(one) == _says(other)


def _says(one: OutcomeReported) -> tuple[object, ...]:
    return one.grader, one.reward, one.parts, one.note, one.call_id, one.supersedes


def _bad(field: str, why: str) -> CallRefusedError:
    return CallRefusedError(400, "invalid_value", f"{field}: {why}", param=field)

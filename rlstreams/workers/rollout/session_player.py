"""Prompts that agents play: their sessions in the log, and those that wait for graders."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence, Set
from functools import partial
from typing import Any

from rlstreams.schemas.events import Prompt
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.record import Record
from rlstreams.workers.config.agents import OutcomeSection
from rlstreams.workers.gateway.neighbours import Neighbours
from rlstreams.workers.loop.commit_requests import CommitRequests
from rlstreams.workers.loop.context import Context
from rlstreams.workers.policy.puller import Loads
from rlstreams.workers.rollout.clock import SampleClock
from rlstreams.workers.rollout.ends import outputs_of
from rlstreams.workers.rollout.history import History
from rlstreams.workers.rollout.late import LateOutcomes
from rlstreams.workers.rollout.player import Concluded
from rlstreams.workers.rollout.sessions import Closed, Sessions


class SessionPlayer:
    """The port `Player`; sessions that are played live on the engine's event loop."""

    def __init__(self, sessions: Sessions, bus: Bus, waited_for: OutcomeSection) -> None:
        self.sessions = sessions
        self.late = LateOutcomes(bus, waited_for)
        self._shared = sessions.open_sessions.shared
        self._runners = sessions.runners
        self._history = History(bus, keeps_judged=bool(waited_for.wait_for))
        self._over: list[Concluded] = []  # prompts whose session was closed before
        is_outside = any(member.section.outside for member in sessions.members)
        self._neighbours = Neighbours(bus, self._shared.worker) if is_outside else None

    @property
    def clock(self) -> SampleClock:
        """Clock of the sessions."""
        return self.sessions.clock

    @property
    def commits(self) -> CommitRequests:
        """Calls that wait for the commit of their records."""
        return self._shared.commits

    @property
    def num_apart(self) -> int:
        """Sessions that are being judged, wait for graders, or are worked on elsewhere."""
        return self.sessions.verifier.num_open + self.num_late + self.sessions.num_remote

    @property
    def num_unjudged(self) -> int:
        """Sessions that are being judged."""
        return self.sessions.verifier.num_open

    @property
    def num_late(self) -> int:
        """Closed sessions that wait for graders."""
        return len(self.late)

    @property
    def num_waiting(self) -> int:
        """Sessions of remote agents that no runner has, or whose judge has shifts of its own."""
        num = self._runners.num_waiting if self._runners else 0
        return num + self.sessions.verifier.num_elsewhere

    @property
    def waits_for(self) -> str:
        """Runners, judge and graders that sessions wait for."""
        found = [self._runners.waits_for if self._runners else ""]
        found.append(self.sessions.verifier.waits_for)
        if self.num_late:
            graders = ", ".join(self.late.graders)
            found.append(f"for outcomes of {self.num_late} sessions by {graders}")
        return "; ".join(filter(None, found))

    @property
    def address(self) -> str:
        """Where sessions that came here are passed on to; "": no client goes on with one."""
        return self._runners.address if self._runners and self._neighbours else ""

    async def open(self, loads: Callable[[], Loads]) -> None:
        """Listen for agents."""
        self._shared.loads = loads
        others = self._neighbours
        await self.sessions.start(None if others is None else others.addresses)

    async def stop(self) -> None:
        """Refuse further calls, and end the agents."""
        await self.sessions.close()

    def close(self) -> None:
        """Let go of readers, of the way into the log, and of the verifier."""
        self._history.close()
        self._shared.appender.close()
        self.late.close()
        if self._neighbours is not None:
            self._neighbours.close()
        self.sessions.verifier.close()

    def sift(self, waiting: list[Record[Prompt]]) -> list[Record[Prompt]]:
        """Leave out prompts whose session is closed: its end is in the log, or it waits."""
        self._history.poll()
        return [record for record in waiting if not self._is_over(record)]

    def _is_over(self, record: Record[Prompt]) -> bool:
        history = self._history
        if not history.is_known(record):
            return False
        self.late.listen(record)
        if history.is_closed(record):
            self._over.append(Concluded(record=record, outputs=()))
            return True
        if history.is_waiting(record):
            self.late.add(record, history.take(record))
            return True
        return False

    def ready(
        self, waiting: Sequence[Record[Prompt]], num_running: int
    ) -> Sequence[Record[Prompt]]:
        """An agent is a program: no more of them run here than calls are sampled at a time. Those
        that run elsewhere are bounded by the worker's room alone."""
        sessions, found = self.sessions, []
        room = self._shared.engine.capacity - (num_running - sessions.num_remote)
        for record in waiting:
            if self._history.is_known(record):
                is_elsewhere = sessions.member_of(record.event).section.is_elsewhere
                if is_elsewhere or room > 0:
                    found.append(record)
                room -= not is_elsewhere
        return found

    def roll_out(self, record: Record[Prompt]) -> Coroutine[Any, Any, Closed]:
        """See `Sessions.roll_out`."""
        log = self._history.take(record)
        caught_up = partial(self._history.caught_up, record) if log.starts else None
        return self.sessions.roll_out(record, log, caught_up, self._history.siblings(record))

    def concluded(
        self, record: Record[Prompt], rolled: Closed, loads: Loads, context: Context, judge: str
    ) -> Concluded:
        """Make its close, outcome and trajectory; or have it wait for its graders."""
        outputs = None
        if rolled.is_waiting:
            self.late.add(record, rolled.session.log)
        else:
            outputs = rolled.outputs(record, self._shared.engine.name, context, judge)
            self.late.dismiss(rolled.session.session_id)
        return Concluded(record=record, outputs=outputs, counts=rolled.counts())

    def over(self, context: Context, judge: str) -> Iterator[Concluded]:
        """Sessions that were closed before, and those whose graders have spoken or are late."""
        if self._neighbours is not None:
            self._neighbours.poll()
        over, self._over = self._over, []
        yield from over
        for one in self.late.decided():
            outputs = outputs_of(one, self._shared.engine.name, context, judge)
            yield Concluded(record=one.record, outputs=outputs, counts={"late": 1})

    def give_up(self, numbers: Set[int]) -> None:
        """Forget these partitions: their new owner reads their sessions, and waits on."""
        self._history.forget(numbers)
        self.late.forget(numbers)

"""Harness of one real role: its process, fed stage by stage, with everybody else absent.

A stage is what the role may know before it goes on. Which of several ready things a role takes
first is a matter of time; feeding in stages takes that freedom away.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence

from rlstreams.debug.replay.player import commit
from rlstreams.debug.replay.target import Target
from rlstreams.schemas import DecodeError
from rlstreams.schemas.events import Event
from rlstreams.streams.log.bus import Bus, Closing
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.errors import DeadlineError, StreamsError
from rlstreams.streams.log.record import Outgoing, Record
from rlstreams.up.supervisor.child import Child, ChildSpec, log_tail, make_spawner

START_S = 120.0  # imports and loading a model
PRODUCER_ID = "replay"
_POLL_S = 0.05
_BATCH_RECORDS = 1000


class RoleEndedError(StreamsError):
    """The role's process ended before it had done its work; holds its last lines."""


class Outputs(Closing):
    """What the role writes to some topics of the fresh run, as it comes."""

    def __init__(self, bus: Bus, topics: Sequence[str]) -> None:
        starts = {p: at for topic in topics for p, at in bus.beginnings(topic).items()}
        self._reader = bus.reader(starts)
        self._schemas = bus.schemas()

    def poll(self, timeout_s: float) -> list[Record[Event]]:
        """New records that are events."""
        found = []
        for raw in self._reader.poll(_BATCH_RECORDS, timeout_s):
            try:
                found.append(decoded(raw, self._schemas))
            except DecodeError:
                continue  # a foreign writer's: the comparison misses the event and says so
        return found

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()


class SoloRole(Closing):
    """A role that runs until it is done, or until `close`.

    Args:
        target: the fresh run; its configuration file is what the role reads.
        deadline_s: longest wait for the next thing that it writes.
    """

    def __init__(self, target: Target, role: str, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self.log = target.folder / "logs" / f"{role}-0.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.name = role
        spec = ChildSpec(
            role=role,
            ordinal=0,
            config=target.config_file,
            log=self.log,
            instance=uuid.uuid4().hex,
        )
        self._child: Child = make_spawner(has_gpus=target.config.has_gpus).spawn(spec)
        self._started_s = time.monotonic()

    def until(
        self, reached: Callable[[], bool], advance: Callable[[], bool], waiting_for: str
    ) -> None:
        """Wait.

        Args:
            reached: whether it is there.
            advance: look for what is new; whether something was.
            waiting_for: what, for the message of a missed deadline.

        Raises:
            RoleEndedError: the role ended first.
            DeadlineError: nothing new for the deadline; the role's start counts extra.
        """
        last_s = max(time.monotonic(), self._started_s + START_S - self._deadline_s)
        while not reached():
            if advance():
                last_s = time.monotonic()
                continue
            status = self._child.poll()
            if status is not None and not (advance() or reached()):
                tail = "\n".join(log_tail(self.log))
                raise RoleEndedError(
                    f"{self.name} ended with status {status} before {waiting_for}; "
                    f"last lines of {self.log}:\n{tail}"
                )
            if time.monotonic() - last_s > self._deadline_s:
                raise DeadlineError(
                    f"{self.name} wrote nothing for {self._deadline_s:g} s; waiting for "
                    f"{waiting_for}; see {self.log}"
                )

    def close(self) -> None:
        """Let it drain, or end it."""
        import signal

        if self._child.poll() is None:
            self._child.signal(signal.SIGTERM)
            if not self._child.wait(10.0):
                self._child.signal(signal.SIGKILL)
                self._child.wait(5.0)


class Feeder(Closing):
    """Sends records to a fresh run, each call in one or a few transactions."""

    def __init__(self, bus: Bus) -> None:
        self._producer = bus.producer(PRODUCER_ID)

    def send(self, records: Sequence[Outgoing]) -> None:
        """Send them, in order.

        Raises:
            BrokerError: transactions were aborted again and again.
        """
        for at in range(0, len(records), _BATCH_RECORDS):
            commit(self._producer, list(records[at : at + _BATCH_RECORDS]))

    def close(self) -> None:
        """Release the producer."""
        self._producer.close()

"""A log, and one trainer's intake after another, without a trainer."""

from __future__ import annotations

from rlstreams.schemas.events import DeadLetter, PartitionPosition, ScoredTrajectory
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topics import DEAD_LETTERS, SCORED
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.model.routes import RouterShape
from rlstreams.workers.trainer.intake.admission import Admission
from rlstreams.workers.trainer.intake.intake import Intake
from rlstreams.workers.trainer.intake.payloads import Payloads
from tests import factories
from tests.logs import made_log
from tests.memory.bus import MemoryBus

VOCAB_SIZE = 1000
MAX_TOKENS = 4096
HASHES = {1: "b1" * 32, 2: factories.HASH}


class Site:
    """A log, and one trainer's intake after another."""

    def __init__(
        self, config: RunConfig | None = None, *, routers: RouterShape | None = None
    ) -> None:
        log = made_log()
        self.bus = MemoryBus(log, "run")
        self._pen = self.bus.producer("test")
        self.context = Context(
            config=config or RunConfig(), bus=self.bus, role="trainer", ordinal=0, instance="t"
        )
        self._routers = routers
        self.start()

    def start(self, at: tuple[PartitionPosition, ...] = ()) -> None:
        """A trainer of its own, as after a restart."""
        self.admission = Admission(self.context.config.trainer)
        self.reporter = Reporter(self.context)
        self.payloads = Payloads(self.bus, lambda: None)
        self.intake = Intake(
            self.context,
            self.bus,
            self.admission,
            self.payloads,
            vocab_size=VOCAB_SIZE,
            max_tokens=MAX_TOKENS,
            start=at,
            hashes=HASHES,
            reporter=self.reporter,
            routers=self._routers,
        )

    def sends(self, *records: Outgoing | ScoredTrajectory | DeadLetter) -> None:
        self._pen.commit([self._record(record) for record in records])

    def _record(self, record: Outgoing | ScoredTrajectory | DeadLetter) -> Outgoing:
        if isinstance(record, Outgoing):
            return record
        return outgoing(SCORED if isinstance(record, ScoredTrajectory) else DEAD_LETTERS, record)

    def take(self) -> list[DeadLetter]:
        """Read all there is, write the letters as the trainer does; those of this call."""
        for _ in range(4):
            self.intake.poll(0.0)
        letters, self.intake.letters = self.intake.letters, []
        self._pen.commit([outgoing(DEAD_LETTERS, letter) for letter in letters])
        return letters

    def recorded(self) -> tuple[PartitionPosition, ...]:
        """What a step that is recorded now says of where its successor is to read from."""
        return tuple(
            PartitionPosition(topic=p.topic, partition=p.number, offset=offset)
            for p, offset in sorted(self.intake.low_watermarks().items())
        )

    def dead(self) -> list[str]:
        """Group and sample of every training sample that the planner knows to be dead."""
        groups = self.admission._groups.values()
        return sorted(f"{g.group_id}/{s}" for g in groups for s in g.lost)

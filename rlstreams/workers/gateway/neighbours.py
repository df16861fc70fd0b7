"""Gateways of the other rollout workers, by their reports: one of them may have a session."""

from __future__ import annotations

from collections.abc import Sequence

from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import now_ms
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import WORKER_EVENTS
from rlstreams.workers.loop.reporter import NewestReports

BACK_MS = 60_000  # so far back reports are read at first
SILENT_S = 60.0  # a worker without a report for so long has no gateway, and no successor comes


class Neighbours(NewestReports):
    """Reports of the other workers that have a gateway."""

    def __init__(self, bus: Bus, worker: str) -> None:
        """
        Args:
            worker: this one.
        """
        partition = Partition(WORKER_EVENTS.name, 0)
        start, _ = bus.written_since(partition, now_ms() - BACK_MS)
        super().__init__(
            bus,
            {partition: start},
            "neighbours",
            lambda it: it.gateway if it.worker != worker else "",
        )

    def addresses(self) -> Sequence[str]:
        """Addresses without a path; may be asked from any thread."""
        return [report.gateway for report in self.alive(SILENT_S)]

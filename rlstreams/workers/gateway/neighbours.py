"""Gateways of the other rollout workers, by their reports: one of them may have a session."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rlstreams.schemas.events import WorkerReport
from rlstreams.streams.addresses import is_loopback
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import now_ms
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import WORKER_EVENTS
from rlstreams.workers.loop.foreign import EventReader
from rlstreams.workers.loop.host import host_name

MAX_POLL = 1000
BACK_MS = 60_000  # so far back reports are read at first
SILENT_S = 60.0  # a worker without a report for so long has no gateway, and no successor comes


class Neighbours:
    """A fold of `worker-events`, and its reader. Belongs to the role's loop, but `addresses`."""

    def __init__(self, bus: Bus, worker: str) -> None:
        """
        Args:
            worker: this one.
        """
        self._worker = worker
        partition = Partition(WORKER_EVENTS.name, 0)
        start, _ = bus.written_since(partition, now_ms() - BACK_MS)
        self._reader = EventReader(bus, {partition: start}, "neighbours")
        self._said: dict[str, tuple[str, float]] = {}  # address by worker, with when it was read

    def poll(self) -> None:
        """Read what is new; never waits."""
        for record in self._reader.poll(MAX_POLL):
            event = record.event
            if isinstance(event, WorkerReport) and event.worker != self._worker and event.gateway:
                self._take(event)

    def _take(self, report: WorkerReport) -> None:
        is_near = report.host in ("", host_name()) or not is_loopback(report.gateway)
        if report.state == "stopped" or not is_near:
            self._said.pop(report.worker, None)
        else:
            self._said[report.worker] = report.gateway, time.monotonic()

    def addresses(self) -> Sequence[str]:
        """Addresses without a path; may be asked from any thread."""
        since_s = time.monotonic() - SILENT_S
        return [address for address, read_s in [*self._said.values()] if read_s > since_s]

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()

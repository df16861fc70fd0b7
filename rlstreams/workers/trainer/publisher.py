"""Publication of versions: served and announced after a commit, pulled by workers on request."""

from __future__ import annotations

import time

from rlstreams.schemas.events import PullRequested
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.topics import POLICY_PULLS
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.foreign import EventReader
from rlstreams.workers.trainer.ledger_writer import LedgerWriter
from rlstreams.workers.trainer.training.resumable import Compute, Resumable
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.channel import WeightServer
from rlstreams.workers.weights.store.writer import StoreWriter


class Publisher:
    """The weight server of one trainer, and its store, from its claim on.

    Raises:
        WeightError: the server cannot be opened.
    """

    def __init__(
        self,
        context: Context,
        bus: Bus,
        server: WeightServer,
        training: Training,
        writer: LedgerWriter,
        epoch: int,
        store: StoreWriter | None = None,
    ) -> None:
        self._training = training
        self._section = context.config.weights
        self._server = server
        self._writer = writer
        self._store = store
        server.open(epoch)
        if store is not None:
            store.open(epoch)
        self._pulls = EventReader(bus, bus.ends(POLICY_PULLS.name), context.worker)
        self.seconds = 0.0  # of the newest publication

    def publish(self, compute: Compute, step: int, version: int) -> Resumable[None]:
        """Serve the version in hand, then announce it."""
        started_s = time.monotonic()
        weights, known_hash = self._training.learner.weights(), self._training.weight_hash
        manifest = yield compute(self._server.publish, version, weights, known_hash)
        self._writer.published(step, manifest, self._server)
        if self._store is not None:
            yield compute(self._store.take, manifest, weights)
        # After the commit, which a replaced trainer does not get through.
        self._server.retire(self._section.versions_served)
        self.seconds = time.monotonic() - started_s

    def finish(self) -> None:
        """Wait until connected receivers have the last version: it is evaluated, and only here."""
        if self._store is not None:
            self._store.finish(self._section.pull_deadline_s)
        self._server.finish(self._section.pull_deadline_s)

    def serve(self) -> None:
        """Pass on pull requests since the last call, and announce versions that were stored."""
        for record in self._pulls.poll(100):
            if isinstance(record.event, PullRequested):
                self._server.serve(record.event)
        if self._store is not None:
            self._writer.trouble(self._store.trouble)
            if news := self._store.news():
                self._writer.stored(news)

    def close(self) -> None:
        """Stop serving."""
        self._server.close()
        if self._store is not None:
            self._store.close()
        self._pulls.close()

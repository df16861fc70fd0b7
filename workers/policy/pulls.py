"""Writes a worker's pulls to the log: requested, loaded."""

from __future__ import annotations

from rlstreams.schemas.events import PolicyLoaded, PolicyPublished, PullRequested
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topics import POLICY_PULLS
from rlstreams.workers.loop.context import Context
from rlstreams.workers.weights.channel import Pulled, WeightChannel


class PullLog:
    """Makes `PullRequested` and `PolicyLoaded` and remembers the load id of each held version."""

    def __init__(self, context: Context, channel: WeightChannel) -> None:
        self._context = context
        self._channel = channel
        self._outbox: list[Outgoing] = []
        self._count = 0
        self.loads: dict[int, str] = {}

    def requested(self, published: PolicyPublished) -> None:
        """The worker is ready for `published`."""
        self._count += 1
        event = PullRequested(
            worker=self._context.worker,
            instance=self._context.instance,
            role=self._context.role,
            request_id=f"{self._context.instance}/{self._count}",
            policy_version=published.policy_version,
            channel=self._channel.name,
            address=self._channel.address(),
            requested_at_ms=now_ms(),
        )
        self._outbox.append(outgoing(POLICY_PULLS, event))

    def loaded(self, published: PolicyPublished, pulled: Pulled) -> None:
        """The worker holds it, checked as `pulled.verified` says."""
        load_id = f"{self._context.worker}/{self._context.instance}/{self._count}"
        self.loads[published.policy_version] = load_id
        event = PolicyLoaded(
            worker=self._context.worker,
            instance=self._context.instance,
            role=self._context.role,
            load_id=load_id,
            policy_version=published.policy_version,
            weight_hash=pulled.weight_hash,
            epoch=published.epoch,
            channel=self._channel.name,
            num_bytes=pulled.num_bytes,
            seconds=pulled.seconds,
            paused_s=pulled.paused_s,
            loaded_at_ms=now_ms(),
            verified=pulled.verified,
        )
        self._outbox.append(outgoing(POLICY_PULLS, event))

    def take(self) -> list[Outgoing]:
        """What is to be told, once."""
        outbox, self._outbox = self._outbox, []
        return outbox

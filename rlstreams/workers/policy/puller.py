"""Pulls of policy versions: one at a time, in the background, each written to the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from rlstreams.schemas.events import PolicyLoaded, PolicyPublished, PullRequested
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topics import POLICY_PULLS
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.policy.view import PolicyFollower, PolicyView
from rlstreams.workers.weights.channel import STORE, Pulled, WeightChannel, WeightError
from rlstreams.workers.weights.store.channel import StoreWeightChannel

RETRY_S = 1.0  # before a version whose pull failed is asked for again

StartPull = Callable[[PolicyPublished, WeightChannel], Future[Pulled]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load by which a worker came to hold a version."""

    weight_hash: str
    load_id: str


Loads = Mapping[int, Load]  # by version


class PolicyPuller:
    """Follows the announced versions, and pulls those that its role asks for.

    A role decides which version it wants and when. A failed pull leaves the held version; the new
    one is refused for `RETRY_S`, or until another pull succeeds. Called from the role's loop. A
    version that the channel no longer serves comes from the store, if the log has it there.

    Args:
        pull: starts a pull in the background.
    """

    def __init__(
        self,
        context: Context,
        bus: Bus,
        channel: WeightChannel,
        reporter: Reporter,
        pull: StartPull,
    ) -> None:
        self._context = context
        self._channel = channel
        self._store: WeightChannel = channel
        if channel.name != STORE:
            folder = context.folder / "pulled" / context.worker
            self._store = StoreWeightChannel(context.config.run.id, folder)
        self._reporter = reporter
        self._pull = pull
        self._follower = PolicyFollower(bus)
        self._under_way: tuple[PolicyPublished, WeightChannel, Future[Pulled]] | None = None
        self._refused: dict[int, float] = {}  # version -> end of refusal, on the monotonic clock
        self._count = 0
        self._news: list[Outgoing] = []
        self.loads: dict[int, Load] = {}  # of every version that was loaded, the newest last
        self.trouble = ""  # error of the last pull; "" if it succeeded

    @property
    def view(self) -> PolicyView:
        """Announced versions, as of the last `poll`."""
        return self._follower.view

    @property
    def pulling(self) -> int | None:
        """The version that is being pulled."""
        return None if self._under_way is None else self._under_way[0].policy_version

    def poll(self) -> int | None:
        """Read announcements; the version that was loaded since the last call, or None."""
        self._follower.poll()
        if self._under_way is None or not self._under_way[-1].done():
            return None
        (published, channel, future), self._under_way = self._under_way, None
        version = published.policy_version
        try:
            pulled = future.result()
        except WeightError as err:
            self._refused[version] = time.monotonic() + RETRY_S
            self.trouble = f"pull of {version} failed: {err}"
            self._reporter.count(failed_pulls=1)
            return None
        self._refused.clear()  # the link works, so older refusals may heal
        self.trouble = ""
        self._loaded(published, channel, pulled)
        self._reporter.count(pulls=1, pull_s=pulled.seconds, pulled_bytes=pulled.num_bytes)
        return version

    def newest(self) -> PolicyPublished | None:
        """The newest version, if it may be pulled now."""
        is_stored = self._channel.name == STORE
        newest = self.view.newest_in_store() if is_stored else self.view.newest
        if newest is None or self._under_way or self._is_refused(newest.policy_version):
            return None
        return newest

    def available(self) -> set[int]:
        """Versions that are served, or in a store, and not refused at the moment."""
        view = self.view
        return {
            version
            for version in {*view.served, *view.kept}
            if not self._is_refused(version)
            and (published := view.get(version)) is not None
            and self._channel_of(published).can_pull(published)
        }

    def start(self, published: PolicyPublished) -> None:
        """Pull a version; no pull may be under way."""
        assert self._under_way is None, "one pull at a time"
        channel = self._channel_of(published)
        self._count += 1
        event = PullRequested(
            worker=self._context.worker,
            instance=self._context.instance,
            role=self._context.role,
            request_id=f"{self._context.instance}/{self._count}",
            policy_version=published.policy_version,
            channel=channel.name,
            address=channel.address(),
            requested_at_ms=now_ms(),
        )
        self._news.append(outgoing(POLICY_PULLS, event))
        self._under_way = (published, channel, self._pull(published, channel))

    def news(self) -> list[Outgoing]:
        """`PullRequested` and `PolicyLoaded` since the last call."""
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Release the readers."""
        self._follower.close()

    def _channel_of(self, published: PolicyPublished) -> WeightChannel:
        """The run's channel, while it serves the version; else the store, if it has the version."""
        is_served = published.policy_version in self.view.served
        if is_served and self._channel.can_pull(published):
            return self._channel
        return self._store if self._store.can_pull(published) else self._channel

    def _is_refused(self, version: int) -> bool:
        return time.monotonic() < self._refused.get(version, 0.0)

    def _loaded(self, published: PolicyPublished, channel: WeightChannel, pulled: Pulled) -> None:
        version = published.policy_version
        load_id = f"{self._context.worker}/{self._context.instance}/{self._count}"
        self.loads.pop(version, None)
        self.loads[version] = Load(weight_hash=pulled.weight_hash, load_id=load_id)
        event = PolicyLoaded(
            worker=self._context.worker,
            instance=self._context.instance,
            role=self._context.role,
            load_id=load_id,
            policy_version=version,
            weight_hash=pulled.weight_hash,
            epoch=published.epoch,
            channel=channel.name,
            num_bytes=pulled.num_bytes,
            seconds=pulled.seconds,
            paused_s=pulled.paused_s,
            loaded_at_ms=now_ms(),
            verified=pulled.verified,
        )
        self._news.append(outgoing(POLICY_PULLS, event))

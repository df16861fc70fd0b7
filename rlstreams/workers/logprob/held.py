"""Versions that a scorer holds: which is pulled next, and which is kept for the next windows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set

from rlstreams.workers.engines.base import Scorer
from rlstreams.workers.logprob.versions import plan_anchors
from rlstreams.workers.policy.puller import PolicyPuller


class HeldVersions:
    """Holds `limit` versions for new windows, and one more that arrives or is still in use.

    With a limit of 0 none is ever pulled, and behavior log-probs stand in.
    """

    def __init__(self, scorer: Scorer, puller: PolicyPuller, limit: int) -> None:
        self._scorer = scorer
        self._puller = puller
        self._limit = limit
        self._held: list[int] = []  # the one pulled longest ago first

    @property
    def now(self) -> frozenset[int]:
        """Versions that a window may be planned with."""
        return frozenset(self._held)

    def wanted(self, sampled: Iterable[frozenset[int]]) -> dict[frozenset[int], frozenset[int]]:
        """Versions to score trajectories under, by the versions that sampled them.

        A trajectory of more versions than the limit is scored under those that are held.
        """
        available = self._puller.available()
        found = {}
        for versions in set(sampled):
            served = available if len(versions) <= self._limit else ()
            anchors = plan_anchors(versions, self.now, served).values()
            found[versions] = frozenset(a.policy_version for a in anchors if a.label != "behavior")
        return found

    def follow(
        self,
        first: Set[int],
        others: Set[int],
        under_way: Sequence[Collection[int]],
        *,
        may_pull: bool = True,
    ) -> None:
        """Keep what came, drop what is needed no longer, start the next pull.

        Args:
            first, others: versions that the oldest trajectory, and those behind it, want.
            under_way: versions of each window that is being scored.
        """
        if not self._limit:
            self._puller.poll()  # polled all the same, for the list of versions
            return
        if (came := self._puller.poll()) is not None:
            self._keep(came, first, others)
        # A version may be held a moment before its pull is over.
        needed = self.now.union(*under_way, {self._puller.pulling})
        for version in self._scorer.versions:
            if version not in needed:
                self._scorer.drop(version)
        newest = self._puller.newest()
        if not may_pull or newest is None or len(self._scorer.versions) > self._limit:
            return
        wanted = self._next(first, others, newest.policy_version)
        published = None if wanted is None else self._puller.view.get(wanted)
        if published is not None:
            self._puller.start(published)

    def _keep(self, version: int, first: Set[int], others: Set[int]) -> None:
        """Hold a version. At the limit one leaves: one that no trajectory wants, else one that the
        oldest trajectory does not want; of several the one pulled longest ago."""
        self._held = [held for held in self._held if held != version]
        if len(self._held) == self._limit:
            self._held.remove(min(self._held, key=lambda v: (v in first, v in others)))
        self._held.append(version)

    def _next(self, first: Set[int], others: Set[int], newest: int) -> int | None:
        """The version to pull: one that the oldest trajectory lacks; else one that others lack, or
        the newest, where it pushes out no wanted one."""
        if lacking := first - self.now:
            return min(lacking)
        if len(self._held) == self._limit and self.now <= first | others:
            return None
        return min(others - self.now, default=None if newest in self._held else newest)

"""Number of requests that a server is given at once, and the choice of the next server. Pure.

    warming --half full, or congested--> steady        any --met anew--> warming
    steady  --congested--> draining --as few in flight as the limit, then answers--> steady

*Answers are the clock*, as acknowledgements are TCP's (Jacobson, "Congestion avoidance and
control", 1988). One that comes back while the server has as many requests as the limit allows
raises the limit by a share of one request: much while warming, little while steady. So the limit
never grows faster than its cost shows, whether an answer takes a second or ten minutes, and never
beyond its use.

*Gauges decide whether it grows.* The limit stands while the cache is nearly full, or requests wait
inside the server. It is *congested* when it preempted more than a few of a limit's worth of
answers: their keys and values were discarded, and are computed again. Then the limit falls by a
factor, further if the server reports that fewer run. Requests in flight beyond the limit are not
cut: they drain, and meanwhile nothing is counted, because that would be the same congestion. Where
requests wait inside and none was preempted, all seats are taken: the limit falls to the running
ones and a few.

*A server that is met anew* begins as a new one: its cache is empty, it compiles for sizes that it
has not met, and its capacity may be another.

No seed depends on the limit, for seeds are of samples; and it is used for servers alone, whose
answers depend on their batch in any case.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

START = 32.0  # requests for a new server: a few groups, whose prompts it computes once
LEAST = 4.0  # below it a GPU idles, however full its cache is
WARM = 1.0  # more requests for each answer: twice as many in an answer's life
STEADY = 1 / 12  # 8 % more in an answer's life: twice what one cut takes in two lives
WARM_BELOW = 0.5  # share of the cache; running answers have half of their length on average
GROW_BELOW = 0.92  # share of the cache; the rest is for a spread of lengths
TOLERATED = 0.02  # preemptions per request of the limit in as many answers: 2 % computed twice
KEPT = 0.85  # of the limit after a cut; more than the spread, or the next life is congested again
AT_ONCE = 0.5  # of the limit that one cut leaves at least: what runs is one moment's reading
SETTLED = 0.25  # of a limit's worth of answers after a cut, before preemptions count again
USED = 0.9  # of the limit in flight: so the limit holds requests back; several may end at once
QUEUED = 1 / 16  # of the limit that may wait in a server, which so never waits for us
AFTER_PULL = 2  # looks: vLLM counts a pull's preemptions once it resumes
TWICE = 2  # looks in a row at which requests wait: one is a burst of arrivals
SLACK = 8  # requests that a preferred server may have more than a like share: a group's siblings


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """A server's report of its load at one moment."""

    num_running: int
    num_waiting: int
    cache_share: float  # used share of the memory for keys and values, 0 to 1
    num_preemptions: int | None  # since the server was started; None: not reported


class Capacity:
    """The limit of one server."""

    def __init__(self, most: int, *, adapts: bool) -> None:
        """
        Args:
            most: upper bound of the limit; without `adapts` it is the limit.
        """
        self.num_preemptions = 0  # seen since this was made
        self.why = "fixed"  # reason of the limit's last change, for people
        self._most, self._adapts = float(most), adapts
        self._limit = self._most
        self.meet()

    @property
    def limit(self) -> int:
        """Requests that may be in flight."""
        return int(self._limit)

    def meet(self) -> None:
        """Begin anew: the server is new, or was started again."""
        self._is_warming, self._may_grow = True, True
        self._drains_from: float | None = None  # answers to go once drained; None: nothing drains
        self._preempted = self._answers = 0  # of this window
        self._counted = 0  # the server's count of preemptions at the last look
        self._num_passed = 1  # looks to come that only read the counter
        self._says = False  # it has a counter: counts in answers are not added to it
        self._num_queued = 0  # looks in a row
        if self._adapts:
            self._limit, self.why = min(START, self._most), "met anew: warming"

    def rebase(self) -> None:
        """Ignore the preemptions of a change of weights: they are no congestion."""
        self._num_passed = AFTER_PULL

    def answered(self, in_flight: int, num_preemptions: int) -> None:
        """Count an answer.

        Args:
            in_flight: requests, this one included.
            num_preemptions: times that it was preempted, other than by a pull.
        """
        if not self._says:
            self._preempt(num_preemptions)
        if not self._adapts:
            return
        self._answers += 1
        if self._drains_from is not None:
            self._drain(in_flight)
            return
        if self._preempted > max(1.0, TOLERATED * self._limit):
            self._cut(self._limit)
            return
        if self._answers >= self._limit:
            self._preempted = self._answers = 0
        if self._may_grow and in_flight >= USED * self._limit and self._limit < self._most:
            self._limit = min(self._most, self._limit + (WARM if self._is_warming else STEADY))
            self.why = "warming" if self._is_warming else "has room"

    def look(self, gauges: Gauges, in_flight: int) -> None:
        """Take the server's gauges in."""
        if (now := gauges.num_preemptions) is not None:
            self._says = True
            self._preempt(0 if self._num_passed else max(0, now - self._counted))
            self._counted, self._num_passed = now, max(0, self._num_passed - 1)
        if not self._adapts:
            return
        if gauges.cache_share >= WARM_BELOW:
            self._is_warming = False
        is_queued = gauges.num_waiting > max(1.0, QUEUED * self._limit)
        self._num_queued = self._num_queued + 1 if is_queued else 0
        self._may_grow = gauges.cache_share < GROW_BELOW and not is_queued
        if self._drains_from is not None:
            self._drain(in_flight)
        elif self._preempted > max(1.0, TOLERATED * self._limit):
            self._cut(gauges.num_running)
        elif self._num_queued >= TWICE and gauges.num_running:
            seats = gauges.num_running * (1 + QUEUED)
            if seats < self._limit:
                self._to(max(seats, AT_ONCE * self._limit), "requests waited in it")

    def _preempt(self, number: int) -> None:
        self.num_preemptions += number
        self._preempted += number

    def _cut(self, num_running: float) -> None:
        self._to(min(KEPT * self._limit, max(num_running, AT_ONCE * self._limit)), "preempted")

    def _to(self, limit: float, why: str) -> None:
        self._limit, self.why = max(min(LEAST, self._most), limit), why
        self._is_warming, self._num_queued = False, 0
        self._drains_from, self._answers = SETTLED * self._limit, 0

    def _drain(self, in_flight: int) -> None:
        assert self._drains_from is not None
        if in_flight > self.limit:
            self._answers = 0
        elif self._answers >= self._drains_from:
            self._drains_from, self._preempted, self._answers = None, 0, 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One server that may be given a request."""

    in_flight: int
    limit: int


def choose(group_id: str, candidates: Mapping[str, Candidate], before: str = "") -> str | None:
    """The url of the server to take, or None if all are full.

    A server is eligible if it has room and is not much fuller than the least full one. Of these the
    one that answered the session last is taken, because it has the session's turns in its cache;
    else the one that weighs most for the group, because siblings share a prompt. The weight is the
    highest of random ones (rendezvous hashing: Thaler and Ravishankar, 1996), so a server that
    comes or goes moves only its own groups.

    Args:
        candidates: of each server that may be given a request, by url.
        before: the url that answered the session's last request; empty: it had none.
    """
    least = min((one.in_flight / one.limit for one in candidates.values()), default=0.0)
    near = [
        url
        for url, one in candidates.items()
        if one.in_flight < one.limit and one.in_flight <= least * one.limit + SLACK
    ]
    if before in near:
        return before
    return max(near, key=lambda url: _weight(group_id, url), default=None)


def _weight(group_id: str, url: str) -> bytes:
    return hashlib.blake2b(f"{group_id}\0{url}".encode(), digest_size=8).digest()

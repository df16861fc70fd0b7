"""Which policy versions a worker believes: by epoch, by content, and in doubt by the ledger."""

from __future__ import annotations

import pytest

from rlstreams.schemas.events import NO_VERSION, Event, PolicyPublished
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topics import POLICY_VERSIONS, STEPS, Topic
from rlstreams.workers.loop.claims import TAIL
from rlstreams.workers.policy.view import KEPT, PolicyFollower, PolicyView
from tests.factories import heartbeat, policy_published, step_completed, trainer_started
from tests.logs import made_log
from tests.memory.bus import MemoryBus


class Site:
    """A log with a follower of it."""

    def __init__(self) -> None:
        log = made_log()
        self.bus = MemoryBus(log, "run")
        self._pen = self.bus.producer("trainer.0")
        self.follower = PolicyFollower(self.bus, every_s=0.0)

    def says(self, *events: Event, topic: Topic = POLICY_VERSIONS) -> None:
        self._pen.commit([outgoing(topic, event) for event in events])

    def sends(self, record: Outgoing) -> None:
        self._pen.commit([record])

    @property
    def newest(self) -> tuple[int, str]:
        """Number and hash of the newest version that may be pulled."""
        self.follower._next_settling = 0.0
        found = self.follower.poll().newest
        return (found.policy_version, found.weight_hash) if found else (NO_VERSION, "")


def published(version: int, content: str, epoch: int = 1) -> PolicyPublished:
    return policy_published(version, weight_hash=content, epoch=epoch)


def test_a_publication_of_a_fenced_epoch_is_void() -> None:
    """The trainer that was taken over wakes up and announces a version: nobody pulls it."""
    site = Site()
    site.says(published(1, "a", epoch=1), published(2, "b", epoch=2), published(3, "z", epoch=1))
    assert (2, "b") == site.newest


def test_a_number_with_the_same_content_brings_new_endpoints() -> None:
    """A successor announces its newest version again."""
    site = Site()
    site.says(published(1, "a", epoch=1), published(1, "a", epoch=2))
    assert (1, "a") == site.newest
    assert [] == list(site.follower.view.disputed)
    found = site.follower.view.get(1)
    assert 2 == found.epoch


@pytest.mark.parametrize("order", [("true", "forged"), ("forged", "true")])
def test_of_two_contents_the_ledger_chooses(order: tuple[str, str]) -> None:
    """Whichever came first; the worker lives, and holds neither until `steps` has spoken."""
    site = Site()
    site.says(published(1, "a"))
    site.says(*(published(2, content) for content in order))
    assert (1, "a") == site.newest
    assert [2] == list(site.follower.view.disputed)
    site.says(trainer_started(), step_completed(1, policy_version=1, weight_hash="a"), topic=STEPS)
    assert (1, "a") == site.newest
    site.says(step_completed(2, policy_version=2, weight_hash="true"), topic=STEPS)
    assert (2, "true") == site.newest
    assert [] == list(site.follower.view.disputed)


@pytest.mark.parametrize("epoch", [3, 1 << 62])
def test_an_epoch_that_nobody_claimed_is_void(epoch: int) -> None:
    """Else one forged record would void all true versions behind it, for ever."""
    site = Site()
    site.says(trainer_started(epoch=1), trainer_started(epoch=2), topic=STEPS)
    site.says(published(1, "a", epoch=2), published(9, "forged", epoch=epoch))
    assert (1, "a") == site.newest
    site.says(published(2, "b", epoch=2))
    assert (2, "b") == site.newest
    site.says(trainer_started(epoch=3), topic=STEPS)
    site.says(published(3, "c", epoch=3))
    assert (3, "c") == site.newest


@pytest.mark.parametrize("beats", [0, 1])
def test_a_claim_long_ago_is_found(beats: int) -> None:
    """By the offset in a heartbeat at the end of `steps`; without one, by reading all of it."""
    site = Site()
    steps = [step_completed(n, policy_version=n) for n in range(1, 2 * TAIL)]
    site.says(trainer_started(epoch=1), *steps, topic=STEPS)
    site.says(*[heartbeat(epoch=1, claim_offset=0)] * beats, topic=STEPS)
    site.says(published(1, "a"))
    assert (1, "a") == site.newest


def test_a_long_run_does_not_fill_the_memory() -> None:
    """Kept are the newest versions, whatever is served, and one text of the layout they share."""
    view, last, served = PolicyView(), 10 * KEPT, (3, 10 * KEPT)
    for version in range(last + 1):
        layout = "".join(["[", "]"])  # as a decoder makes it: equal, and another object each time
        view.apply(policy_published(version, layout=layout, versions_served=served))
    held = [event for v in range(last + 1) if (event := view.get(v)) is not None]
    assert (last, [3, last]) == (view.newest_version, list(view.served))
    assert 3 == held[0].policy_version
    assert KEPT < len(held) <= 2 * KEPT + 1
    assert 1 == len({id(event.layout) for event in held})

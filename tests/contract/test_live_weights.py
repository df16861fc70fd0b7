"""`weights.snapshot = "none"`: no copy is taken, and the trainer waits until the pulls are over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from rlstreams.workers.weights.channel import VersionGoneError, WeightError
from rlstreams.workers.weights.collective import CollectiveWeightChannel, CollectiveWeightServer
from rlstreams.workers.weights.layout import weight_hash
from rlstreams.workers.weights.sender import Limits
from tests.contract.engine_rigs import announced
from tests.contract.test_collective_channel import EPOCH, SECRET, Log, Stand
from tests.contract.test_weight_channel import weights

LONG_S = 60.0


def serving(hold_s: float) -> Stand:
    log = Log()
    limits = Limits(window_s=0.01, form_s=LONG_S, stall_s=LONG_S)
    server = CollectiveWeightServer(
        "gloo",
        host="127.0.0.1",
        secret=SECRET,
        log=log,
        limits=limits,
        place="none",
        hold_s=hold_s,
    )
    server.open(EPOCH)
    return Stand(server, log)


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = serving(LONG_S)
    yield made
    made.server.close()


@pytest.fixture
def channel() -> Iterator[CollectiveWeightChannel]:
    made = CollectiveWeightChannel("gloo", SECRET)
    yield made
    made.close()


def beside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_no_copy_is_taken(stand: Stand, channel: CollectiveWeightChannel) -> None:
    """The trainer must hold still: what it changes is sent, and refused by its hash."""
    live = weights(0)
    manifest = stand.server.publish(0, live)
    live["scale"].add_(1)
    with pytest.raises(WeightError, match="was published with hash"):
        stand.pull(channel, announced(stand.server, manifest))


def test_training_waits_for_those_that_are_connected(
    stand: Stand, channel: CollectiveWeightChannel
) -> None:
    """A puller of the version before gets the next one first; then nothing is served."""
    stand.pull(channel, stand.publish(0))
    stand.server.before_change()  # it has it: no wait
    published = stand.publish(1)
    training = beside(stand.server.before_change)
    assert training.is_alive()
    assert weight_hash(stand.pull(channel, published)) == published.weight_hash
    training.join(LONG_S)
    assert not training.is_alive()
    assert list(stand.server.versions()) == []
    with pytest.raises(VersionGoneError, match="version 1 is no longer served"):
        stand.pull(channel, published)
    assert "puller_not_awaited" not in stand.log.events


def test_who_does_not_pull_is_named_and_not_awaited_for_ever(
    channel: CollectiveWeightChannel,
) -> None:
    """After `hold_s` training goes on; the one who comes late gets the next version."""
    stand = serving(hold_s=0.0)
    stand.pull(channel, stand.publish(0))
    missed = stand.publish(1)
    stand.server.before_change()
    assert stand.log.events.count("puller_not_awaited") == 1
    with pytest.raises(VersionGoneError):
        stand.pull(channel, missed)
    published = stand.publish(2)
    assert weight_hash(stand.pull(channel, published)) == published.weight_hash
    stand.server.close()


def test_nobody_is_awaited_where_nobody_is_connected(stand: Stand) -> None:
    """A trainer that is alone trains."""
    stand.publish(0)
    stand.server.before_change()
    assert list(stand.server.versions()) == []


def test_a_server_that_closes_lets_the_trainer_go_on(
    stand: Stand, channel: CollectiveWeightChannel
) -> None:
    """However long it would have waited for a puller."""
    stand.pull(channel, stand.publish(0))
    stand.publish(1)
    training = beside(stand.server.before_change)
    stand.server.close()
    training.join(LONG_S)
    assert not training.is_alive()
    stand.server.before_change()


def test_copies_need_no_wait(channel: CollectiveWeightChannel) -> None:
    """With any other place the versions stay, whoever still wants them."""
    log = Log()
    server = CollectiveWeightServer("gloo", host="127.0.0.1", secret=SECRET, log=log)
    server.open(EPOCH)
    stand = Stand(server, log)
    stand.pull(channel, stand.publish(0))
    stand.publish(1)
    server.before_change()
    assert list(server.versions()) == [0, 1]
    server.close()


@pytest.mark.parametrize("place", ["device", "none"])
def test_a_trainer_that_is_through_waits_until_its_last_version_is_pulled(
    channel: CollectiveWeightChannel, place: str
) -> None:
    """It is evaluated after the last step, and ends with the trainer's process."""
    log = Log()
    limits = Limits(window_s=0.01, form_s=LONG_S, stall_s=LONG_S)
    server = CollectiveWeightServer(
        "gloo", host="127.0.0.1", secret=SECRET, log=log, limits=limits, place=place
    )
    server.open(EPOCH)
    stand = Stand(server, log)
    stand.pull(channel, stand.publish(0))
    last = stand.publish(1)
    ending = beside(lambda: server.finish(LONG_S))
    assert weight_hash(stand.pull(channel, last)) == last.weight_hash
    ending.join(LONG_S)
    assert not ending.is_alive()
    assert "puller_not_awaited" not in log.events
    server.close()


def test_who_never_pulls_the_last_version_is_named() -> None:
    """After the deadline of a pull; the trainer ends all the same."""
    stand, channel = serving(LONG_S), CollectiveWeightChannel("gloo", SECRET)
    stand.pull(channel, stand.publish(0))
    stand.publish(1)
    stand.server.finish(0.0)
    assert stand.log.events.count("puller_not_awaited") == 1
    channel.close()
    stand.server.close()

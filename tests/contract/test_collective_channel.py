"""What only `gloo` and `nccl` promise: who is served, when, and what a failure costs."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.weights import sender
from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.collective import CollectiveWeightChannel, CollectiveWeightServer
from rlstreams.workers.weights.layout import parse_layout, weight_hash
from rlstreams.workers.weights.link import ipc, receiver
from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.handshake import receiver_key
from rlstreams.workers.weights.link.pieces import Piece
from rlstreams.workers.weights.link.receiver import Address, Receiver
from rlstreams.workers.weights.link.shards import Part
from rlstreams.workers.weights.link.target import FreshTensors
from rlstreams.workers.weights.sender import SenderDeadlines
from rlstreams.workers.weights.snapshot import Snapshot
from tests import factories
from tests.contract.engine_rigs import announced
from tests.contract.test_weight_channel import weights

SECRET, EPOCH, DEADLINE_S = "the run's", 1, 120.0  # the epoch is the one that `announced` says


@dataclass
class Log:
    """Keeps what it is told."""

    events: list[str] = field(default_factory=list)

    def info(self, event: str, **fields: object) -> None:
        self.events.append(event)

    warning = info

    def wait_for(self, event: str, count: int) -> None:
        """Until it was told so often."""
        until_s = time.monotonic() + DEADLINE_S
        while self.events.count(event) < count:
            assert time.monotonic() < until_s, f"{count} times {event}: {self.events}"
            time.sleep(0.005)


@dataclass
class Stand:
    """A server that listens, and its log."""

    server: CollectiveWeightServer
    log: Log

    def publish(self, policy_version: int) -> PolicyPublished:
        manifest = self.server.publish(policy_version, weights(policy_version))
        return announced(self.server, manifest)

    def ask(self, channel: CollectiveWeightChannel, policy_version: int) -> None:
        """The request stands in the log."""
        address = channel.address()
        self.server.serve(factories.pull_requested(policy_version, channel="gloo", address=address))

    def pull(
        self, channel: CollectiveWeightChannel, published: PolicyPublished
    ) -> dict[str, torch.Tensor]:
        self.ask(channel, published.policy_version)
        return dict(channel.pull(published, DEADLINE_S))


def serving(epoch: int = EPOCH, window_s: float = 0.5) -> Stand:
    log = Log()
    limits = SenderDeadlines(window_s=window_s, form_s=60.0, stall_s=60.0)
    server = CollectiveWeightServer("gloo", host="127.0.0.1", secret=SECRET, log=log, limits=limits)
    server.open(epoch)
    return Stand(server, log)


def receiver_of(
    name: str, published: PolicyPublished, mode: str = "in_place", rank: int = 0, ranks: int = 1
) -> Receiver:
    """One that knows its key."""
    address = Address(
        address=published.endpoints[0].address, backend="gloo", receiver=name,
        key=receiver_key(SECRET, name), epoch=EPOCH, rank=rank, ranks=ranks,
    )  # fmt: skip
    return Receiver(address, torch.device("cpu"), engine="test", mode=mode)


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = serving()
    yield made
    made.server.close()


@pytest.fixture
def channel() -> Iterator[CollectiveWeightChannel]:
    made = CollectiveWeightChannel("gloo", SECRET)
    yield made
    made.close()


def test_pullers_that_are_ready_together_share_one_broadcast() -> None:
    """Three pulls, one `weights_sent`; a group that stands is used again."""
    stand = serving(window_s=2.0)  # it ends as soon as all that are connected have asked
    channels = [CollectiveWeightChannel("gloo", SECRET) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for version in (0, 1):
            published = stand.publish(version)
            pulls = [pool.submit(lambda c, p: dict(c.pull(p, DEADLINE_S)), c, published)
                     for c in channels]  # fmt: skip
            stand.log.wait_for("puller_joined", 3)
            for channel in channels:
                stand.ask(channel, version)
            assert {weight_hash(pull.result()) for pull in pulls} == {published.weight_hash}
    for channel in channels:
        channel.close()
    stand.server.close()
    assert stand.log.events.count("weights_sent") <= 4  # six, if nothing were shared


def test_pullers_on_the_trainers_card_are_sent_to_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three servers and the scorer of one GPU, through the trainer's one window."""
    for module in (sender, receiver):
        monkeypatch.setattr(module, "gpu_of", lambda _: "GPU-card")
    monkeypatch.setattr(ipc, "WINDOW_BYTES", 16)  # pieces cross in several windows
    monkeypatch.setattr(ipc, "_windows", {})
    monkeypatch.setattr(ipc, "exported", lambda _: "here")
    monkeypatch.setattr(ipc, "opened", lambda _, device: ipc.window_of(device))
    stand = serving()
    channels = [CollectiveWeightChannel("gloo", SECRET) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for version in (0, 1):
            published = stand.publish(version)
            pulls = [pool.submit(stand.pull, channel, published) for channel in channels]
            assert {weight_hash(pull.result()) for pull in pulls} == {published.weight_hash}
    for channel in channels:
        channel.close()
    stand.server.close()
    assert (8, 0) == (stand.log.events.count("weights_sent"), stand.log.events.count("no_cuda_ipc"))


def test_nobody_waits_for_those_that_have_the_version() -> None:
    """One that joins late is sent to at once: the others hold the version, or a newer one."""
    stand = serving(window_s=10 * DEADLINE_S)  # a pull that waited it out would be given up
    early, late = (CollectiveWeightChannel("gloo", SECRET) for _ in range(2))
    old, new = stand.publish(0), stand.publish(1)
    for channel, published in ((early, new), (late, old), (late, new)):
        assert published.weight_hash == weight_hash(stand.pull(channel, published))
    for channel in (early, late):
        channel.close()
    stand.server.close()


def test_who_did_not_ask_in_the_log_gets_nothing(
    stand: Stand, channel: CollectiveWeightChannel
) -> None:
    """Knowing the secret is not enough; the puller's own deadline ends its wait."""
    published = stand.publish(0)
    with pytest.raises(WeightError, match="has not answered in time"):
        dict(channel.pull(published, 0.3))


def test_a_wrong_secret_is_refused(stand: Stand) -> None:
    stranger = CollectiveWeightChannel("gloo", "a guess")
    with pytest.raises(WeightError, match="the secret is not this run's"):
        stand.pull(stranger, stand.publish(0))
    stand.log.wait_for("puller_refused", 1)
    assert stand.log.events == ["puller_refused"]


def test_a_trainer_that_is_gone_is_named(channel: CollectiveWeightChannel) -> None:
    stand = serving()
    published = stand.publish(0)
    stand.server.close()
    with pytest.raises(WeightError, match=published.endpoints[0].address):
        stand.pull(channel, published)


def test_a_layout_that_is_not_the_servers_is_refused(
    stand: Stand, channel: CollectiveWeightChannel
) -> None:
    published = stand.publish(0)
    wrong = dataclasses.replace(published, layout=published.layout.replace("[2,3]", "[3,2]"))
    with pytest.raises(WeightError, match=r"model.z.weight float32 \[3, 2\]"):
        stand.pull(channel, wrong)


def test_a_receiver_that_cannot_be_a_rank_of_its_server_is_refused(
    stand: Stand, channel: CollectiveWeightChannel
) -> None:
    """A pipeline's second stage says rank 2 of 2: it gets nothing, and others go on."""
    published = stand.publish(0)
    stand.server.serve(factories.pull_requested(0, channel="gloo", address="odd"))
    receiver = receiver_of("odd", published, mode="auto", rank=2, ranks=2)
    halves = FreshTensors(
        [(n, str(t.dtype).removeprefix("torch."), (t.shape[0] // 2, *t.shape[1:]))
         for n, t in weights(0).items() if t.ndim and t.shape[0] % 2 == 0],
        torch.device("cpu"),
    )  # fmt: skip
    with pytest.raises(PullError, match="rank 2 of 2"):
        receiver.receive(0, halves, time.monotonic() + DEADLINE_S)
    assert stand.pull(channel, published)


def test_weights_of_a_type_that_cannot_be_sent_are_refused_by_name(
    stand: Stand, channel: CollectiveWeightChannel
) -> None:
    """And the next version, without them, is sent."""
    odd = weights(0) | {"rotary": torch.zeros(2, dtype=torch.complex64)}
    published = announced(stand.server, stand.server.publish(0, odd))
    with pytest.raises(WeightError, match="rotary complex64"):
        stand.pull(channel, published)
    assert stand.pull(channel, stand.publish(1))


def test_two_pulls_of_one_worker_follow_each_other(
    stand: Stand, channel: CollectiveWeightChannel
) -> None:
    """A worker of several servers without the transfer plugin pulls for each; its link is one."""
    for version in range(4):
        published = stand.publish(version)
        stand.ask(channel, version)
        with ThreadPoolExecutor(3) as pool:
            pulls = [pool.submit(lambda p: dict(channel.pull(p, DEADLINE_S)), published)
                     for _ in range(3)]  # fmt: skip
            assert {weight_hash(pull.result()) for pull in pulls} == {published.weight_hash}


class Unreadable(Snapshot):
    """As of a GPU that has no room to stage a piece."""

    def bytes_of(self, piece: Piece, part: Part) -> torch.Tensor:
        raise RuntimeError(f"out of memory at {piece.name}")


def test_a_copy_that_cannot_be_staged_breaks_its_transfer_only(
    stand: Stand, channel: CollectiveWeightChannel
) -> None:
    """Tried again, refused with the reason in the end; the sender goes on."""
    published, later = stand.publish(0), stand.publish(1)
    held = stand.server._snapshots._held
    held[0] = Unreadable(held[0].weight_hash, held[0].tensors, torch.device("cpu"))
    with pytest.raises(WeightError, match="out of memory at"):
        stand.pull(channel, published)
    assert stand.pull(channel, later)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_sender_that_ended_is_told_to_the_trainer(stand: Stand) -> None:
    """Nobody would ever get a version again: the trainer is to start anew."""
    stand.server._sender._calls.put("no call")  # type: ignore[arg-type]
    stand.server._sender._thread.join(DEADLINE_S)
    with pytest.raises(WeightError, match="sender of weights ended"):
        stand.server.publish(0, weights(0))
    with pytest.raises(WeightError, match="sender of weights ended"):
        stand.server.serve(factories.pull_requested(0, channel="gloo", address="any"))


class Full(FreshTensors):
    """As of a GPU that has no room for a piece."""

    def buffer(self, piece: Piece) -> torch.Tensor:
        raise RuntimeError(f"out of memory at {piece.name}")


def test_a_receiver_that_fails_leaves_at_once(stand: Stand) -> None:
    """Whoever shares its broadcast would wait for it until the deadline."""
    published = stand.publish(0)
    stand.server.serve(factories.pull_requested(0, channel="gloo", address="full"))
    receiver = receiver_of("full", published)
    rows = parse_layout(published.layout)
    with pytest.raises(RuntimeError, match="out of memory"):
        receiver.receive(0, Full(rows, torch.device("cpu")), time.monotonic() + DEADLINE_S)
    stand.log.wait_for("puller_lost", 1)


def test_a_trainer_that_is_through_waits_until_its_last_version_is_pulled(
    stand: Stand, channel: CollectiveWeightChannel
) -> None:
    """It is evaluated after the last step, and ends with the trainer's process."""
    stand.pull(channel, stand.publish(0))
    last = stand.publish(1)
    ending = threading.Thread(target=stand.server.finish, args=(DEADLINE_S,), daemon=True)
    ending.start()
    ending.join(0.2)
    assert ending.is_alive(), "it did not wait"
    assert weight_hash(stand.pull(channel, last)) == last.weight_hash
    ending.join(DEADLINE_S)
    assert not ending.is_alive()
    assert "puller_not_awaited" not in stand.log.events


def test_who_never_pulls_the_last_version_is_named(
    stand: Stand, channel: CollectiveWeightChannel
) -> None:
    """After the deadline of a pull; the trainer ends all the same, also if its server closes."""
    stand.pull(channel, stand.publish(0))
    stand.publish(1)
    stand.server.finish(0.0)
    assert stand.log.events.count("puller_not_awaited") == 1
    stand.pull(channel, stand.publish(2))
    stand.publish(3)
    ending = threading.Thread(target=stand.server.finish, args=(DEADLINE_S,), daemon=True)
    ending.start()
    stand.server.close()
    ending.join(DEADLINE_S)
    assert not ending.is_alive()

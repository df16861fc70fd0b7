"""Becoming the trainer: rivals, last words, and logs that are not the run's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.schemas.events import TrainerStarted
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Producer, Reader
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import ConfigError, FencedError
from rlstreams.streams.log.record import Outgoing, Partition, RawRecord
from rlstreams.streams.log.topics import SCORED, STEPS, TOPICS
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.runtime import OwnerAliveError
from rlstreams.workers.trainer.claim import Claimed, claim
from tests import factories
from tests.heavy.trainer.trainer_stand import (
    bury,
    make_config,
    make_log,
    make_trainer,
    read,
    run_steps,
    scored,
    send,
    steps,
    tick_until,
    train,
)
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog


class InterposedBus(MemoryBus):
    """Something happens elsewhere just before our producer is made, or at each poll of ours."""

    before_producer: Callable[[], object] = staticmethod(lambda: None)
    at_poll: Callable[[], object] = staticmethod(lambda: None)
    num_polls = 0  # the first one reads what was there

    def producer(self, transactional_id: str) -> Producer:  # type: ignore[override]
        self.before_producer()
        return super().producer(transactional_id)

    def reader(self, offsets: Mapping[Partition, int] | None = None) -> Reader:  # type: ignore[override]
        reader, bus = super().reader(offsets), self
        poll = reader.poll

        def interposed(max_records: int, timeout_s: float) -> Sequence[RawRecord]:
            bus.num_polls += 1
            bus.at_poll()
            return poll(max_records, timeout_s)

        reader.poll = interposed  # type: ignore[method-assign]
        return reader


def claimed(
    bus: MemoryBus,
    config: RunConfig,
    instance: str,
    *,
    takeover: bool = False,
    reaped: frozenset[str] = frozenset(),
) -> Claimed:
    context = Context(
        config=config,
        bus=bus,
        role="trainer",
        ordinal=0,
        instance=instance,
        takeover=takeover,
        reaped=reaped,
    )

    def event(ledger: Ledger) -> TrainerStarted:
        return factories.trainer_started(run="demo", epoch=ledger.epoch + 1, instance=instance)

    return claim(context, bus, event)


def beat(epoch: int = 1, state: str = "waiting") -> Outgoing:
    return outgoing(STEPS, factories.heartbeat(run="demo", epoch=epoch, state=state))


def claims(log: MemoryLog) -> list[tuple[int, str]]:
    found = [e for e in read(log, STEPS.name) if isinstance(e, TrainerStarted)]
    return [(event.epoch, event.instance) for event in found]


def test_an_owner_that_writes_during_the_watch_is_left_alone(tmp_path: Path) -> None:
    """The second one refuses, and the first one's producer still works."""
    log, config = make_log(), make_config(tmp_path, deadlines__lease_s=5.0)
    first = claimed(MemoryBus(log, "demo"), config, "one")
    bus = InterposedBus(log, "demo")
    bus.at_poll = lambda: first.producer.commit([beat()])
    with pytest.raises(OwnerAliveError, match=r"epoch 1 \(instance one on host learner\) is alive"):
        claimed(bus, config, "two")
    first.producer.commit([beat()])
    assert [(1, "one")] == claims(log)


def test_last_words_are_no_life(tmp_path: Path) -> None:
    """What a dead owner committed may become readable a moment later: that is no heartbeat."""
    log, config = make_log(), make_config(tmp_path, deadlines__lease_s=0.6)
    first = claimed(MemoryBus(log, "demo"), config, "one")
    words = [beat()]
    bus = InterposedBus(log, "demo")

    def last_words() -> None:
        if words and bus.num_polls == 2:
            first.producer.commit([words.pop()])

    bus.at_poll = last_words
    assert 2 == claimed(bus, config, "two").claim.epoch


def test_a_rivals_claim_counts_at_once(tmp_path: Path) -> None:
    """It was faster; that it came early in our watch makes it no less alive."""
    log, config = make_log(), make_config(tmp_path, deadlines__lease_s=30.0)
    claimed(MemoryBus(log, "demo"), config, "one")
    bus, rivals = InterposedBus(log, "demo"), ["rival"]

    def rival() -> None:
        if rivals and bus.num_polls == 2:
            claimed(MemoryBus(log, "demo"), config, rivals.pop(), takeover=True)

    bus.at_poll = rival
    with pytest.raises(OwnerAliveError, match=r"epoch 2 \(instance rival on host learner\)"):
        claimed(bus, config, "two")


def test_who_wakes_up_behind_its_own_successor_leaves_it_alone(tmp_path: Path) -> None:
    """Told that the owner had ended, it slept before its claim; the owner is another one by now."""
    log, config = make_log(), make_config(tmp_path, deadlines__lease_s=5.0)
    claimed(MemoryBus(log, "demo"), config, "one")
    successor = claimed(MemoryBus(log, "demo"), config, "three", reaped=frozenset({"one"}))
    bus = InterposedBus(log, "demo")
    bus.at_poll = lambda: successor.producer.commit([beat(epoch=2)])
    with pytest.raises(
        OwnerAliveError, match=r"epoch 2 \(instance three on host learner\) is alive"
    ):
        claimed(bus, config, "two", reaped=frozenset({"one"}))
    assert [(1, "one"), (2, "three")] == claims(log)


def test_what_the_owner_commits_between_watch_and_fence_counts(tmp_path: Path) -> None:
    """The log is read again behind the fence, so that no step is done twice."""
    log, config = make_log(), make_config(tmp_path)
    first = claimed(MemoryBus(log, "demo"), config, "one")
    bus = InterposedBus(log, "demo")
    step = factories.step_completed(run="demo", epoch=1, step=1, policy_version=1)
    bus.before_producer = lambda: first.producer.commit([outgoing(STEPS, step)])
    second = claimed(bus, config, "two", takeover=True)
    assert (1, 2) == (second.ledger.last_step, second.claim.epoch)
    with pytest.raises(FencedError):
        first.producer.commit([beat()])


def test_of_two_that_start_together_one_owns_the_run(tmp_path: Path) -> None:
    """The producer made last fences the other, whose claim fails: each epoch has one owner."""
    log, config = make_log(), make_config(tmp_path)
    context = Context(
        config=config, bus=MemoryBus(log, "demo"), role="trainer", ordinal=0, instance="one"
    )

    def slow(ledger: Ledger) -> TrainerStarted:
        claimed(MemoryBus(log, "demo"), config, "two")
        return factories.trainer_started(run="demo", epoch=ledger.epoch + 1, instance="one")

    with pytest.raises(FencedError):
        claim(context, context.bus, slow)
    assert [(1, "two")] == claims(log)


def test_foreign_records_in_the_ledger_are_passed_by(tmp_path: Path) -> None:
    """Bytes that are no event, and events of another topic, are nobody's sign of life."""
    log, config = make_log(), make_config(tmp_path)
    claimed(MemoryBus(log, "demo"), config, "one")
    stranger = MemoryBus(log, "demo").producer("stranger")
    bus = InterposedBus(log, "demo")
    noise = [
        Outgoing(topic=STEPS.name, key=b"demo", value=[b"noise"]),
        Outgoing(topic=STEPS.name, key=b"demo", value=outgoing(SCORED, scored(0, 0, 0)).value),
    ]
    bus.at_poll = lambda: stranger.commit(noise)
    assert 2 == claimed(bus, config, "two").claim.epoch


@pytest.mark.parametrize(
    ("topic", "partitions", "expected"),
    [
        (SCORED.name, 1, "the id of topic scored-trajectories was .* and is .*; it was made anew"),
        ("prompts", 3, "the (id of topic|number of partitions of) prompts was"),
        (STEPS.name, 1, "steps holds no claim, but policy-versions holds records"),
    ],
)
def test_a_topic_that_was_made_anew_is_refused(
    tmp_path: Path, topic: str, partitions: int, expected: str
) -> None:
    """Old positions would name new records, and without a ledger all would be trained again."""
    log, config = make_log(), make_config(tmp_path)
    first = make_trainer(log, config)
    train(log, first, 1)
    tick_until(first, lambda: first._reporter.policy_version == 1)
    bury(first)
    log.create(f"demo.{topic}", partitions)
    with pytest.raises(ConfigError, match=expected):
        make_trainer(log, config, "two", takeover=True)


@pytest.mark.parametrize("witness", ["checkpoint", "policy-versions"])
def test_a_ledger_without_its_tail_is_refused(tmp_path: Path, witness: str) -> None:
    """The broker cuts a damaged log: what was trained behind the cut would be trained again."""
    log, config = make_log(), make_config(tmp_path, trainer__checkpoint_every=1)
    first = make_trainer(log, config)
    for group in range(2):
        send(log, *(scored(group, sample, 0) for sample in range(2)))
        run_steps(log, first, group + 1)
    tick_until(first, lambda: first._recovery.saved_step == 2)
    bury(first)
    made = replace(scored(2, 0, 2).scores[0], weight_hash=steps(log)[-1].weight_hash)
    send(log, replace(scored(2, 0, 2), scores=(made,)))
    ids = MemoryBus(log, "demo").topic_ids([topic.name for topic in TOPICS])

    class Cut(MemoryBus):
        def topic_ids(self, topics: Sequence[str]) -> Mapping[str, str]:
            return {name: ids[name] for name in topics}

    if witness != "checkpoint":
        shutil.rmtree(tmp_path / "checkpoints")
    if witness != "policy-versions":
        log.create("demo.policy-versions", 1)
    kept = [event for event in read(log, STEPS.name) if getattr(event, "step", 0) < 2]
    log.create("demo.steps", 1)
    bus = Cut(log, "demo")
    bus.producer("trainer.0").commit([outgoing(STEPS, event) for event in kept])
    told = {
        "checkpoint": "is 1, but checkpoint 000001-00000002 is of step 2. The",
        "policy-versions": "version 2 of step 2; samples in .* under the weights of step 2. The",
    }
    with pytest.raises(ConfigError, match=told[witness]):
        make_trainer(log, config, "two", takeover=True, bus=bus)
    assert kept == read(log, STEPS.name)

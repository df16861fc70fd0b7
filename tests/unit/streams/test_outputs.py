"""Where a group stands by what it wrote, where its committed position cannot be true."""

from __future__ import annotations

import pytest

from rlstreams.schemas.events import Event
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.done_set import decode_done
from rlstreams.streams.log.record import Committed, Outgoing, Partition
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS, SCORED, TRAJECTORIES
from rlstreams.streams.views.outputs import committed_by_outputs
from tests import factories
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog
from tests.unit.workers.test_stage import HeldStage, issue, make_log, make_loop, outputs, ticks

P = Partition(PROMPTS.name, 0)


def write(log: MemoryLog, *records: Outgoing) -> None:
    MemoryBus(log, "run").producer("rollout.0").commit(records)


def letter(topic: str, partition: int, offset: int) -> Event:
    return factories.dead_letter(
        origin_topic=topic, origin_partition=partition, origin_offset=offset
    )


def test_outputs_and_dead_letters_say_what_is_done() -> None:
    """Of this partition alone; what neither names is open, whatever lies above it."""
    log = make_log()
    bus = MemoryBus(log, "run")
    issue(log, "0/0", "0/1", "0/2", "0/3", "0/4")
    names = [raw.position.offset for raw in bus.reader({P: 0}).poll(10, 0.0)]
    of = {"prompt_partition": 0, "prompt_offset": names[0]}
    write(
        log,
        outgoing(TRAJECTORIES, factories.trajectory(**of)),
        outgoing(TRAJECTORIES, factories.trajectory(prompt_partition=1, prompt_offset=names[1])),
        outgoing(TRAJECTORIES, factories.trajectory(**of | {"prompt_offset": names[3]})),
        outgoing(DEAD_LETTERS, letter(PROMPTS.name, 0, names[2])),
        outgoing(DEAD_LETTERS, letter(TRAJECTORIES.name, 0, names[1])),
        Outgoing(topic=TRAJECTORIES.name, key=b"k", value=(b"no event",), partition=0),
    )
    found = committed_by_outputs(bus, P)
    assert names[1] == found.offset
    assert {names[2], names[3]} == decode_done(found.offset, found.metadata)


def test_scores_name_their_trajectories() -> None:
    log = make_log()
    bus = MemoryBus(log, "run")
    events = [factories.trajectory(group_id="7", sample=n) for n in range(3)]
    write(log, *(outgoing(TRAJECTORIES, event, partition=1) for event in events))
    at = Partition(TRAJECTORIES.name, 1)
    first, second, third = [raw.position.offset for raw in bus.reader({at: 0}).poll(10, 0.0)]
    for offset in (first, second, third):
        score = factories.scored(trajectory_partition=1, trajectory_offset=offset)
        write(log, outgoing(SCORED, score))
        if offset == second:
            assert Committed(offset=third) == committed_by_outputs(bus, at)
    assert Committed(offset=bus.ends(at.topic)[at]) == committed_by_outputs(bus, at)


@pytest.mark.parametrize("done", [[], ["0/1"]])
def test_a_worker_whose_group_was_moved_ahead_loses_nothing(done: list[str]) -> None:
    """Another client committed for it: it does what has no output, and commits from there."""
    log, stage = make_log(), HeldStage()
    bus = MemoryBus(log, "run")
    issue(log, "0/0", "0/1", "0/2")
    names = [raw.position.offset for raw in bus.reader({P: 0}).poll(10, 0.0)]
    for name in done:
        number = int(name[-1])
        event = factories.trajectory(
            group_id="0", sample=number, prompt_partition=0, prompt_offset=names[number]
        )
        write(log, outgoing(TRAJECTORIES, event))
    with bus.consumer("rollout", [PROMPTS.name]) as consumer, bus.producer("x") as producer:
        consumer.poll(0, 0.0)
        producer.commit([], {P: Committed(offset=100_000)}, consumer)
    loop = make_loop(log, stage)
    ticks(loop)
    left = {"0/0", "0/1", "0/2"} - set(done)
    assert left == set(stage.begun)
    stage.released = sorted(left)
    ticks(loop, 5)
    assert {"0/0", "0/1", "0/2"} == set(outputs(log))
    assert bus.committed("rollout", PROMPTS.name)[P].offset <= bus.ends(PROMPTS.name)[P]

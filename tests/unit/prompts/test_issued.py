"""The fold of the role's own topic, with strangers' records in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlstreams.schemas.events import Event
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topics import PROMPTS, STEPS, TRAJECTORIES, Topic
from tests.factories import prompt, trajectory
from tests.unit.prompts.world import World, step, ticks


def bytes_of(topic: Topic, event: Event) -> bytes:
    return b"".join(bytes(piece) for piece in outgoing(topic, event).value)


def foreign(
    value: bytes, name: bytes = b"6/0/0", partition: int = 0, purpose: bytes = b"train"
) -> Outgoing:
    headers = {"rlstreams-id": name, "rlstreams-purpose": purpose}
    return Outgoing(
        topic=PROMPTS.name, key=b"6", value=[value], headers=headers, partition=partition
    )


def named_6(**changes: Any) -> bytes:
    return bytes_of(PROMPTS, prompt(**{"group_id": "6", "sample": 0, "seed": 0, **changes}))


OURS = named_6()
FOREIGN = {
    "no group": foreign(named_6(group_id="x")),
    "a number with a leading zero": foreign(named_6(group_id="06")),
    "a sample below 0": foreign(named_6(sample=-1)),
    "a purpose of no run": foreign(named_6(purpose="test")),
    "not framed": foreign(b"rubbish"),
    "an unknown fingerprint": foreign(OURS[:2] + b"12345678" + OURS[10:]),
    "cut short": foreign(OURS[:-3]),
    "another kind of event": foreign(bytes_of(TRAJECTORIES, trajectory(group_id="6"))),
    "the seed of another run": foreign(named_6(seed=99)),
    "a partition that is not its number's": foreign(OURS, partition=1),
    "not the sample of its header, and cut short": foreign(named_6(sample=1)[:-3]),
    "an evaluation of another run": foreign(
        named_6(group_id="e9-0", seed=99), name=b"e9-0/0/0", purpose=b"evaluate"
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_stranger_in_the_topic_does_not_stop_an_heir(
    tmp_path: Path, strangers: list[str], kind: str
) -> None:
    """The record is named and changes nothing: the next group gets the number that it used."""
    world = World(tmp_path)
    first = world.issuing()
    first.close()
    world.trainer.commit([FOREIGN[kind]])
    world.says(step(1, watermark=1))
    heir = world.worker()
    ticks(heir)
    assert 7 == heir._issued.num_groups
    (named,) = strangers
    assert named.startswith(f"prompts[{FOREIGN[kind].partition}]@")


def test_a_stranger_in_steps_is_passed_by(tmp_path: Path) -> None:
    """The ledger goes on behind it."""
    world = World(tmp_path)
    world.trainer.commit([Outgoing(topic=STEPS.name, key=b"run", value=[b"rubbish"])])
    world.issuing()
    assert 6 == len(world.groups())

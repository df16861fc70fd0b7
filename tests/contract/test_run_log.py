"""What `RunLog` promises, held against a live log in memory and on Kafka, and a recording."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlstreams.schemas import DecodeError
from rlstreams.schemas.events import Prompt, ScoredTrajectory, StepCompleted, Trajectory
from rlstreams.streams.log.topics import DEAD_LETTERS, STEPS, TRAJECTORIES
from rlstreams.streams.run.recorded_log import RecordedLog
from rlstreams.streams.run.run_log import BusLog, RunLog, topic_of
from tests.contract.buses import KafkaCluster
from tests.unit.inspect import told_run


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.broker), "recording"])
def log(request: pytest.FixtureRequest, run_id: str, tmp_path: Path) -> Iterator[RunLog]:
    """The same run, wherever it lies."""
    if request.param == "kafka":
        cluster = KafkaCluster(request.getfixturevalue("broker"), run_id)
        told_run.create(cluster.create)
        bus = cluster.bus()
        told_run.publish(bus, told_run.events())
        bus.producer("teller").close()  # waits for the transaction's markers: ends lie behind them
    else:
        bus = told_run.memory_bus()
    if request.param == "recording":
        with RecordedLog(told_run.recorded(tmp_path / "r", bus)) as recorded:
            yield recorded
        return
    with bus, BusLog(bus, told_run.RUN) as live:
        yield live


def test_a_topic_is_read_to_its_end_in_the_order_of_its_partitions(log: RunLog) -> None:
    """All events of a kind, none twice; offsets rise within each partition."""
    found = list(log.read(Trajectory, with_copies=True, skip_unreadable=True))
    expected = [event for event in told_run.events() if isinstance(event, Trajectory)]
    assert sorted(f"{e.group_id}/{e.sample}" for e in expected) == sorted(
        f"{r.event.group_id}/{r.event.sample}" for r in found
    )
    places = [record.position for record in found]
    for partition in range(told_run.PARTITIONS):
        offsets = [place.offset for place in places if place.partition == partition]
        assert sorted(set(offsets)) == offsets
    assert 1 == log.num_unreadable


def test_a_group_is_found_by_its_id(log: RunLog) -> None:
    """Only its records, of every topic whose key is the group, prompts included."""
    kinds = (Prompt, ScoredTrajectory, Trajectory)
    found = [len(list(log.read(kind, ["1"], skip_unreadable=True))) for kind in kinds]
    assert [2, 1, 2] == found
    assert ["4"] == [raw.key.decode() for raw in log.records(DEAD_LETTERS, ["4", "1"])]
    assert [] == list(log.records(TRAJECTORIES, ["77"]))


def test_what_cannot_be_read_is_named(log: RunLog) -> None:
    """Unless the caller wants to pass it by."""
    with pytest.raises(DecodeError, match=r"trajectories\[\d\]@\d+: "):
        list(log.read(Trajectory))


def test_a_topic_with_another_key_has_no_groups(log: RunLog) -> None:
    """Steps are keyed by the run."""
    with pytest.raises(ValueError, match="steps is keyed by run: it cannot be read by group"):
        list(log.read(StepCompleted, ["1"]))


def test_a_topic_of_several_kinds_comes_whole_and_in_order(log: RunLog) -> None:
    """Whatever counts."""
    kinds = [type(record.event).__name__ for record in log.read_topic(STEPS)]
    assert ["TrainerStarted", "StepCompleted", "StepCompleted", "GroupsDropped"] == kinds[:4]


def test_the_lineage_is_the_same_wherever_the_log_lies(log: RunLog) -> None:
    """A live log, read in another order of topics and partitions, tells the same lineage."""
    (found,) = log.samples("1/0")
    (expected,) = told_run.bus_log().samples("1/0")
    assert expected.outcome == found.outcome
    assert expected.loads == found.loads
    assert expected.used_by == found.used_by
    assert expected.trained.step == found.trained.step
    assert 1 == len(found.copies)


def test_every_event_has_its_topic() -> None:
    """And what is none is refused with the names of those that are."""
    assert STEPS is topic_of(StepCompleted)
    with pytest.raises(ValueError, match="Path is no event of ours; known: Prompt, "):
        topic_of(Path)

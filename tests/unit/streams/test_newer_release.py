"""Audit, views, recorder and whole logs read what a newer release wrote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlstreams.schemas.events import StepCompleted
from rlstreams.streams.audit.auditor import audit
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import BrokerError
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import TRAJECTORIES
from rlstreams.streams.recording import Recording
from rlstreams.streams.recording.bus import RecordingBus
from rlstreams.streams.run.run_log import BusLog
from rlstreams.streams.views.feed import Feed, Views
from tests import factories
from tests.newer_release import hand_over, newer, publish
from tests.unit.recording.test_recorder import World
from tests.unit.streams.audit_run import NUM_GROUPS, SIZE, Run

ROOT = Path(__file__).parents[3]


class NewerRun(Run):
    """Every record of it is under a schema that this release does not have."""

    def __init__(self) -> None:
        super().__init__()
        publish(self.bus)
        self._pen = hand_over(self._pen)
        self.publish(1)
        self.issue()
        self.roll_out()
        self.train(0, self.score())


def test_audit() -> None:
    """Skimmed topics, and the small ones."""
    report = audit(NewerRun().bus, settle_s=0)
    assert (report.breach_counts, report.unreadable) == ({}, 0)
    assert (report.issued, report.trained) == (NUM_GROUPS * SIZE, SIZE)
    assert report.in_flight == {"trainer": (NUM_GROUPS - 1) * SIZE}


def test_views() -> None:
    """Live view, report, metrics: all have the same feed."""
    bus = NewerRun().bus
    views = Views()
    feed = Feed(bus, views)
    while feed.behind(feed.ends()):
        feed.poll(0.0)
    assert (0, 1) == (feed.num_unreadable, len(views.state.run.steps))


def test_a_view_that_cannot_ask_passes_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record whose schema cannot be looked up now waits for the next poll, and so do others."""
    bus = NewerRun().bus
    views = Views()
    feed = Feed(bus, views, (TRAJECTORIES,))
    ends = bus.ends

    def away(topic: str) -> dict[Partition, int]:
        raise BrokerError(f"nobody to ask for the end of {topic}")

    monkeypatch.setattr(bus, "ends", away)
    with pytest.raises(BrokerError, match="schemas"):
        feed.poll(0.0)
    monkeypatch.setattr(bus, "ends", ends)
    assert feed.behind(feed.ends()) >= NUM_GROUPS * SIZE
    assert NUM_GROUPS * SIZE == feed.poll(0.0)
    assert (0, 0) == (feed.num_unreadable, feed.behind(feed.ends()))


def test_logs() -> None:
    """What Python, inspect and export read through."""
    run = NewerRun()
    with BusLog(run.bus, "run") as log:
        assert [1] == [record.event.step for record in log.read(StepCompleted)]


def record(world: World, *, num_times: int) -> None:
    """Newer trajectories, recorded by that many processes, one after the other."""
    with world.bus.producer("pen") as pen:
        for number in range(num_times):
            samples = [factories.trajectory(group_id=str(number), sample=n) for n in range(2)]
            pen.commit([newer(outgoing(TRAJECTORIES, sample)) for sample in samples])
            world.record(seal=number + 1 == num_times)


def test_recordings(tmp_path: Path) -> None:
    """Typed, by every process that goes on with one; and readable in it without the topic."""
    world = World(tmp_path / "rec")
    publish(world.bus)
    record(world, num_times=3)
    assert world.on_the_log() == world.recorded()
    with Recording(world.folder) as recording:
        assert 2 == len(list(recording.keyed(TRAJECTORIES.name, [b"2"])))
        views = Views()
        feed = Feed(RecordingBus(recording), views, (TRAJECTORIES,))
        assert (6, 0) == (feed.poll(0.0), feed.num_unreadable)


def test_every_reader_asks_for_schemas() -> None:
    """`decoded` without them would call a newer record a stranger's."""
    calls = re.compile(r"(?<![.\w])decoded?\((?:raw|record|event\.value|raw\.value)\)")
    files = (ROOT / "rlstreams").rglob("*.py")
    found = [str(file) for file in files if calls.search(file.read_text("utf-8"))]
    assert found == []

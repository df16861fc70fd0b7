"""Runs and recordings of older releases have no `calls` and no `outcomes`: all that reads copes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.debug.replay.record import RecordingOptions, record
from rlstreams.schemas.events import CallCommitted, OutcomeReported, StepCompleted, Trajectory
from rlstreams.streams.audit.auditor import audit
from rlstreams.streams.log.bus import Bus, existing
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import CALLS, OUTCOMES, STEPS, TOPICS, TRAJECTORIES
from rlstreams.streams.recording import Recording
from rlstreams.streams.recording.manifest import RecordingError
from rlstreams.streams.recording.table import facts_of
from rlstreams.streams.recording.writer import RecordingWriter
from rlstreams.streams.run.recorded_log import RecordedLog
from rlstreams.streams.run.run_log import BusLog
from rlstreams.workers.config.run import RunConfig, RunSection
from tests.call_events import answered, call_committed, outcome_reported
from tests.chaos import injector
from tests.factories import trainer_started, trajectory
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.unit.recording.recordings import manifest


def older_bus() -> MemoryBus:
    bus = MemoryBus(made_log("r", 2, is_older=True), "r")
    bus.producer("w").commit(
        [outgoing(STEPS, trainer_started()), outgoing(TRAJECTORIES, trajectory())]
    )
    return bus


def newer_bus() -> MemoryBus:
    bus = MemoryBus(made_log("r", 2), "r")
    bus.producer("w").commit(
        [
            outgoing(CALLS, call_committed(), partition=1),
            outgoing(CALLS, call_committed(session_id="7/2", call_id="z"), partition=0),
            outgoing(OUTCOMES, outcome_reported(), partition=1),
        ]
    )
    return bus


def recorded(bus: MemoryBus, folder: Path) -> RecordedLog:
    config = RunConfig(run=RunSection(id="r", dir=str(folder / "run")))
    record(bus, config, RecordingOptions(folder=folder / "rec"))
    return RecordedLog(folder / "rec")


@contextmanager
def logs(bus: MemoryBus, folder: Path) -> Iterator[list[BusLog | RecordedLog]]:
    with BusLog(bus, "r") as live, recorded(bus, folder) as recording:
        yield [live, recording]


def test_nothing_is_there_to_read(tmp_path: Path) -> None:
    with logs(older_bus(), tmp_path) as both:
        for log in both:
            assert list(log.read(CallCommitted)) == []
            assert list(log.read(OutcomeReported, ["7/1"])) == []
            assert len(list(log.read(Trajectory))) == 1
            kinds = (CallCommitted, OutcomeReported, StepCompleted)
            assert list(log.follow(*kinds, deadline_s=0.05, from_start=True)) == []


def test_sessions_are_read_live_and_recorded(tmp_path: Path) -> None:
    """Found by session in whichever partition their prompt lies."""
    with logs(newer_bus(), tmp_path) as both:
        for log in both:
            assert {r.event.session_id for r in log.read(CallCommitted)} == {"7/1", "7/2"}
            found = list(log.read(CallCommitted, ["7/1"]))
            assert [r.position for r in found] == [(CALLS.name, 1, 0)]
            assert [r.event.outcome_id for r in log.read(OutcomeReported)] == ["o1"]


def test_only_later_topics_may_be_missing() -> None:
    there = existing(older_bus(), TOPICS)
    assert [topic for topic in TOPICS if topic not in there] == [CALLS, OUTCOMES]
    assert existing(newer_bus(), TOPICS) == TOPICS


def test_a_recording_that_was_begun_without_them_goes_on_so(tmp_path: Path) -> None:
    """And one whose topic was made anew does not."""
    whole = manifest("r")
    begun = replace(whole, topics={n: t for n, t in whole.topics.items() if n != CALLS.name})
    RecordingWriter(tmp_path / "rec", begun).close()
    with RecordingWriter(tmp_path / "rec", whole) as writer:
        assert CALLS.name not in writer.manifest.topics
    anew = replace(whole.topics["steps"], id="other")
    with pytest.raises(RecordingError, match="topic steps was made anew"):
        RecordingWriter(tmp_path / "rec", replace(whole, topics={**whole.topics, "steps": anew}))


def test_recorded_calls_are_found_by_session_and_version(tmp_path: Path) -> None:
    event = call_committed(segments=(answered(version=2), answered(version=4)))
    assert (facts_of(event).name, facts_of(event).version) == ("7/1", 4)
    with recorded(newer_bus(), tmp_path) as log:
        assert isinstance(log.recording, Recording)
        assert log.recording.num_by_topic[CALLS.name] == 2


def test_chaos_damages_only_topics_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = older_bus()

    @contextmanager
    def opened(_: RunConfig) -> Iterator[Bus]:
        yield bus

    monkeypatch.setattr(injector, "open_bus", opened)
    monkeypatch.setattr(injector, "READ_S", 0.01)  # topics that are empty
    vandal = injector.Vandal(RunConfig(), seed=1)
    vandal._write(0)
    assert vandal._written == {0}
    assert sum(bus.ends(TRAJECTORIES.name).values()) == 4  # two transactions, with markers


def test_a_run_without_them_is_audited() -> None:
    report = audit(older_bus(), settle_s=0)
    assert (report.sessions, report.calls) == ({}, 0)
    assert audit(newer_bus(), settle_s=0).breach_counts == {"unopened call": 2}

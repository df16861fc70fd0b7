"""The audit takes a recording, and refuses a run whose steps a replay wrote."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path

import pytest

from rlstreams.cli.audit import run as audit_command
from rlstreams.cli.options import Named
from rlstreams.debug.replay.player import play
from rlstreams.schemas.events import ClosedGroups, PartitionPosition
from rlstreams.streams.audit.auditor import ReplayedError, audit
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import ID_HEADER, Position
from rlstreams.streams.log.topics import (
    POLICY_PULLS,
    POLICY_VERSIONS,
    PROMPTS,
    SCORED,
    STEPS,
    TRAJECTORIES,
    Topic,
)
from rlstreams.streams.recording import RecordedTopic, Recording, RecordingManifest, RecordingWriter
from rlstreams.streams.recording.bus import RecordingBus
from rlstreams.streams.recording.recorder import ORDER, Recorder
from rlstreams.up.supervisor.summary import audited as audited_of_up
from tests.factories import (
    dropped_group,
    groups_dropped,
    heartbeat,
    step_completed,
    trainer_started,
)
from tests.unit.streams.audit_run import CONFIG, NUM_GROUPS, SIZE, Run

OPEN = (NUM_GROUPS - 1) * SIZE  # samples that no step of `trained` ends
BEFORE = (PROMPTS, POLICY_VERSIONS, POLICY_PULLS, TRAJECTORIES)  # what scores are made of


def trained() -> Run:
    """A run of which group 0 was trained; the others wait for the trainer."""
    run = Run()
    run.issue()
    run.roll_out()
    scored = [run.score_some([number])[0] for number in range(NUM_GROUPS * SIZE)]
    run.train(0, [Position(*at) for at in scored])
    return run


def recorded(folder: Path, *, run: Run | None = None) -> Path:
    """The run, or `trained`, recorded."""
    run = run or trained()
    names = [topic.name for topic in ORDER]
    ids = run.bus.topic_ids(names)
    found = {n: RecordedTopic(id=ids[n], partitions=run.bus.partitions(n)) for n in names}
    manifest = RecordingManifest(run="demo", started_at_ms=1, topics=found)
    with RecordingWriter(folder, manifest) as writer:
        with Recorder(run.bus, writer) as recorder:
            recorder.up_to_now()
        writer.seal()
    return folder


def audited(folder: Path, *, follow: bool = False) -> int:
    options = {"follow": follow, "json": False}
    assert audit_command.callback is not None
    named = Named([str(folder)], [])
    return audit_command.callback(argparse.Namespace(config=named, **options))


def test_a_recording_is_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the positions of the log that it was recorded from. What is open is not proven."""
    assert audited(recorded(tmp_path / "rec")) == 0
    told = capsys.readouterr().out
    assert told.endswith(f"ok as far as a recording tells: {OPEN} in flight, without proof\n")
    assert f"in flight{OPEN:>17}  without proof" in told
    with Recording(tmp_path / "rec") as recording:
        report = audit(RecordingBus(recording), settle_s=0)
    assert f"in flight {OPEN}, without proof; lost 0" in report.line()
    assert report.in_flight == {"unknown": OPEN}


def test_a_recording_with_nothing_open_is_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No consumer group's position is needed."""
    run = trained()
    rest = tuple(dropped_group(str(number)) for number in range(1, NUM_GROUPS))
    run.write(STEPS, groups_dropped(groups=rest, closed=ClosedGroups(watermark=NUM_GROUPS)))
    assert audited(recorded(tmp_path / "rec", run=run)) == 0
    assert capsys.readouterr().out.endswith("ok: every sample accounted for\n")


def test_a_recording_shows_what_the_trainer_is_past(tmp_path: Path) -> None:
    """Its positions lie in `steps`, so what it passed over is lost also there."""
    run = trained()
    ends = run.bus.ends(SCORED.name).items()
    past = (PartitionPosition(topic=SCORED.name, partition=p.number, offset=n) for p, n in ends)
    closed = ClosedGroups(watermark=1)
    values = {"samples": (), "masked": (), "absent": (), "closed": closed, "positions": tuple(past)}
    run.write(STEPS, step_completed(2, **values))
    with Recording(recorded(tmp_path / "rec", run=run)) as recording:
        assert audit(RecordingBus(recording), settle_s=0).breach_counts == {"lost": OPEN}


def test_a_recording_of_a_part_is_refused(tmp_path: Path) -> None:
    """What is not there may be anywhere."""
    (recorded(tmp_path / "rec") / "000000.parquet").unlink()
    with pytest.raises(ConfigError, match=r"holds a part of its run \(.*000000.parquet is missing"):
        audited(tmp_path / "rec")


def test_a_recording_is_not_followed(tmp_path: Path) -> None:
    """Nobody writes to it, perhaps not even the end of its run."""
    with pytest.raises(ConfigError, match=r"--follow is for a live run, and .*rec is a recording"):
        audited(recorded(tmp_path / "rec"), follow=True)


def replayed(folder: Path, topics: Collection[Topic]) -> Run:
    """A run that begins with these topics of a recording."""
    run = Run(claims=False)
    with Recording(recorded(folder)) as recording:
        play(run.bus, "demo", recording.records([topic.name for topic in topics]))
    return run


@pytest.mark.parametrize(
    ("topics", "judge"),
    [(ORDER, "steps"), ([STEPS], "steps"), ([*BEFORE, SCORED], "scored-trajectories")],
)
def test_a_replay_is_refused(tmp_path: Path, topics: Collection[Topic], judge: str) -> None:
    """Its records lie elsewhere than its steps, or without them its scores, say."""
    run = replayed(tmp_path / "rec", topics)
    with pytest.raises(ReplayedError, match=f"records of {judge} .* audit the recording"):
        audit(run.bus, settle_s=0)
    assert audited_of_up(run.bus) is None


def test_a_replay_that_went_on_is_refused(tmp_path: Path) -> None:
    """However many records of its own it has by now."""
    run = replayed(tmp_path / "rec", ORDER)
    for _ in range(100):
        run.write(STEPS, heartbeat())
        run.publish(0)
    with pytest.raises(ReplayedError, match="records of steps"):
        audit(run.bus, settle_s=0)


@pytest.mark.parametrize("topics", [BEFORE, [*BEFORE, SCORED]])
def test_roles_that_work_on_replayed_records_are_audited(
    tmp_path: Path, topics: Collection[Topic]
) -> None:
    """Their steps name positions of the log that they read."""
    run = replayed(tmp_path / "rec", topics)
    run.write(STEPS, trainer_started(config=CONFIG))
    if SCORED not in topics:
        run.score()
    places = {}
    with run.bus.reader(run.bus.beginnings(SCORED.name)) as reader:
        for raw in reader.poll(100, 0.0):
            places.setdefault(raw.headers[ID_HEADER], raw.position)
    run.train(0, [places[f"0/{number}/0".encode()] for number in range(SIZE)])
    report = audit(run.bus, settle_s=0)
    assert (report.breach_counts, report.trained) == ({}, SIZE)

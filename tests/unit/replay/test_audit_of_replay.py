"""An audit of a run that a replay wrote says of it what it said of the recorded one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.debug.replay.player import Player, outgoing_of
from rlstreams.schemas.binary import MARKER
from rlstreams.schemas.events import StepCompleted
from rlstreams.streams.audit.auditor import audit
from rlstreams.streams.audit.report import AuditReport
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.record import REPLAY_HEADER, Outgoing, Partition, Position, RawRecord
from rlstreams.streams.log.topics import SCORED, STEPS
from rlstreams.streams.memory.bus import MemoryBus
from rlstreams.streams.recording import Manifest, RecordedTopic, Recording, RecordingWriter
from rlstreams.streams.recording.recorder import ORDER, Recorder
from rlstreams.streams.recording.selection import Selection
from tests.logs import made_log
from tests.unit.streams.audit_run import NUM_GROUPS, SIZE, Run

ALL = NUM_GROUPS * SIZE


def trained_run(wrong: int = 0) -> Run:
    """Group 0 trained; its step names offsets that are `wrong` off."""
    run = Run()
    run.issue()
    run.roll_out()
    scored = [run.score_some([number])[0] for number in range(ALL)]  # markers between them
    run.train(0, [Position(t, p, offset + wrong) for t, p, offset in scored])
    return run


def recorded(run: Run, folder: Path) -> Path:
    names = [topic.name for topic in ORDER]
    ids = run.bus.topic_ids(names)
    topics = {n: RecordedTopic(id=ids[n], partitions=run.bus.partitions(n)) for n in names}
    manifest = Manifest(run="demo", started_at_ms=1, topics=topics)
    with RecordingWriter(folder, manifest) as writer:
        with Recorder(run.bus, writer, Selection()) as recorder:
            recorder.up_to_now()
        writer.seal()
    return folder


def played(raws: Iterable[RawRecord], *, is_part: bool = False) -> Bus:
    """Into a fresh run, where every record but the first lies somewhere else."""
    bus = MemoryBus(made_log("again", 2), "again")
    Player(bus, "demo", is_part=is_part).play(raws)
    return bus


@pytest.fixture
def raws(tmp_path: Path) -> Sequence[RawRecord]:
    with Recording(recorded(trained_run(), tmp_path / "rec")) as recording:
        return list(recording.records())


def judged(bus: Bus) -> AuditReport:
    return audit(bus, settle_s=0)


def offsets_by_origin(bus: Bus, topic: str) -> dict[str, int]:
    with bus.reader(bus.beginnings(topic)) as reader:
        found = reader.poll(1000, 0.0)
    return {raw.headers[REPLAY_HEADER].decode(): raw.position.offset for raw in found}


def test_a_replayed_run_is_judged_by_the_recorded_positions(raws: Sequence[RawRecord]) -> None:
    """Records lie elsewhere than steps say; each header says where it lay."""
    report = judged(played(raws))
    moved = offsets_by_origin(played(raws), SCORED.name)
    assert any(not origin.endswith(f"@{offset}") for origin, offset in moved.items())
    assert {} == report.breach_counts
    assert ("demo", False, SIZE) == (report.replay_of, report.is_part, report.trained)
    assert {0: 3 * SIZE} == report.staleness
    assert (ALL, 0) == (report.issued, report.lost)
    text = report.text()
    assert text.startswith("audit of a replay of run demo, from its topics alone")
    assert "in flight without proof: a replay has no committed positions" in text
    assert "demo" == json.loads(report.to_json())["replay_of"]


def test_what_the_recorded_run_broke_its_replay_breaks(tmp_path: Path) -> None:
    """A step that names records that are not there stays a breach; and a sample trained twice."""
    run = trained_run(wrong=1000)
    step = next(e for e in events(run.bus) if isinstance(e, StepCompleted))
    run.write(STEPS, replace(step, step=2, policy_version=2, previous_hash=step.weight_hash))
    expected = judged(run.bus).breach_counts
    assert {"unknown position", "trained twice", "closed twice"} <= set(expected)
    with Recording(recorded(run, tmp_path / "rec")) as recording:
        report = judged(played(recording.records()))
    assert expected == report.breach_counts


def events(bus: Bus) -> list[object]:
    with bus.reader(bus.beginnings(STEPS.name)) as reader:
        return [decoded(raw).event for raw in reader.poll(1000, 0.0)]


def test_a_replay_that_went_back_is_no_run_with_steps_twice(raws: Sequence[RawRecord]) -> None:
    """Its copies are duplicates, which every reader skips."""
    report = judged(played([*raws, *raws[2:]]))
    assert {} == report.breach_counts
    assert len(raws) - 2 == report.duplicates
    assert SIZE == report.trained


def test_of_a_part_only_what_can_hold_is_judged(raws: Sequence[RawRecord]) -> None:
    """Samples that are missing were left out; one that was trained twice was."""
    part = [raw for raw in raws if raw.position.topic in (STEPS.name, "trajectories")]
    report = judged(played(part, is_part=True))
    assert ({}, True) == (report.breach_counts, report.is_part)
    assert "ok as far as a part tells" in report.text()
    bus = played(part, is_part=True)
    step = next(e for e in events(bus) if isinstance(e, StepCompleted))
    twice = next(raw for raw in part if raw.position.topic == STEPS.name)
    again = replace(step, step=2, policy_version=2, previous_hash=step.weight_hash)
    more = outgoing(STEPS, again)
    header = {REPLAY_HEADER: f"demo/steps[0]@{twice.position.offset + 1000}".encode()}
    with bus.producer("x") as producer:
        producer.commit([replace(more, headers={**more.headers, **header})])
    assert {"trained twice": SIZE, "closed twice": 1} == judged(bus).breach_counts


def test_a_step_that_cannot_be_read_is_named_of_a_part_too(raws: Sequence[RawRecord]) -> None:
    """It is there, whatever else was left out."""
    part = [raw for raw in raws if raw.position.topic == STEPS.name]
    cut = [raw._replace(value=raw.value[:-3]) for raw in part]
    report = judged(played(cut, is_part=True))
    assert {"unreadable step": len(part)} == report.breach_counts
    assert not report.ok


def test_a_stranger_in_steps_does_not_make_positions_those_of_this_log(
    raws: Sequence[RawRecord],
) -> None:
    """Its record is named; that it was not replayed says nothing of who made the steps."""
    bus = played(raws)
    with bus.producer("stranger") as producer:
        producer.commit([Outgoing(topic=STEPS.name, key=b"", value=[MARKER + bytes(40)])])
    assert {"unreadable step": 1} == judged(bus).breach_counts


def test_a_trainer_alone_names_positions_of_its_own_log(raws: Sequence[RawRecord]) -> None:
    """It was fed recorded samples, and made its steps here."""
    bus = MemoryBus(made_log("again", 2), "again")
    scored = [raw for raw in raws if raw.position.topic == SCORED.name]
    claim, step = (e for e in events(played(raws)) if type(e).__name__ != "TrainerHeartbeat")
    assert isinstance(step, StepCompleted)
    with bus.producer("replay") as producer:
        first = producer.commit([outgoing_of(raw, "demo", is_part=True) for raw in scored[::-1]])
        ids = {raw.position: at for raw, at in zip(scored[::-1], first, strict=True)}
        refs = tuple(
            replace(ref, offset=ids[Position(SCORED.name, ref.partition, ref.offset)].offset)
            for ref in step.samples
        )
        assert refs != step.samples
        own = replace(step, samples=refs)
        producer.commit([outgoing(STEPS, claim), outgoing(STEPS, own)])  # type: ignore[arg-type]
    report = judged(bus)
    assert ({}, {0: 3 * SIZE}) == (report.breach_counts, report.staleness)


def test_what_retention_had_removed_is_unproven_in_the_replay_too(tmp_path: Path) -> None:
    """It was not there to be recorded."""
    run = trained_run()
    step = next(e for e in events(run.bus) if isinstance(e, StepCompleted))
    last = max(step.samples, key=lambda ref: ref.offset)
    run.log.trim(Partition(f"run.{SCORED.name}", last.partition), last.offset + 1)
    expected = judged(run.bus)
    assert (0, SIZE) == (len(expected.breach_counts), expected.unproven)
    with Recording(recorded(run, tmp_path / "rec")) as recording:
        report = judged(played(recording.records()))
    assert ({}, SIZE) == (report.breach_counts, report.unproven)


@pytest.mark.parametrize("text", [b"demo", b"demo/steps[x]@1", b"demo/prompts[0]@1", b"\xff" * 9])
def test_a_header_that_makes_no_sense_says_nothing(text: bytes) -> None:
    """The record is taken for one of this log."""
    run = trained_run()
    with run.bus.producer("stranger") as producer:
        more = outgoing(STEPS, next(iter(events(run.bus))))  # type: ignore[arg-type]
        producer.commit([replace(more, headers={**more.headers, REPLAY_HEADER: text})])
    report = judged(run.bus)
    assert ("", {}) == (report.replay_of, report.breach_counts)

"""A record of `steps` that the audit cannot read is named; its samples are not called lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rlstreams.schemas.avro import fingerprint
from rlstreams.schemas.binary import MARKER
from rlstreams.schemas.events import ClosedGroups, PartitionPosition
from rlstreams.streams.audit.auditor import Auditor, audit
from rlstreams.streams.audit.report import AuditReport
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Outgoing, Position
from rlstreams.streams.log.topics import STEPS
from tests.factories import policy_published, sample_ref, step_completed
from tests.newer_release import newer, newer_text, publish, schema_record
from tests.unit.streams.audit_run import NUM_GROUPS, SIZE, Run

PRINT = fingerprint(newer_text("StepCompleted")).hex()


def refs(group: int, positions: Sequence[Position]) -> tuple[Any, ...]:
    places = positions[group * SIZE : (group + 1) * SIZE]
    return tuple(
        sample_ref(str(group), n, partition=at.partition, offset=at.offset, oldest_policy_version=0)
        for n, at in enumerate(places)
    )


class Mixed(Run):
    """Step 1 is of a newer release, step 2 is ours; every group is scored."""

    def __init__(self) -> None:
        super().__init__()
        self.issue()
        self.roll_out()
        self.scores = self.score()

    def step(self, step: int, *, closed: ClosedGroups | None = None, **changes: Any) -> Outgoing:
        """A step of group `step - 1`; all scores lie below its positions."""
        hashes = {n: policy_published(n).weight_hash for n in (step - 1, step)}
        ends = self.bus.ends("scored-trajectories")
        values = {
            "samples": refs(step - 1, self.scores),
            "masked": (),
            "absent": (),
            "closed": closed or ClosedGroups(watermark=step),
            "positions": tuple(
                PartitionPosition(topic=p.topic, partition=p.number, offset=end)
                for p, end in ends.items()
            ),
            "previous_hash": hashes[step - 1],
            "weight_hash": hashes[step],
            "policy_version": step,
        }
        return outgoing(STEPS, step_completed(step, **(values | changes)))

    def send(self, *records: Outgoing) -> AuditReport:
        self._pen.commit(records)
        return audit(self.bus, settle_s=0)


def test_the_record_is_named_and_its_samples_are_not_lost() -> None:
    """Position and fingerprint; the groups that the closed set knows of and no event closed."""
    run = Mixed()
    report = run.send(newer(run.step(1)), run.step(2, closed=ClosedGroups(watermark=3)))
    assert report.breach_counts == {"unreadable step": 1}
    (breach,) = report.breaches
    assert breach.id.startswith("steps[0]@")
    assert PRINT in breach.detail
    assert (report.issued, report.trained, report.unread, report.lost) == (6, SIZE, 2 * SIZE, 0)
    assert not report.ok
    assert "unread 4, in flight 0; lost 0" in report.line()
    assert "unreadable step" in report.text()
    with Auditor(run.bus) as auditor:
        assert report == auditor.round(0)
        assert report == auditor.round(0)


def test_what_it_published_was_made_by_it() -> None:
    """The version of a step that cannot be read is nobody's forgery; one more would be."""
    run = Mixed()
    run.publish(1)
    assert run.send(newer(run.step(1))).breach_counts == {"unreadable step": 1}
    run.publish(2)
    assert run.send().breach_counts == {"unreadable step": 1, "false version": 1}


def test_with_its_schema_it_is_an_ordinary_step() -> None:
    """Nothing is left of the finding."""
    run = Mixed()
    publish(run.bus)
    report = run.send(newer(run.step(1)), run.step(2))
    assert "unreadable step" not in report.breach_counts
    assert (report.trained, report.unread) == (2 * SIZE, 0)


def test_a_sample_of_an_open_group_stays_lost() -> None:
    """A closed set read behind the record leaves the group out: the record did not end it."""
    run = Mixed()
    report = run.send(newer(run.step(1)), run.step(2))
    assert report.breach_counts == {"unreadable step": 1, "lost": SIZE}
    assert {breach.id for breach in report.breaches} >= {"2/0", "2/1"}
    assert report.unread == SIZE


def test_behind_the_newest_closed_set_any_group_may_have_ended_in_it() -> None:
    """Nothing read since says which groups are closed."""
    run = Mixed()
    report = run.send(run.step(1), newer(run.step(2)))
    assert report.breach_counts == {"unreadable step": 1}
    assert (report.trained, report.unread) == (SIZE, (NUM_GROUPS - 1) * SIZE)


WEATHER = '{"type": "record", "name": "rlstreams.Weather", "fields": []}'
NO_EVENTS = {
    "not framed": (b"rubbish",),
    "nothing": (b"",),
    "too short": (MARKER + b"1234",),
    "a newer release's own event": (MARKER + fingerprint(WEATHER),),
}


@pytest.mark.parametrize("kind", NO_EVENTS)
def test_what_is_no_event_of_ours_is_only_counted(kind: str) -> None:
    """It can have ended no sample."""
    run = Mixed()
    run._pen.commit([schema_record(WEATHER)])
    report = run.send(Outgoing(topic=STEPS.name, key=b"run", value=NO_EVENTS[kind]))
    assert (report.breach_counts, report.unreadable) == ({}, 1)


def test_a_damaged_event_is_one_that_cannot_be_read() -> None:
    """Of a known schema: the fingerprint says which."""
    run = Mixed()
    step = run.step(1)
    cut = b"".join(step.value)[:-3]
    report = run.send(Outgoing(topic=STEPS.name, key=b"run", value=[cut]))
    assert report.breach_counts == {"unreadable step": 1}
    assert cut[2:10].hex() in report.breaches[0].detail

"""What strangers may write into a run's topics: the audit goes on, and counts what is right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlstreams.schemas.events import ClosedGroups, MaskedSegment
from rlstreams.streams.audit.classes import Classes
from rlstreams.streams.audit.fold import AuditFold
from rlstreams.streams.log.record import ID_HEADER
from tests.factories import (
    dead_letter,
    policy_segment,
    prompt,
    prompt_segment,
    scored,
    trainer_started,
    trajectory,
)
from tests.unit.streams.audit_log import (
    CONFIG,
    Log,
    change_step,
    healthy,
    kinds,
    raw_record,
    reached,
)

OLDEST, NEWEST = -(1 << 63), (1 << 63) - 1


@pytest.mark.parametrize("bound", ["10000000000000000000", "-10000000000000000000", "1e20"])
def test_a_bound_that_no_integer_of_ours_holds(bound: str) -> None:
    """The claim's configuration is text of its writer."""
    log = Log()
    config = json.dumps({"trainer": {"max_staleness": 7}}).replace("7", bound)
    log.add("steps", trainer_started(config=config))
    log.publish(0)
    log.publish(1)
    log.step(1, log.score("0"), closed=1)
    expected = {"too stale": 2} if bound.startswith("-") else {}
    assert kinds(log.report()) == expected


@pytest.mark.parametrize("bound", ["Infinity", "-Infinity", "[" * 100_000])
def test_a_bound_that_is_no_number(bound: str) -> None:
    """As if the claim named none."""
    log = Log()
    log.add("steps", trainer_started(config=f'{{"trainer": {{"max_staleness": {bound}}}}}'))
    log.publish(0)
    log.publish(1)
    log.step(1, log.score("0"), closed=1)
    assert kinds(log.report())["no bound"] == 1


def test_a_step_of_an_impossible_version_is_named() -> None:
    """Staleness is counted from the version before it."""
    log = healthy()
    change_step(log, 2, policy_version=OLDEST)
    found = kinds(log.report())
    assert found["version chain"] == 1
    assert found["too stale"] == 2


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_tokens_of_an_impossible_version_are_mislabelled(version: int) -> None:
    """However far it is from what the step says."""
    log = healthy()
    segments = (prompt_segment(), policy_segment(version=version))
    for offset in (0, 1):
        event = trajectory(group_id="0", sample=offset, segments=segments)
        log.topics["scored-trajectories"][offset] = scored(event)
    assert kinds(log.report()) == {"mislabelled": 2, "too stale": 2}


@pytest.mark.parametrize("index", [1 << 32, (1 << 32) + 1, -1, NEWEST])
def test_a_masked_segment_that_cannot_be_masks_nothing(index: int) -> None:
    """Of this sample, or of its neighbour."""
    log = healthy()
    log.topics["steps"][0] = trainer_started(config=CONFIG.replace("1", "0"))
    masked = MaskedSegment(group_id="1", sample=0, segment=index, staleness=1)
    change_step(log, 2, masked=(masked,))
    assert kinds(log.report()) == {"too stale": 2}


@pytest.mark.parametrize("header", [None, b"", b"7", b"7/x", b"7/" + b"9" * 30, b"/"])
def test_an_unreadable_record_of_any_header(header: Any) -> None:
    """A header may lack its value."""
    raw = raw_record("prompts", 0, prompt())
    raw = raw._replace(value=raw.value[:20], headers={ID_HEADER: header})
    fold = AuditFold()
    fold.take(raw)
    assert Classes(fold, reached(set(), set())).report().unreadable == 1


def test_a_letter_about_a_group_that_took_more_room() -> None:
    """It names no sample, only where the record lies; the group's old places are nobody's."""
    log = Log()
    log.add("steps", trainer_started(config=CONFIG))
    log.add("prompts", prompt(group_id="0", sample=0, group_size=1))
    log.add("prompts", prompt(group_id="0", sample=1, group_size=2))
    letter = dead_letter(
        group_id="", sample=-1, origin_topic="prompts", origin_partition=0, origin_offset=0
    )
    log.add("dead-letters", letter)
    fold = AuditFold()
    for raw in log.records("prompts"):
        fold.take(raw)
    fold.take(raw_record("dead-letters", 0, letter))
    report = Classes(fold, reached(set(), set())).report()
    assert report.dead_lettered == 1
    assert "never issued" not in kinds(report)


def test_closed_groups_stay_closed() -> None:
    """A control: nothing above depends on a log that is broken anyhow."""
    log = healthy()
    change_step(log, 2, closed=ClosedGroups(watermark=2))
    assert kinds(log.report()) == {}

"""What the trainer takes in, what it sets aside, and that it says so once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rlstreams.schemas import decode
from rlstreams.schemas.events import (
    DeadLetter,
    Event,
    PartitionPosition,
    Prompt,
    ScoredTrajectory,
    Tensor,
)
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Outgoing, Partition
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS, SCORED
from tests import factories
from tests.unit.trainer.intake_site import HASHES, Site


def scored(sample: int, group: str = "7", **changes: Any) -> ScoredTrajectory:
    return factories.scored(
        factories.trajectory(group_id=group, sample=sample, **changes.pop("trajectory", {})),
        **changes,
    )


def with_policy(**changes: Any) -> dict[str, Any]:
    segments = (factories.prompt_segment(), factories.policy_segment(**changes))
    return {"trajectory": {"segments": segments}}


def floats(*values: float) -> Tensor:
    return Tensor.of(np.array(values, np.float32))


def bytes_of(event: Event) -> bytes:
    topic = PROMPTS if isinstance(event, Prompt) else SCORED
    return b"".join(bytes(piece) for piece in outgoing(topic, event).value)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (
            with_policy(version=3) | {"scores": (factories.score(version=3),)},
            "segments[1].policy_version must be one that steps made, at most",
        ),
        (with_policy(weight_hash="f0" * 32), "segments[1].weight_hash of policy version 2 must be"),
        (with_policy(behavior_logprobs=floats(-1, float("nan"), -1)), "behavior_logprobs[1] must"),
        (with_policy(token_ids=factories.int32s(3, start=999)), "token_ids[1] must be below 1000"),
        ({"trajectory": {"reward": float("nan")}}, "reward must be finite"),
        (
            {"scores": (factories.score(weight_hash="f0" * 32),)},
            "scores[0].weight_hash of policy version 2 must be",
        ),
        (
            {"scores": (factories.score(version=3, anchor="nearby"),)},
            "scores[0].policy_version must be one that steps made, at most 2, got 3",
        ),
        (
            {"scores": (factories.score(version=1, weight_hash=HASHES[1]),)},
            "scores[0].policy_version must be 2 with anchor 'sampled', got 1",
        ),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_set_aside(bad: dict[str, Any], told: str) -> None:
    """Field and value are named, its group knows, its sibling is taken."""
    site = Site()
    site.sends(scored(0, **bad), scored(1))
    (letter,) = site.take()
    assert ("7", 0, "validation", False) == (
        letter.group_id,
        letter.sample,
        letter.reason,
        letter.permanent,
    )
    assert told in letter.detail
    assert (SCORED.name, 0) == (letter.origin_topic, letter.origin_offset)
    assert ["7/0"] == site.dead()
    assert 1 == site.intake.num_samples


GOOD = bytes_of(scored(0))
FOREIGN = {
    "not framed": b"rubbish",
    "empty": b"",
    "an unknown fingerprint": GOOD[:2] + b"12345678" + GOOD[10:],
    "cut short, or a part missing": GOOD[:-7],
    "bytes to spare": GOOD + b"x",
    "another event": bytes_of(factories.prompt(group_id="7")),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_record_is_set_aside_and_dooms_nobody(kind: str) -> None:
    """Without a header that names a sample its letter names nobody."""
    site = Site()
    site.sends(Outgoing(topic=SCORED.name, key=b"7", value=[FOREIGN[kind]]), scored(1))
    (letter,) = site.take()
    assert ("", -1) == (letter.group_id, letter.sample)
    assert FOREIGN[kind] == letter.value
    assert ([], 1) == (site.dead(), site.intake.num_samples)


def test_a_header_closes_no_group() -> None:
    """Garbage under a sample's name is set aside under none, and the true record is taken."""
    site = Site()
    site.sends(dataclasses.replace(outgoing(SCORED, scored(0)), value=[GOOD[:-7]]), scored(0))
    (letter,) = site.take()
    assert ("", -1, "decode") == (letter.group_id, letter.sample, letter.reason)
    assert ([], 1) == (site.dead(), site.intake.num_samples)


def test_what_is_no_letter_is_counted_and_reported() -> None:
    """A stranger in `dead-letters` names no sample; the worker's report says how many there are."""
    site = Site()
    site.sends(
        Outgoing(topic=DEAD_LETTERS.name, key=b"", value=[b"rubbish"]),
        Outgoing(topic=DEAD_LETTERS.name, key=b"", value=[b"more"]),
        factories.dead_letter(group_id="7", sample=3),
    )
    assert [] == site.take()
    assert ["7/3"] == site.dead()
    (report,) = site.reporter.due()
    assert 2 == decode(b"".join(report.value)).counters["foreign_records"]


BAD: dict[str, Any] = {"trajectory": {"reward": float("nan")}}


@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_first_record_counts_also_if_it_is_refused(*, is_restarted: bool) -> None:
    """Its sample ends there: a later record is a copy, for the trainer and for its successors."""
    site = Site()
    site.sends(scored(1), scored(0, **BAD))
    assert 1 == len(site.take())
    if is_restarted:
        site.start(site.recorded())
        site.start(site.recorded())
    site.sends(scored(0))
    assert [] == site.take()
    assert (["7/0"], 1) == (site.dead(), site.intake.num_samples)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_copy_is_passed_by_whatever_it_says(*, is_restarted: bool) -> None:
    """The first record is trained; of bytes that are no event the letter says where they lay."""
    site = Site()
    cut = dataclasses.replace(outgoing(SCORED, scored(0)), value=[GOOD[:-7]])
    site.sends(scored(0), scored(0, **BAD), cut)
    assert [(-1, "decode", 2)] == [(x.sample, x.reason, x.origin_offset) for x in site.take()]
    if is_restarted:
        site.start(site.recorded())
        assert [] == site.take()
    assert ([], 1) == (site.dead(), site.intake.num_samples)


def test_a_letter_that_a_step_passed_is_not_written_twice() -> None:
    """It stands below where the step read letters to, its record above where samples are open."""
    site = Site()
    rubbish = Outgoing(topic=SCORED.name, key=b"7", value=[b"rubbish"])
    site.sends(scored(1), scored(0, **BAD), rubbish, scored(0, group="e1-3", **BAD))
    assert 3 == len(site.take())
    assert [] == site.take()  # and has read its own letters
    site.start(site.recorded())
    assert [] == site.take()
    assert (["7/0"], 1) == (site.dead(), site.intake.num_samples)


def test_a_letter_that_was_not_committed_is_written_by_the_successor() -> None:
    """Beside one that was."""
    site = Site()
    site.sends(scored(1), scored(0, **BAD))
    assert 1 == len(site.take())
    site.sends(scored(2, **BAD))
    positions = site.recorded()
    site.intake.poll(0.0)
    assert [2] == [letter.sample for letter in site.intake.letters]  # and then it is killed
    site.start(positions)
    assert [2] == [letter.sample for letter in site.take()]
    site.start(site.recorded())
    assert [] == site.take()


def test_letters_of_records_that_nobody_reads_again_are_forgotten() -> None:
    """Nor do they hold back where a successor begins."""
    site = Site()
    rubbish = Outgoing(topic=SCORED.name, key=b"7", value=[b"rubbish"])
    site.sends(rubbish, rubbish, scored(0))
    assert 2 == len(site.take())
    assert [] == site.take()
    recorded = {(p.topic, p.partition): p.offset for p in site.recorded()}
    letters = Partition(DEAD_LETTERS.name, 0)
    assert site.bus.ends(DEAD_LETTERS.name)[letters] == recorded[letters]
    assert {} == site.intake._buried


@pytest.mark.parametrize(("partition", "offset"), [(0, 10**9), (99, 0), (0, -5)])
def test_a_letter_about_a_record_that_is_not_there_holds_nobody_back(
    partition: int, offset: int
) -> None:
    """A stranger's: a successor would begin at it for ever, and not at all once it expired."""
    site = Site()
    at = {"origin_topic": SCORED.name, "origin_partition": partition, "origin_offset": offset}
    site.sends(scored(0), factories.dead_letter(group_id="", **at))
    assert [] == site.take()
    recorded = {(p.topic, p.partition): p.offset for p in site.recorded()}
    letters = Partition(DEAD_LETTERS.name, 0)
    assert site.bus.ends(DEAD_LETTERS.name)[letters] == recorded[letters.topic, 0]


def test_positions_stand_at_the_start_until_samples_are_read() -> None:
    """A step that was recorded before must not lose them."""
    site = Site()
    site.sends(factories.dead_letter(), scored(0))
    start = PartitionPosition(topic=SCORED.name, partition=0, offset=0)
    site.start((start,))
    partition = Partition(SCORED.name, 0)
    assert 0 == site.intake.positions()[partition]
    site.take()
    assert site.bus.ends(SCORED.name)[partition] == site.intake.positions()[partition]


@pytest.mark.parametrize("group", ["abc", "007", "-1", "9" * 19, "9" * 5000, "x" * 2_000_000])
def test_a_group_that_no_run_numbers_is_told_of(group: str) -> None:
    """Neither a score nor a letter of it stops anybody; the closed set is written in 64 bits."""
    site = Site()
    site.sends(factories.dead_letter(group_id=group, sample=0), scored(0, group=group))
    letters = site.take()
    assert [(SCORED.name, "validation")] == [(x.origin_topic, x.reason) for x in letters]
    assert len(letters[0].group_id) <= 64  # the key of its record: brokers refuse long ones
    assert [] == site.dead()


def test_letters_about_records_that_are_not_there_cost_one_question_a_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Anybody may write letters, and as many as they like; one of ours is known among them."""
    site = Site()
    asked: list[str] = []
    ends = site.bus.ends
    monkeypatch.setattr(site.bus, "ends", lambda topic: asked.append(topic) or ends(topic))

    def letter(partition: int, offset: int) -> DeadLetter:
        at = {"origin_partition": partition, "origin_offset": offset}
        return factories.dead_letter(group_id="", origin_topic=SCORED.name, **at)

    beyond = [letter(0, 10**6 + n) for n in range(200)]
    site.sends(*beyond[:100], scored(0), letter(0, 0), *beyond[100:])
    num_polls = 0
    while site.intake.positions()[Partition(DEAD_LETTERS.name, 0)] < 201:
        site.intake.poll(0.0)
        num_polls += 1
    assert len(asked) <= num_polls < 12
    at = {(p.topic, p.partition): p.offset for p in site.recorded()}
    assert 100 == at[DEAD_LETTERS.name, 0]  # of the one whose record a successor meets again
    asked.clear()
    site.sends(*(letter(77, n) for n in range(100)))
    site.take()
    assert [] == asked  # there is no such partition, and never will be

"""One fold of `steps` says which of its events count, and every reader of the topic follows it."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import given
from hypothesis import strategies as st

from rlstreams.schemas.events import ClosedGroups, Event, StepCompleted, TrainerStarted
from rlstreams.streams.ledger import Ledger, StepFact
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import STEPS
from tests.branch_events import run_branched
from tests.factories import (
    dropped_group,
    groups_dropped,
    heartbeat,
    policy_published,
    redo_drifted,
    sample_ref,
    step_completed,
    trainer_started,
)


def step(number: int, epoch: int = 1) -> StepCompleted:
    """A step whose version and hash say which one counted."""
    return step_completed(
        step=number, epoch=epoch, policy_version=number, weight_hash=f"{number} of {epoch}"
    )


def claim(epoch: int) -> Event:
    return trainer_started(epoch=epoch, policy_version=0, weight_hash="first")


def counts(ledger: Ledger, *events: Event) -> list[bool]:
    return [
        ledger.apply(event, Position(STEPS.name, 0, offset)) for offset, event in enumerate(events)
    ]


def test_an_event_counts_in_the_epoch_of_the_newest_claim_only() -> None:
    """Neither a fenced epoch nor one that nobody claimed; what is void is named with its place."""
    ledger = Ledger()
    found = counts(ledger, claim(1), step(1), claim(2), step(2), step(2, 2), claim(2), step(3, 7))
    assert [True, True, True, False, True, False, False] == found
    assert (2, 3) == (ledger.epoch, ledger.num_void)
    assert (
        "StepCompleted at steps[0]@6: it is of epoch 7, the newest claim is of epoch 2"
        == ledger.newest_void
    )


def test_a_claim_counts_only_in_the_epoch_after_the_newest() -> None:
    """A forged one of 2^62 would void the run for ever; a recording may leave claims out."""
    events = [claim(1), claim(2**62), claim(3), claim(2)]
    assert [True, False, False, True] == counts(Ledger(), *events)
    assert [True, True, False, False] == counts(Ledger(begins_anywhere=True), *events)


def test_the_first_of_each_step_counts_if_it_is_the_next() -> None:
    """A repeated step, one that leaves another out, and a drift of another step are void."""
    ledger = Ledger()
    events = [claim(1), step(1), step(1), step(3), step(2), redo_drifted(step=1, epoch=1)]
    assert [True, True, False, False, True, False] == counts(ledger, *events)
    assert 2 == ledger.last_step


def test_nothing_counts_before_the_first_claim_of_a_whole_log() -> None:
    """A foreign step at the very beginning is void; a recording may begin behind the claim."""
    assert [False] == counts(Ledger(), step(1))
    anywhere = Ledger(begins_anywhere=True)
    assert [True, True, False] == counts(anywhere, step(5), step(7), step(6))


def test_events_of_other_topics_are_passed_by() -> None:
    """A publication has an epoch too, but lies in no order against the claims."""
    ledger = Ledger()
    assert [True, False] == counts(ledger, claim(1), policy_published(1, epoch=7))
    assert 0 == ledger.num_void


def test_a_step_says_what_it_made_and_what_its_redo_reads() -> None:
    """And a drift replaces its weights, under a version of its own."""
    samples = (sample_ref(sample=0, offset=9), sample_ref(sample=1, offset=4))
    ledger = Ledger(keeps_steps=True)
    counts(ledger, claim(1), step_completed(1, epoch=1, weight_hash="a", samples=samples))
    counts(ledger, claim(2), redo_drifted(step=1, epoch=2, policy_version=2, actual_hash="b"))
    assert {0: "first", 1: "a", 2: "b"} == ledger.hashes
    assert {0: 0, 1: 1, 2: 1} == ledger.made_by
    assert {
        1: StepFact(
            step=1,
            epoch=1,
            policy_version=1,
            weight_hash="b",
            position=Position(STEPS.name, 0, 1),
            oldest={samples[0].partition: 4},
        )
    } == ledger.steps
    assert (2, "b", 1) == (ledger.policy_version, ledger.weight_hash, ledger.drifted_step)


def test_what_is_closed_stays_closed() -> None:
    """Also where the log holds an older drop once more."""
    drop = groups_dropped(epoch=1, groups=(dropped_group("1"),), closed=ClosedGroups(watermark=2))
    ledger = Ledger()
    later = dataclasses.replace(step(1), closed=ClosedGroups(watermark=3, above=(5,)))
    counts(ledger, claim(1), drop, later, drop)
    assert ClosedGroups(watermark=3, above=(5,)) == ledger.closed
    assert (4, 5) == (ledger.num_closed, ledger.highest_closed)
    assert [True, False, True] == [ledger.is_closed(number) for number in (2, 4, 5)]


def test_expired_records_are_needed_by_nobody() -> None:
    """What lay at the positions of the last step is gone, and was closed."""
    ledger = Ledger()
    counts(ledger, claim(1), step(1), groups_dropped(groups=(dropped_group(reason="expired"),)))
    assert () == ledger.positions


@st.composite
def ledgers(draw: st.DrawFn) -> list[Event]:
    """Claims, steps and drops of up to four epochs in any order."""
    epochs, numbers = st.integers(1, 4), st.integers(1, 4)
    kinds = st.one_of(
        st.builds(claim, epochs),
        st.builds(step, numbers, epochs),
        st.builds(lambda epoch: groups_dropped(epoch=epoch, groups=()), epochs),
    )
    return [claim(1), *draw(st.lists(kinds, max_size=20))]


@given(ledgers())
def test_listeners_hear_exactly_what_counts(events: list[Event]) -> None:
    """And a reader that may begin anywhere finds the same in what counts of a whole log."""
    heard: list[Event] = []
    ledger = Ledger(keeps_steps=True)
    ledger.listen(
        on_step=lambda event, _: heard.append(event),
        on_drop=lambda event, _: heard.append(event),
    )
    valid = list(itertools.compress(events, counts(ledger, *events)))
    assert [event for event in valid if not isinstance(event, TrainerStarted)] == heard
    anywhere = Ledger(begins_anywhere=True, keeps_steps=True)
    assert all(counts(anywhere, *valid))
    steps = [event for event in valid if isinstance(event, StepCompleted)]
    assert [event.step for event in steps] == list(range(1, len(steps) + 1)) == list(ledger.steps)
    assert ledger.hashes == anywhere.hashes
    assert ledger.last_step == anywhere.last_step


def test_a_branch_counts_as_the_first_event_only_and_steps_follow_it() -> None:
    """What its parent closed is closed, whatever a heartbeat disowns; its first epoch is 1."""
    begin = run_branched(step=30, policy_version=31, weight_hash="base")
    own = step_completed(
        step=31, policy_version=32, weight_hash="own", closed=ClosedGroups(watermark=8, above=(9,))
    )
    ledger = Ledger(keeps_steps=True)
    events = [begin, step(30), claim(1), begin, step(1), own, heartbeat(disowned=(0, 5)), claim(2)]
    assert [True, False, True, False, False, True, True, True] == counts(ledger, *events)
    assert (30, 31, 2) == (ledger.begins_behind, ledger.last_step, ledger.epoch)
    assert {0: begin.hashes["model"], 31: "base", 32: "own"} == ledger.hashes
    assert begin.closed == ledger.closed
    assert ledger.is_closed(8)
    assert not ledger.is_closed(7)
    assert [31] == [*ledger.steps]
    assert [True, False] == counts(Ledger(begins_anywhere=True), step(3), begin)

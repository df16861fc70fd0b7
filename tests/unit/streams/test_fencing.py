"""One rule says which events of `steps` count, and every fold of the topic follows it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlstreams.schemas.events import Event
from rlstreams.streams.log.fencing import EpochGate, StepsGate
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import STEPS
from rlstreams.streams.views.run import RunView
from rlstreams.workers.policy.ledger import VersionHashes
from rlstreams.workers.prompts.pacing import Ledger as Pacing
from rlstreams.workers.trainer.redo.ledger import Ledger
from tests.factories import groups_dropped, step_completed, trainer_started


def step(number: int, epoch: int) -> Event:
    """A step whose version and hash tell of it which one counted."""
    return step_completed(
        step=number,
        epoch=epoch,
        policy_version=number,
        weight_hash=f"{number} of {epoch}",
        samples=(),
    )


def claim(epoch: int) -> Event:
    return trainer_started(epoch=epoch, policy_version=0, weight_hash="first")


def test_an_event_counts_in_the_epoch_of_the_newest_claim_only() -> None:
    """Neither a fenced epoch nor one that nobody claimed is admitted."""
    gate = EpochGate()
    events = [claim(1), step(1, 1), claim(2), step(2, 1), step(2, 2), claim(2), step(3, 7)]
    assert [gate.admits(e) for e in events] == [True, True, True, False, True, False, False]


def test_the_first_of_each_step_counts_if_it_is_the_next() -> None:
    """A repeated step, and one that leaves another out, are void."""
    gate = StepsGate()
    events = [claim(1), step(1, 1), step(1, 1), step(3, 1), step(2, 1)]
    assert [gate.admits(e) for e in events] == [True, True, False, False, True]
    assert gate.last_step == 2


def test_nothing_counts_before_the_first_claim_of_a_whole_log() -> None:
    """A foreign step at the very beginning is void; a recording may begin behind the claim."""
    assert not StepsGate().admits(step(1, 1))
    anywhere = StepsGate(begins_anywhere=True)
    assert [anywhere.admits(step(n, 1)) for n in (5, 7, 6)] == [True, True, False]


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
def test_all_folds_agree_on_what_was_done(events: list[Event]) -> None:
    """Trainer, issuer, policy view and live view see the same steps and the same weights."""
    trainer, pacing, hashes = Ledger(), Pacing(max_replacements=1), VersionHashes()
    view, anywhere = RunView(), StepsGate(begins_anywhere=True)
    whole = StepsGate()
    for offset, event in enumerate(events):
        counts = whole.admits(event)
        assert trainer.apply(event, Position(STEPS.name, 0, offset)) == counts
        pacing.apply(event)
        hashes.apply(event)
        if counts:
            assert anywhere.admits(event)
            view.apply(event)
    assert trainer.last_step == pacing.last_step == view.state.step == whole.last_step
    assert trainer.hashes == hashes.by_version == view.state.weight_hashes

"""States of a server: whatever happens in whatever order, its gate is open in `serving` alone."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlstreams.workers.engines.base import Held
from rlstreams.workers.engines.served.states import TRANSITIONS, Event, ServerState, State

# Written down apart from the table: from where each event may come, and where it leads.
UP = {State.EMPTY, State.SERVING, State.DOUBTED}
DOWN = {State.STARTING, State.LOST, State.HUNG}
EXPECTED: dict[Event, tuple[set[State], State]] = {
    Event.MET: (DOWN, State.EMPTY),
    Event.PULL: (UP, State.PULLING),
    Event.PULLED: ({State.PULLING}, State.SERVING),
    Event.KEPT: ({State.PULLING}, State.SERVING),
    Event.EMPTIED: (UP | {State.PULLING}, State.EMPTY),
    Event.BROKE_OFF: ({State.SERVING}, State.DOUBTED),
    Event.ANSWERED: ({State.DOUBTED}, State.SERVING),
    Event.SLEPT: ({State.EMPTY}, State.ASLEEP),
    Event.WOKE: ({State.ASLEEP}, State.EMPTY),
    Event.LOST: (set(State), State.LOST),
    Event.HUNG: (set(State), State.HUNG),
}


def in_state(name: State) -> ServerState:
    """A server there, by hand."""
    found = ServerState()
    found.name = name
    if name in (State.SERVING, State.DOUBTED, State.PULLING):
        found.held = Held(3, "hash")
    return found


@pytest.mark.parametrize("event", list(Event))
@pytest.mark.parametrize("name", list(State))
def test_each_event_in_each_state(name: State, event: Event) -> None:
    """It leads where it should, or is refused with both named and changes nothing."""
    state, (sources, target) = in_state(name), EXPECTED[event]
    assert state.can(event) == (name in sources)
    if name in sources:
        state.go(event, "because")
        assert (state.name, state.why_shut) == (target, "because")
    else:
        held = state.held
        with pytest.raises(ValueError, match=f"a server that is {name} cannot be {event}"):
            state.go(event, "because")
        assert (state.name, state.held, state.why_shut) == (name, held, "not asked yet")


@pytest.mark.parametrize("name", list(State))
def test_the_gate_is_open_in_serving_alone(name: State) -> None:
    state = in_state(name)
    assert state.is_open == (name is State.SERVING)
    assert state.may_pull == (name in UP)
    assert state.is_up == (name not in DOWN)


def test_every_state_is_reached_and_left() -> None:
    reached = {target for (source, _), target in TRANSITIONS.items() if source is not target}
    left = {source for (source, _), target in TRANSITIONS.items() if source is not target}
    assert reached == {*State} - {State.STARTING}
    assert left == {*State}


class AnyOrder(RuleBasedStateMachine):
    """Events in any order that the table allows, against a model of what is known of the weights.

    The model: the version that was given and confirmed since the server was met, and nothing that
    puts it in doubt since. It is written without the table.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = ServerState()
        self.numbers = itertools.count()
        self.known: Held | None = None  # what is in it for sure
        self.is_under_way = self.is_doubted = False

    @rule(event=st.sampled_from(list(Event)))
    def any_event(self, event: Event) -> None:
        if not self.state.can(event) or event is Event.PULLED:
            return
        if event is Event.KEPT and self.state.held is None:
            with pytest.raises(ValueError, match="cannot have kept"):
                self.state.go(event)
            return
        self.state.go(event, "because")
        if event is Event.PULL:
            self.is_under_way = True
        elif event is Event.BROKE_OFF:
            self.is_doubted = True
        else:
            self.is_under_way = self.is_doubted = False
            if event not in (Event.KEPT, Event.ANSWERED):
                self.known = None

    @precondition(lambda self: self.state.can(Event.PULLED))
    @rule()
    def pulled(self) -> None:
        self.known = Held(next(self.numbers), "hash")
        self.state.pulled(self.known)
        self.is_under_way = self.is_doubted = False
        assert self.state.trouble == ""

    @rule()
    def answers_with_weights_of_others(self) -> None:
        self.state.forget("not ours")
        self.known = None
        if not self.is_under_way:
            self.is_doubted = False

    @invariant()
    def requests_leave_for_known_weights_alone(self) -> None:
        is_known = self.known is not None and not self.is_under_way and not self.is_doubted
        assert self.state.is_open == is_known
        if self.state.is_open:
            assert self.state.held == self.known

    @invariant()
    def what_is_held_is_known(self) -> None:
        if not self.is_under_way:
            assert self.state.held == self.known


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase

"""States of one model server, and the table of its transitions. Pure.

    starting --met--> empty --pull--> pulling --pulled--> serving --broke off--> doubted
                        ^                |                   ^---- answered ----'
                        |<---emptied-----'<--pull-- serving, doubted
                        |--slept--> asleep --woke--> empty
    any --lost--> lost --met--> empty        any --hung--> hung --met--> empty

The gate is open in `serving` alone: requests go to a server that answers, holds a version which it
was given and which was checked, and pulls no other. A transition outside the table cannot happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from rlstreams.workers.engines.base import Held


class State(StrEnum):
    """State of a server, as the worker that uses it sees it."""

    STARTING = "starting"  # it has not answered yet
    EMPTY = "empty"  # it answers, and holds no version that we gave it
    SERVING = "serving"  # it holds a version
    PULLING = "pulling"  # it pulls a version
    ASLEEP = "asleep"  # it has given its memory up
    DOUBTED = "doubted"  # it holds a version, broke a request off, and was not looked at since
    LOST = "lost"  # no process listens there any more
    HUNG = "hung"  # it listens, but does not work: its owner has to end it


class Event(StrEnum):
    """Event in the life of a server."""

    MET = "met"  # it gave its facts, and is paused with nothing running
    PULL = "pull"  # a pull begins
    PULLED = "pulled"  # it holds the ordered version
    KEPT = "kept"  # a pull failed that touched nothing: the version before is whole
    EMPTIED = "emptied"  # its weights are unknown, or about to be
    BROKE_OFF = "broke off"  # a request ended without an answer
    ANSWERED = "answered"  # a look found it at work
    SLEPT = "slept"  # it has confirmed that its memory is free
    WOKE = "woke"  # it has its memory again
    LOST = "lost"  # it died
    HUNG = "hung"  # it does not answer, or does not obey


_UP = (State.EMPTY, State.SERVING, State.DOUBTED)  # and its memory is there, and quiet
TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (State.STARTING, Event.MET): State.EMPTY,
    (State.LOST, Event.MET): State.EMPTY,
    (State.HUNG, Event.MET): State.EMPTY,
    **{(state, Event.PULL): State.PULLING for state in _UP},
    (State.PULLING, Event.PULLED): State.SERVING,
    (State.PULLING, Event.KEPT): State.SERVING,
    **{(state, Event.EMPTIED): State.EMPTY for state in (*_UP, State.PULLING)},
    (State.SERVING, Event.BROKE_OFF): State.DOUBTED,
    (State.DOUBTED, Event.ANSWERED): State.SERVING,
    (State.EMPTY, Event.SLEPT): State.ASLEEP,
    (State.ASLEEP, Event.WOKE): State.EMPTY,
    **{(state, Event.LOST): State.LOST for state in State},
    **{(state, Event.HUNG): State.HUNG for state in State},
}


class ServerState:
    """A server's place in the table, and the version that it holds."""

    def __init__(self) -> None:
        self.name = State.STARTING
        self.held: Held | None = None  # the last one it was given, as far as known
        self.why_shut = "not asked yet"
        self.trouble = ""  # reason it is out of service, until mended; for people

    def __str__(self) -> str:
        return self.name

    @property
    def is_open(self) -> bool:
        """Whether a request may leave for it now."""
        return self.name is State.SERVING

    @property
    def is_up(self) -> bool:
        """Whether it answered the last question."""
        return self.name not in (State.STARTING, State.LOST, State.HUNG)

    @property
    def may_pull(self) -> bool:
        """Whether a pull may begin."""
        return self.can(Event.PULL)

    def can(self, event: Event) -> bool:
        """Whether the table has this event for the present state."""
        return (self.name, event) in TRANSITIONS

    def go(self, event: Event, why: str = "", *, is_trouble: bool = True) -> None:
        """Take an event.

        Args:
            why: reason, for an event that shuts the gate.
            is_trouble: whether `why` counts as trouble, until a pull mends it.

        Raises:
            ValueError: the table has no such transition.
        """
        if not self.can(event):
            raise ValueError(f"a server that is {self.name} cannot be {event}")
        if event is Event.KEPT and self.held is None:
            raise ValueError("a server that held nothing cannot have kept it")
        self.name = TRANSITIONS[self.name, event]
        if why:
            self.why_shut = why
            if is_trouble:
                self.trouble = why
        if self.name in (State.EMPTY, State.ASLEEP, State.LOST, State.HUNG):
            self.held = None

    def forget(self, why: str) -> None:
        """Mark its weights as unknown; a pull under way goes on, and cannot keep the old ones."""
        self.held = None
        if self.name is not State.PULLING and self.can(Event.EMPTIED):
            self.go(Event.EMPTIED, why)
        self.why_shut = self.trouble = why

    def pulled(self, held: Held) -> None:
        """Take the end of a pull: the server holds the ordered version."""
        self.go(Event.PULLED)
        self.held, self.trouble = held, ""

"""Sessions as agents may play them, by a random generator, and what is true of them by plain lists.

An agent is started several times; each start repeats a prefix of what it asked before and then goes
its own way. Requests are repeated, calls branch, copies and other contents of known ids follow.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import zstandard

from rlstreams.schemas.events import CallCommitted, Event, OutcomeReported, Segment, Tensor
from tests.call_events import (
    answered,
    call_committed,
    call_failed,
    call_replayed,
    outcome_reported,
    session_closed,
    session_opened,
)

TOOLS = zstandard.compress(b'{"tools": [{"type": "function"}]}')
PLAIN = zstandard.compress(b'{"messages": []}')


def ids(tokens: list[int]) -> Tensor:
    return Tensor.of(np.array(tokens, np.int32))


@dataclass
class Played:
    """One session: its records, and what the agent's model saw, apart from them."""

    rng: random.Random
    session_id: str = "7/1"
    calls: list[Event] = field(default_factory=list)  # the topic, in order
    outcomes: list[OutcomeReported] = field(default_factory=list)
    saw: dict[str, list[int]] = field(default_factory=dict)  # prompt and answer, by call id
    parent: dict[str, str | None] = field(default_factory=dict)
    recorded: dict[tuple[str, int], str] = field(default_factory=dict)
    asked: Counter[tuple[int, str]] = field(default_factory=Counter)
    num_starts: int = 0
    answers: list[str] = field(default_factory=list)  # call ids that the newest start was given
    committed: list[CallCommitted] = field(default_factory=list)

    def start(self) -> int:
        self.calls.append(session_opened(session_id=self.session_id, start=self.num_starts))
        self.num_starts += 1
        self.answers = []
        return self.num_starts - 1

    def ask(self, start: int, request: str, parent: str | None) -> str:
        """One request, answered from what was recorded or by a new call."""
        occurrence = self.asked[start, request]
        self.asked[start, request] += 1
        if call_id := self.recorded.get((request, occurrence)):
            self.answers.append(call_id)
            self.calls.append(
                call_replayed(session_id=self.session_id, start=start, call_id=call_id)
            )
            return call_id
        text = f"{self.session_id} {request} {occurrence}"
        call_id = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.recorded[request, occurrence] = call_id
        self.answers.append(call_id)
        self._commit(call_id, start, request, occurrence, parent)
        return call_id

    def _commit(
        self, call_id: str, start: int, request: str, occurrence: int, parent: str | None
    ) -> None:
        rng = self.rng
        before = self.saw[parent] if parent else []
        new = [rng.randrange(50) for _ in range(rng.randrange(0 if before else 1, 5))]
        segments = tuple(
            answered(rng.randrange(4), rng.randrange(3), rng.randrange(100))
            for _ in range(rng.randrange(1, 3))
        )
        self.parent[call_id] = parent
        said = [t for s in segments for t in s.token_ids.numpy().tolist()]
        self.saw[call_id] = before + new + said
        event = call_committed(
            session_id=self.session_id,
            call_id=call_id,
            start=start,
            ordinal=len(self.committed),
            request_hash=request,
            occurrence=occurrence,
            parent=parent,
            prompt_tokens=len(before) + len(new),
            new_ids=ids(new),
            segments=segments,
            request=rng.choice([TOOLS, PLAIN]),
            is_trained=rng.random() < 0.8,
            constrained=rng.choice(["", "", "", "grammar"]),
        )
        self.committed.append(event)
        self.calls.append(event)


def played(seed: int, session_id: str = "7/1") -> Played:
    """A session with one to three starts, closed or not, judged or not."""
    rng = random.Random(seed)
    log = Played(rng, session_id)
    script: list[tuple[str, int | None]] = []  # request, index of the answer that it continues
    for _ in range(rng.randrange(1, 4)):
        start = log.start()
        script = script[: rng.randrange(len(script) + 1)]
        answers: list[str] = []
        for place in range(rng.randrange(1, 7)):
            if place >= len(script):
                script.append((rng.choice("abc"), rng.choice([None, *range(place)])))
            request, continued = script[place]
            parent = None if continued is None else answers[continued]
            answers.append(log.ask(start, request, parent))
        if rng.random() < 0.3:
            log.calls.append(call_failed(session_id=session_id, start=start))
    if rng.random() < 0.7:
        log.calls.append(session_closed(session_id=session_id))
    for number in range(rng.randrange(4)):
        log.outcomes.append(
            outcome_reported(
                session_id=session_id,
                outcome_id=f"o{number}",
                reward=float(number),
                supersedes=rng.choice([None, f"o{number - 1}"]),
                call_id=rng.choice([None, *log.saw]),
            )
        )
    return log


def with_copies(events: list[Event], rng: random.Random) -> list[Event]:
    """The same records with copies behind them, some of another content."""
    result = list(events)
    for _ in range(rng.randrange(6)):
        place = rng.randrange(len(result))
        copy = result[place]
        if isinstance(copy, CallCommitted) and rng.random() < 0.5:
            copy = replace(copy, segments=(_other(copy.segments[0]),), new_ids=ids([1, 2]))
        elif isinstance(copy, OutcomeReported) and rng.random() < 0.5:
            copy = replace(copy, reward=99.0)
        result.insert(rng.randrange(place + 1, len(result) + 1), copy)
    return result


def _other(segment: Segment) -> Segment:
    return replace(segment, token_ids=ids([3] * len(segment.token_ids)))


def interleaved(log: Played, rng: random.Random) -> list[Event]:
    """Both topics, with copies, in any order between the two."""
    topics: list[list[Event]] = [with_copies(log.calls, rng)]
    if log.outcomes:
        topics.append(with_copies(list(log.outcomes), rng))
    result: list[Event] = []
    while any(topics):
        result.append(rng.choice([topic for topic in topics if topic]).pop(0))
    return result

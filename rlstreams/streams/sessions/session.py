"""One session: the starts of its agent, its tree of calls, its close and its outcomes.

A call that continues an earlier one records only the tokens that the earlier one lacks, so the
model's input is the path from the root:

    root   P P P P | a a a            P: its prompt, a: what was sampled
    child          :       n n | b b  n: new ids, b: what was sampled

The child's prompt is `P P P P a a a n n`: 9 tokens, as `prompt_tokens` says. Where the two
disagree, the link does not hold: the call is a root whose prompt is not known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

import numpy as np

from rlstreams.schemas.calls import AGENT, REWARD
from rlstreams.schemas.events import (
    CallCommitted,
    CallFailed,
    CallReplayed,
    OutcomeReported,
    SessionClosed,
    SessionOpened,
)
from rlstreams.streams.log.record import NO_PLACE
from rlstreams.streams.tokens import Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """A call in its session's tree."""

    call: CallCommitted
    offset: int  # of its record; NO_PLACE: not known
    parent: Node | None  # None: a root
    number: int  # in commit order, from 0
    depth: int  # calls above it
    end: int  # tokens of its prompt and its answer
    problem: str = ""  # why its prompt is not known, in words; "": it is

    @property
    def path(self) -> tuple[Node, ...]:
        """The calls from the root to this call."""
        found, node = [self], self.parent
        while node is not None:
            found.append(node)
            node = node.parent
        return tuple(reversed(found))

    @property
    def root(self) -> Node:
        """The first call of its path."""
        return self.path[0]


def sampled_tokens(call: CallCommitted) -> int:
    """Return the number of tokens of a call's answer."""
    return sum(len(segment.token_ids) for segment in call.segments)


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """The records of one session; the fold alone changes it."""

    session_id: str
    first_offset: int = NO_PLACE  # of its first record in `calls`; NO_PLACE: not known
    opened: SessionOpened | None = None  # the first record: it has the identity
    starts: dict[int, SessionOpened] = field(default_factory=dict)  # by number
    nodes: dict[str, Node] = field(default_factory=dict)  # by call id, in commit order
    failed: dict[CallFailed, None] = field(default_factory=dict)  # in order
    closed: SessionClosed | None = None
    outcomes: dict[str, OutcomeReported] = field(default_factory=dict)  # by id, as they came
    replays: dict[tuple[int, str], CallReplayed] = field(default_factory=dict)  # start, call id
    num_void: int = 0  # calls and replays of a start behind the opening of the next one
    _by_request: dict[tuple[str, int], CallCommitted] = field(default_factory=dict)
    # Occurrences that were answered, by start and request hash.
    _asked: defaultdict[tuple[int, str], set[int]] = field(default_factory=lambda: defaultdict(set))
    _superseded: set[str] = field(default_factory=set)

    @property
    def calls(self) -> list[CallCommitted]:
        """Its calls in commit order."""
        return [node.call for node in self.nodes.values()]

    @property
    def num_starts(self) -> int:
        """Number of starts of its agent, which is the number of the next start."""
        return 1 + max(self.starts, default=-1)

    @property
    def _goes_on(self) -> bool:
        """Whether its client is from outside: it does not begin anew with a new start."""
        return self.opened is not None and bool(self.opened.client_group)

    @property
    def answered(self) -> list[Node]:
        """Calls that answered its agent's newest start, in commit order; all calls, where its
        client goes on behind a new start."""
        nodes, start = list(self.nodes.values()), self.num_starts - 1
        if self._goes_on:
            return nodes
        answered = {name for number, name in self.replays if number == start}
        return [n for n in nodes if n.call.start == start or n.call.call_id in answered]

    @property
    def newest(self) -> list[Node]:
        """Calls that answered its agent's newest start, in commit order; all calls, where it has
        none."""
        return self.answered or list(self.nodes.values())

    @property
    def is_closed(self) -> bool:
        """Whether no call follows."""
        return self.closed is not None

    @property
    def standing(self) -> list[OutcomeReported]:
        """Outcomes that no later one has replaced, as they came. An agent's own word counts in its
        newest start: an earlier one spoke of other work, or is said again."""
        first = 0 if self._goes_on else self.num_starts - 1
        return [
            one
            for name, one in self.outcomes.items()
            if name not in self._superseded and not 0 <= one.start < first
        ]

    @property
    def is_rewarded(self) -> bool:
        """Whether its agent gave a reward, and has made no call since."""
        said_ms = [o.at_ms for o in self.standing if (o.grader, o.kind) == (AGENT, REWARD)]
        called_ms = max((call.finished_at_ms for call in self.calls), default=0)
        return bool(said_ms) and max(said_ms) >= called_ms

    @property
    def terminal(self) -> str | None:
        """The judged call, by the newest standing reward that names one; None: none does."""
        named = [o.call_id for o in self.standing if o.call_id is not None and o.kind == REWARD]
        return named[-1] if named else None

    def is_heard(self, node: Node) -> bool:
        """Whether a client waited for the call's answer, when it was written or later."""
        name = node.call.call_id
        return not node.call.unheard or any(of == name for _, of in self.replays)

    def recorded(self, request_hash: str, occurrence: int) -> CallCommitted | None:
        """Return the call that answered this request at its n-th occurrence in a start."""
        return self._by_request.get((request_hash, occurrence))

    def answered_occurrences(self, start: int, request_hash: str) -> Set[int]:
        """Return the occurrences of this request that a start had answered, sampled or from the
        log; the next one is the lowest that is not among them.

        A client that goes on behind a new start has had the answers of earlier ones, too. The last
        of them may be lost with its worker, unless a later call continues it.
        """
        answered = self._asked[start, request_hash]
        if not self._goes_on:
            return answered
        nodes = self.nodes.values()
        known = [node for node in nodes if node.call.request_hash == request_hash]
        is_lost = bool(known) and not answered and not any(n.parent is known[-1] for n in nodes)
        return {node.call.occurrence for node in (known[:-1] if is_lost else known)}

    def tokens_of(self, call_id: str) -> Ints:
        """Return prompt and answer of a call, int32 [tokens].

        Raises:
            KeyError: the session has no such call.
            ValueError: its prompt is not known; the message says why.
            schemas.TensorError: a tensor that cannot be read.
        """
        node = self.nodes[call_id]
        if node.problem:
            raise ValueError(f"call {call_id} of session {self.session_id}: {node.problem}")
        return np.concatenate([part for step in node.path for part in added(step.call)])

    def open(self, event: SessionOpened) -> bool:
        """Take a start of its agent; return False for a copy."""
        if event.start in self.starts:
            return False
        self.opened = self.opened or event
        self.starts[event.start] = event
        return True

    def commit(self, event: CallCommitted, offset: int = NO_PLACE) -> bool:
        """Take a call; return False if it is void or a copy, or the session is closed.

        Calls are written outside of transactions, so a worker that lost the session may still write
        some. Only the owner can write an opening, and behind it no earlier start counts.
        """
        if self._is_void(event):
            return False
        if event.call_id in self.nodes or self.is_closed:
            return False
        parent, problem = self._link(event)
        self.nodes[event.call_id] = Node(
            call=event,
            offset=offset,
            parent=parent,
            number=len(self.nodes),
            depth=0 if parent is None else parent.depth + 1,
            end=event.prompt_tokens + sampled_tokens(event),
            problem=problem,
        )
        self._by_request.setdefault((event.request_hash, event.occurrence), event)
        self._asked[event.start, event.request_hash].add(event.occurrence)
        return True

    def _link(self, event: CallCommitted) -> tuple[Node | None, str]:
        """Return the parent, and why the prompt is not known ("": it is)."""
        num_new, whole = len(event.new_ids), event.prompt_tokens
        parent = None if event.parent is None else self.nodes.get(event.parent)
        # A parent without tokens counts as none: every prompt begins with an empty sequence.
        if parent is not None and parent.end and parent.end + num_new == whole:
            return parent, parent.problem and f"its parent's: {parent.problem}"
        if num_new == whole:
            return None, ""
        if event.parent is None:
            return None, f"a root of {whole} prompt tokens has {num_new} of them"
        if parent is None:
            return None, f"its parent {event.parent} is not there before it"
        return None, (
            f"its prompt has {whole} tokens, its parent {event.parent} ends at {parent.end} "
            f"and {num_new} are new"
        )

    def replay(self, event: CallReplayed) -> bool:
        """Take an answer from the log; return False if it is void, a copy, of no call, or late.

        A replay in the start that sampled the call is no further answer; if nobody heard that
        answer, the replay shows that it was heard later.
        """
        if self._is_void(event):
            return False
        name = (event.start, event.call_id)
        node = self.nodes.get(event.call_id)
        if node is None:
            return False
        is_own = node.call.start == event.start
        if name in self.replays or (is_own and not node.call.unheard) or self.is_closed:
            return False
        self.replays[name] = event
        if not is_own:
            self._asked[event.start, node.call.request_hash].add(node.call.occurrence)
        return True

    def fail(self, event: CallFailed) -> bool:
        """Take a refusal; return False for a copy, or if the session is closed."""
        if event in self.failed or self.is_closed:
            return False
        self.failed[event] = None
        return True

    def close(self, event: SessionClosed) -> bool:
        """Take its close; return False for a copy."""
        if self.closed is not None:
            return False
        self.closed = event
        return True

    def judge(self, event: OutcomeReported) -> bool:
        """Take an outcome, also behind the close; return False for a copy."""
        if event.outcome_id in self.outcomes:
            return False
        if event.supersedes in self.outcomes:  # only an earlier one: no two replace each other
            self._superseded.add(event.supersedes)
        self.outcomes[event.outcome_id] = event
        return True

    def _is_void(self, event: CallCommitted | CallReplayed) -> bool:
        is_void = event.start + 1 < self.num_starts
        self.num_void += is_void
        return is_void


def added(call: CallCommitted) -> Iterator[Ints]:
    """Yield the tokens that a call has and its parent lacks, in order; raises TensorError."""
    yield call.new_ids.numpy()
    for segment in call.segments:
        yield segment.token_ids.numpy()

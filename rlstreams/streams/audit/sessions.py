"""The audit's own account of agents' sessions and calls.

It shares no code with the fold of sessions (`streams/sessions`), for it checks that one. Calls are
read before trajectories. The audit keeps of a call its content's digest, its end, and the digest of
all tokens up to its end; the first row of a session's sample must be one of these paths. The
outcome that was there when the sample was written decides the path. In further rows, the sample's
branches, each policy segment must be a call's, behind the same tokens as in the call, and in no
other row; calls that asked the same and got the same tokens may be in as many rows as there are
such calls.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlstreams.schemas import encode
from rlstreams.schemas.calls import JUDGED, REWARD
from rlstreams.schemas.events import (
    CallCommitted,
    CallReplayed,
    Event,
    OutcomeReported,
    Segment,
    SessionClosed,
    SessionOpened,
    TensorError,
    Trajectory,
)
from rlstreams.streams.audit.report import Breaches, BreachKind, CountedNames
from rlstreams.streams.log.record import Partition, Position


class Path:
    """A digest of the tokens up to some place of a sample.

    It covers authors, ids, versions, weight hashes and log-probs. Neighbouring tokens of the
    environment count as one segment; those behind the policy's last one are none of the sample.
    """

    def __init__(self, before: Path | None = None) -> None:
        self._sha: Any = hashlib.sha256() if before is None else before._sha.copy()
        self._environment: bytes = b"" if before is None else before._environment
        self._has_policy: bool = before is not None and before._has_policy
        self._ids: Any = hashlib.sha256() if before is None else before._ids.copy()
        self.words: list[int] = []
        """For each policy segment that was added, a digest of it and of all ids before it."""

    @property
    def digest(self) -> int:
        """The path's digest, 64 bits."""
        end = b"" if self._has_policy else self._environment
        return int.from_bytes(hashlib.sha256(self._sha.digest() + end).digest()[:8])

    @property
    def is_too_long(self) -> bool:
        """Whether something is behind the policy's last token."""
        return self._has_policy and bool(self._environment)

    def add(self, segments: Iterable[Segment]) -> Path:
        """Append these segments; raises TensorError."""
        for one in segments:
            ids = one.token_ids.numpy().astype("<i4").tobytes()
            if one.author == "environment":
                self._environment += ids
            elif ids:
                self._hash("environment", self._environment)
                self._environment = b""
                self._has_policy |= one.author == "policy"
                numbers = one.behavior_logprobs
                logprobs = b"" if numbers is None else numbers.numpy().astype("<f4").tobytes()
                by = f"{one.author} {one.policy_version} {one.weight_hash}"
                self._hash(by, ids + logprobs)
                if one.author == "policy":
                    head = self._ids.digest() + by.encode() + b"\n"
                    whole = hashlib.sha256(head + ids + logprobs)
                    self.words.append(int.from_bytes(whole.digest()[:8]))
            self._ids.update(ids)
        return self

    def _hash(self, name: str, content: bytes) -> None:
        if content:
            self._sha.update(f"{name} {len(content)}\n".encode() + content)


@dataclass(frozen=True, slots=True)
class _Call:
    """Facts kept of a call that counts."""

    content: int  # digest of the whole record
    end: int  # tokens of prompt and answer
    path: Path | None  # up to its end; None: its prompt is not known, or cannot be read


@dataclass(frozen=True, slots=True)
class _Written:
    """The sample of a session."""

    position: Position
    digest: int | None  # of its first row; None: it is no path, or cannot be read
    words: tuple[int, ...]  # `Path.words` of all its rows
    beside: tuple[int, ...]  # those of all rows but the first


@dataclass(slots=True, eq=False)
class Heard:
    """Records of one session that were read so far."""

    starts: set[int] = field(default_factory=set)
    calls: dict[str, _Call] = field(default_factory=dict)
    replays: set[tuple[int, str]] = field(default_factory=set)
    kind: str = ""  # kind of its close; "": it is open
    closed_at: Position | None = None
    outcomes: set[str] = field(default_factory=set)
    is_judged: bool = False  # some outcome is a reward
    samples: frozenset[int] = frozenset()  # digests of its paths, once it is closed
    words: Counter[int] = field(default_factory=Counter)  # see `Path.words`; how many calls say it


_NONE = Heard()


class SessionsAudit:
    """Takes records of `calls` and `outcomes`, and the trajectories of samples with a session.

    Args:
        breaches: takes breaches that no later record can heal.
        duplicates: takes the names of copies.
        expired: first offset left by retention, by partition: a session's records that are
            missing there are no breach.
    """

    def __init__(
        self, breaches: Breaches, duplicates: CountedNames, expired: Mapping[Partition, int]
    ) -> None:
        self._breaches = breaches
        self._duplicates = duplicates
        self._expired = expired
        self.heard: dict[str, Heard] = {}
        self._written: dict[str, _Written] = {}  # by sample

    def take(self, event: Event, position: Position) -> bool:
        """Take a record; return False for one of no session."""
        match event:
            case SessionOpened():
                starts = self._of(event.session_id).starts
                self._once(event.start in starts, event.session_id, position)
                starts.add(event.start)
            case CallCommitted() | CallReplayed() if event.start < max(
                self._of(event.session_id).starts, default=0
            ):  # by a worker that has lost the session
                late = f"{event.session_id} of start {event.start}, which is over, at {position}"
                self._duplicates.add(late)
            case CallCommitted():
                self._call(self._of(event.session_id), event, position)
            case CallReplayed():
                self._replay(self._of(event.session_id), event, position)
            case SessionClosed():
                heard = self._of(event.session_id)
                if self._once(bool(heard.kind), event.session_id, position):
                    heard.kind, heard.closed_at = event.kind or "unknown", position
                    paths = (call.path for call in heard.calls.values())
                    heard.samples = frozenset(path.digest for path in paths if path is not None)
                    contents = {name: call.content for name, call in heard.calls.items()}
                    heard.calls = {n: _Call(content, 0, None) for n, content in contents.items()}
            case OutcomeReported():
                heard = self._of(event.session_id)
                if self._once(event.outcome_id in heard.outcomes, event.session_id, position):
                    heard.outcomes.add(event.outcome_id)
                    heard.is_judged |= event.kind == REWARD
            case _:
                return False
        return True

    def _of(self, session_id: str) -> Heard:
        return self.heard.setdefault(session_id, Heard())

    def _once(self, is_there: bool, name: str, position: Position) -> bool:
        """Whether it is the first record of its kind."""
        if is_there:
            self._duplicates.add(f"{name} again at {position}")
        return not is_there

    def _call(self, heard: Heard, event: CallCommitted, position: Position) -> None:
        name, content = event.session_id, _content(event)
        first = heard.calls.get(event.call_id)
        if not self._once(first is not None, name, position):
            if first is not None and first.content != content:
                detail = f"{position} has another content than the first of {event.call_id}"
                self._breaches.add(BreachKind.CALL_TWICE, name, detail)
            return
        if self._is_late(heard, event, position):
            return
        if not heard.starts and not self._is_expired(position):
            detail = f"call {event.call_id} at {position}, and no start of its agent before it"
            self._breaches.add(BreachKind.UNOPENED_CALL, name, detail)
        end = event.prompt_tokens + sum(len(segment.token_ids) for segment in event.segments)
        path, problem = _path(heard, event)
        heard.words.update(() if path is None else path.words)
        heard.calls[event.call_id] = _Call(content, end, path)
        if problem and not self._is_expired(position):
            detail = f"call {event.call_id} at {position}: {problem}"
            self._breaches.add(BreachKind.BROKEN_CALL, name, detail)

    def _replay(self, heard: Heard, event: CallReplayed, position: Position) -> None:
        key = (event.start, event.call_id)
        if self._once(key in heard.replays, event.session_id, position) and not self._is_late(
            heard, event, position
        ):
            heard.replays.add(key)

    def _is_late(self, heard: Heard, event: CallCommitted | CallReplayed, at: Position) -> bool:
        if heard.kind:
            detail = f"{type(event).__name__} at {at}, closed at {heard.closed_at}"
            self._breaches.add(BreachKind.LATE_CALL, event.session_id, detail)
        return bool(heard.kind)

    def _is_expired(self, position: Position) -> bool:
        return bool(self._expired.get(Partition(position.topic, position.partition)))

    def trajectory(self, name: str, event: Trajectory, position: Position) -> None:
        """Take the first trajectory of a sample with a session."""
        try:
            main, *others = [Path().add(row) for row in _rows(event)]
        except TensorError:
            self._written[name] = _Written(position, None, (), ())
            return
        is_cut = any(path.is_too_long for path in (main, *others))
        beside = tuple(word for path in others for word in path.words)
        digest = None if is_cut else main.digest
        self._written[name] = _Written(position, digest, (*main.words, *beside), beside)

    def check(self, breaches: Breaches, ended: Iterable[str]) -> None:
        """Add breaches that only the whole log shows.

        Args:
            ended: samples whose prompt is done with, and that no role has next.
        """
        for name, written in self._written.items():
            if problem := self._forged(self.heard[name], written):
                detail = f"the sample at {written.position} {problem}"
                breaches.add(BreachKind.FORGED_SAMPLE, name, detail)
        for name in ended:
            heard = self.heard.get(name, _NONE)
            if heard.kind in JUDGED and heard.is_judged:
                detail = f"{heard.kind} at {heard.closed_at}, judged, and no sample or dead letter"
                breaches.add(BreachKind.UNDELIVERED, name, detail)

    def _forged(self, heard: Heard, written: _Written) -> str:
        """Return why a sample is not its session's; "": it is."""
        if heard.closed_at is None:
            return "is of a session that is not closed"
        if self._is_expired(heard.closed_at):
            return ""
        if any(num > heard.words[word] > 0 for word, num in Counter(written.words).items()):
            return "has a token of a call in two rows"
        if written.digest not in heard.samples:
            return "is no path of its calls"
        return "" if heard.words.keys() >= {*written.beside} else "has a branch that is none"

    @property
    def by_kind(self) -> dict[str, int]:
        """Number of sessions by kind of close; `open`: sessions without one."""
        counts = Counter(heard.kind or "open" for heard in self.heard.values())
        return dict(sorted(counts.items()))

    @property
    def num_calls(self) -> int:
        """Number of sampled calls."""
        return sum(len(heard.calls) for heard in self.heard.values())

    @property
    def num_replays(self) -> int:
        """Number of requests that were answered from the log."""
        return sum(len(heard.replays) for heard in self.heard.values())


def _path(heard: Heard, event: CallCommitted) -> tuple[Path | None, str]:
    """Return the path up to the end of a call (None: not known), and the call's problem or ""."""
    num_new, parent = len(event.new_ids), heard.calls.get(event.parent or "")
    fits = parent is not None and parent.end > 0 and parent.end + num_new == event.prompt_tokens
    before = parent.path if parent is not None and fits else None
    if fits and before is None:
        return None, ""  # the parent's problem was reported
    if not fits and num_new != event.prompt_tokens:
        end = "is not there before it" if parent is None else f"ends at {parent.end}"
        return None, (
            f"its prompt has {event.prompt_tokens} tokens, {num_new} are new, "
            f"its parent {event.parent} {end}"
        )
    try:
        return Path(before).add(_added(event, is_root=before is None)), ""
    except TensorError as err:
        return None, str(err)


def _rows(event: Trajectory) -> list[list[Segment]]:
    """Split a trajectory's segments into rows: a prompt behind other authors begins one."""
    rows: list[list[Segment]] = [[]]
    for one in event.segments:
        if one.author == "prompt" and rows[-1] and rows[-1][-1].author != "prompt":
            rows.append([])
        rows[-1].append(one)
    return rows


def _added(event: CallCommitted, *, is_root: bool) -> Iterator[Segment]:
    author = "prompt" if is_root else "environment"
    yield Segment(author=author, token_ids=event.new_ids)
    is_learnt = event.is_trained and not event.constrained
    for one in event.segments:
        yield one if is_learnt else Segment(author="environment", token_ids=one.token_ids)


def _content(event: CallCommitted) -> int:
    value = hashlib.sha256()
    for piece in encode(event):
        value.update(piece)
    return int.from_bytes(value.digest()[:8])

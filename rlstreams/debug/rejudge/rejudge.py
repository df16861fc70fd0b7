"""Recorded sessions judged again by another grader, and what that would have changed.

Nothing is written, and nothing is sampled: the answers are those of the log. Of each judged
session there is a new outcome, or why there is none; a grader that fails is no reward of 0. Then
each step's advantages are computed anew, by the trainer's own function: once from the recorded
rewards, which says whether that function is the one that the step had, and once from the new ones.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlstreams.schemas.calls import ENDED, GRADER, LIMIT, REWARD
from rlstreams.schemas.events import (
    OutcomeReported,
    Prompt,
    StepCompleted,
    TensorError,
    Trajectory,
)
from rlstreams.streams.log.topics import CALLS, OUTCOMES
from rlstreams.streams.run.run_log import RunLog
from rlstreams.streams.sessions.chain import NoChainError, main_chain
from rlstreams.streams.sessions.fold import SessionLog
from rlstreams.streams.sessions.session import Session
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.rollout.judged import sample_of_chain
from rlstreams.workers.sandbox.reward import Judgement, RewardError, Verifier
from rlstreams.workers.trainer.learn.advantage import advantages_by, overlong_penalty

AT_ONCE = 64  # sessions that are with the grader
JUDGED = (ENDED, LIMIT)
Name = tuple[str, int]  # group and number of a sample
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grader:
    """Who judges now."""

    name: str
    hash: str  # SHA-256 of its code and settings; "": not known
    verifier: Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOutcome:
    """What the grader says of one session."""

    event: OutcomeReported  # not written
    sample: Name
    was: float | None  # the reward of its sample; None: there is no sample of it


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAdvantages:
    """One step of which a reward would have been another."""

    step: int
    names: tuple[Name, ...]  # its samples, in batch order
    was: tuple[float, ...]  # as recorded
    now: tuple[float, ...]
    is_exact: bool  # from the recorded rewards the recorded advantages come out, bit for bit

    @property
    def num_changed(self) -> int:
        """Samples with another advantage."""
        return sum(a != b for a, b in zip(self.was, self.now, strict=True))


@dataclass(slots=True, kw_only=True)
class Rejudged:
    """What came of it."""

    outcomes: list[NewOutcome] = field(default_factory=list)
    steps: list[NewAdvantages] = field(default_factory=list)
    num_unjudged: int = 0  # sessions that closed in another way than by their end or a limit
    num_open: int = 0

    @property
    def num_changed(self) -> int:
        """Samples with another reward."""
        judged = (one for one in self.outcomes if one.event.kind == REWARD)
        return sum(one.was is not None and one.was != one.event.reward for one in judged)


@dataclass(slots=True)
class _Asked:
    """What a prompt says to a grader."""

    text: str
    answer: str
    metadata: str


def rejudge(log: RunLog, grader: Grader, decode: Decode, by: LossSection) -> Rejudged:
    """Judge the closed sessions of a run, live or recorded.

    Args:
        decode: token ids to text, special tokens left out.
        by: how the run makes advantages of rewards.

    Raises:
        DeadlineError: a partition did not deliver up to its end.
        ConfigError: new rewards that `by` is not defined for; names the group.
    """
    asked = {
        (one.event.group_id, one.event.sample): _Asked(
            one.event.text, one.event.answer, one.event.metadata
        )
        for one in log.read(Prompt, skip_unreadable=True)
    }
    rewards: dict[Name, float] = {}
    lengths: dict[Name, int] = {}
    for one in log.read(Trajectory, skip_unreadable=True):
        name = one.event.group_id, one.event.sample
        rewards[name] = one.event.reward
        policy = (s for s in one.event.segments if s.author == "policy")
        lengths[name] = sum(len(s.token_ids) for s in policy)
    found = Rejudged()
    for sessions in _closed(log, found):
        judging = (_judge(one, asked, grader, decode) for one in sessions)
        for session, event in zip(sessions, asyncio.run(_all(judging)), strict=True):
            name = _name(session)
            found.outcomes.append(NewOutcome(event=event, sample=name, was=rewards.get(name)))
    now = {
        one.sample: one.event.reward
        for one in found.outcomes
        if one.event.kind == REWARD and one.was is not None
    }
    for step in log.steps():
        if (changed := _step(step, now, lengths, by)) is not None:
            found.steps.append(changed)
    return found


def _closed(log: RunLog, found: Rejudged) -> Iterator[list[Session]]:
    """Sessions to be judged, some at a time; what was given is forgotten."""
    sessions, ready = SessionLog(), list[Session]()
    for topic in (OUTCOMES, CALLS):  # all that was said before the close is counted is there
        for record in log.read_topic(topic, skip_unreadable=True):
            sessions.apply(record.event, record.position.offset)
            session = sessions.get(getattr(record.event, "session_id", ""))
            if session is None or session.closed is None:
                continue
            sessions.forget(session.session_id)
            if session.closed.kind in JUDGED:
                ready.append(session)
            else:
                found.num_unjudged += 1
            if len(ready) == AT_ONCE:
                yield ready
                ready = []
    if ready:
        yield ready
    found.num_open = sum(bool(one.starts or one.nodes) for one in sessions)


async def _all(judging: Iterable[Awaitable[OutcomeReported]]) -> list[OutcomeReported]:
    return list(await asyncio.gather(*judging))


async def _judge(
    session: Session, asked: Mapping[Name, _Asked], grader: Grader, decode: Decode
) -> OutcomeReported:
    """What the grader says, or that it cannot."""
    kind, judged, note = REWARD, Judgement(reward=0.0), ""
    try:
        chain = main_chain(session, session.terminal)
        said = _said_to(asked, _name(session))
        sample = sample_of_chain(chain, said.text, said.answer, said.metadata, decode)
        judged = await grader.verifier.verify(sample)
        note, call_id = judged.note, chain.calls[-1].call_id
    except (RewardError, NoChainError, TensorError) as err:
        kind, note, call_id = GRADER, str(err), None
    rewards = [one for one in session.standing if one.kind == REWARD]
    text = f"{session.session_id}\n{grader.name}\n{grader.hash}"
    assert session.closed is not None, "only closed sessions are judged"
    return OutcomeReported(
        session_id=session.session_id,
        group_id=session.closed.group_id,
        outcome_id=hashlib.sha256(text.encode()).hexdigest()[:32],
        kind=kind,
        reward=judged.reward,
        grader=grader.name,
        call_id=call_id,
        grader_hash=grader.hash,
        parts=judged.parts,
        note=note,
        supersedes=rewards[-1].outcome_id if rewards else None,
    )


def _said_to(asked: Mapping[Name, _Asked], name: Name) -> _Asked:
    if name not in asked:
        raise RewardError(f"the prompt of {name[0]}/{name[1]} is not in the log")
    return asked[name]


def _step(
    step: StepCompleted, now: Mapping[Name, float], lengths: Mapping[Name, int], by: LossSection
) -> NewAdvantages | None:
    """None: none of its rewards would be another."""
    names = [(ref.group_id, ref.sample) for ref in step.samples]
    old = [ref.reward for ref in step.samples]
    new = [now.get(name, ref.reward) for name, ref in zip(names, step.samples, strict=True)]
    if old == new:
        return None
    was = np.array([ref.advantage for ref in step.samples], np.float32)

    def advantages(rewards: list[float]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        if by.overlong_tokens:
            taken = [overlong_penalty(lengths.get(name, 0), by) for name in names]
            rewards = [r + p for r, p in zip(rewards, taken, strict=True)]
        return advantages_by(rewards, [group for group, _ in names], by)

    return NewAdvantages(
        step=step.step,
        names=tuple(names),
        was=tuple(was.tolist()),
        now=tuple(advantages(new).tolist()),
        is_exact=bool(np.array_equal(advantages(old), was)),
    )


def _name(session: Session) -> Name:
    closed = session.closed
    assert closed is not None, "only closed sessions are judged"
    return closed.group_id, closed.sample

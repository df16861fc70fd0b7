"""Recorded samples judged again by another grader, and the rewards and advantages it changes.

Nothing is written, and nothing is sampled: the answers are those of the log. Each finished sample,
and each session that closed to be judged, gets a new outcome, or the reason for which it has none;
a grader that fails is no reward of 0. Then each step's advantages are computed anew, by the
trainer's own function: once from the recorded rewards, which shows whether the step used this
function, and once from the new ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import batched

import msgspec
import numpy as np

from rlstreams.schemas.calls import GRADER, JUDGED, REWARD
from rlstreams.schemas.events import (
    OutcomeReported,
    Prompt,
    StepCompleted,
    TensorError,
    Trajectory,
)
from rlstreams.streams.digests import text_id
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.group_ids import SampleId
from rlstreams.streams.log.topics import CALLS, OUTCOMES
from rlstreams.streams.run.run_log import RunLog
from rlstreams.streams.sessions.chain import NoChainError, main_chain
from rlstreams.streams.sessions.fold import SessionLog
from rlstreams.streams.sessions.session import Session
from rlstreams.workers.config.layers import override_layer, pairs
from rlstreams.workers.config.reward import AGENT, ENVIRONMENT, SUM, RewardSection
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.config.user_code import Option, code_hashes, located
from rlstreams.workers.rollout.judged import sample_of_chain, sample_of_trajectory
from rlstreams.workers.rollout.verifiers import make_verifier
from rlstreams.workers.sandbox.recorded import Code
from rlstreams.workers.sandbox.reward import AnswerToJudge, Judgement, RewardError, Verifier
from rlstreams.workers.trainer.claim import read_ledger
from rlstreams.workers.trainer.learn.advantage import overlong_penalty, permuted
from rlstreams.workers.trainer.learn.rewarded import RewardedSample, advantages_of

AT_ONCE = 64  # samples that the grader has at a time
_OPTIONS = "reward.options."
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grader:
    """The grader that judges now, ready to use."""

    name: str
    hash: str  # SHA-256 of its code and settings; "": not known
    verifier: Verifier


@contextmanager
def grader_of(
    section: RewardSection, reward: str, verifier: str, options: Sequence[str]
) -> Iterator[Grader]:
    """Yield the grader, ready to use; its processes end with the block.

    Args:
        section: the run's own section, whose grader judges if neither option names one.
        reward: `file.py:function`; "": not named.
        verifier: a verifier of ours; "": not named.
        options: `NAME=VALUE`, a value as in TOML or plain text.

    Raises:
        ConfigError: both are named, or the grader gives no reward for an answer alone, or cannot
            be loaded.
    """
    if reward and verifier:
        raise ConfigError(f"--reward {reward} and --verifier {verifier}: name one of them")
    if reward and located(reward) is None:
        raise ConfigError(f"--reward must be FILE.py:NAME, got {reward!r}")
    if verifier == SUM:
        raise ConfigError("--verifier sum: its parts stand in the [reward] of a run; name one part")
    if named := reward or verifier:
        layers = [override_layer(f"{_OPTIONS}{name}", text) for name, text in pairs(options)]
        values: dict[str, Option] = {
            name.removeprefix(_OPTIONS): value
            for layer in layers
            for name, value in layer.values.items()
        }
        section = replace(section, verifier=named, options=values, parts=())
    elif options:
        raise ConfigError(f"--option {options[0]}: of whom? name --reward or --verifier")
    if section.verifier in (AGENT, ENVIRONMENT):
        whose = "its agents" if section.verifier == AGENT else "its environment"
        raise ConfigError(
            f"reward.verifier is {section.verifier!r}: {whose} gave the rewards, and cannot be "
            "asked again; name who judges, --reward FILE.py:NAME or --verifier NAME"
        )
    files = sorted(files_of(section).items())
    says = json.dumps([msgspec.to_builtins(section), files], sort_keys=True)
    with make_verifier(section) as judges:
        hashed = hashlib.sha256(says.encode()).hexdigest()
        yield Grader(name=section.verifier, hash=hashed, verifier=judges)


def files_of(section: RewardSection) -> dict[str, str]:
    """Return the SHA-256 of the code files of all verifiers, by path."""
    return {path: sha for name in section.verifiers for path, sha in code_hashes(name).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOutcome:
    """The grader's outcome for one sample."""

    event: OutcomeReported  # not written; without a session its id is the sample's name
    sample: SampleId
    was: float | None  # its reward; None: its session has no trajectory
    text: str  # the judged text: the last answer

    @property
    def is_changed(self) -> bool:
        """Whether its reward would be another."""
        is_judged = self.event.kind == REWARD and self.was is not None
        return is_judged and self.was != self.event.reward


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAdvantages:
    """One step's advantages, recorded and recomputed, where a reward changes."""

    step: int
    names: tuple[SampleId, ...]  # its samples, in batch order
    was: tuple[float, ...]  # as recorded
    now: tuple[float, ...]
    is_exact: bool  # the recorded rewards give the recorded advantages, bit for bit

    @property
    def num_changed(self) -> int:
        """Samples with another advantage."""
        return sum(a != b for a, b in zip(self.was, self.now, strict=True))


@dataclass(slots=True, kw_only=True)
class Rejudged:
    """New outcomes of samples, new advantages of steps, and their counts."""

    outcomes: list[NewOutcome] = field(default_factory=list)
    steps: list[NewAdvantages] = field(default_factory=list)
    num_steps: int = 0  # of the run
    num_exact: int = 0  # steps whose recorded rewards give the recorded advantages
    num_unjudged: int = 0  # sessions that closed in another way than by their end or a limit
    num_open: int = 0

    @property
    def num_changed(self) -> int:
        """Samples with another reward."""
        return sum(one.is_changed for one in self.outcomes)

    @property
    def num_failed(self) -> int:
        """Samples that the grader gives no reward."""
        return sum(one.event.kind != REWARD for one in self.outcomes)


@dataclass(frozen=True, slots=True)
class _Case:
    """A sample to be judged."""

    name: SampleId
    sample: Callable[[], tuple[AnswerToJudge, str | None]]  # the sample, and the call of its answer
    supersedes: str | None = None


@dataclass(slots=True)
class _Asked:
    """A prompt's fields for a grader."""

    text: str
    answer: str
    metadata: str


def rejudge(
    log: RunLog,
    grader: Grader,
    decode: Decode,
    by: TrainerSection,
    groups: Collection[str] | None = None,
) -> Rejudged:
    """Judge the finished samples of a run, live or recorded.

    Args:
        decode: token ids to text, special tokens left out.
        by: the section by which the run makes advantages of rewards.
        groups: the groups whose samples are judged; None: all.

    Raises:
        DeadlineError: a partition did not deliver up to its end.
        ConfigError: new rewards that `by` is not defined for; names the group.
    """
    claims = read_ledger(log.bus, "rejudge").claims if by.loss.has_own_advantage else {}
    asked = {
        SampleId.of(one.event): _Asked(one.event.text, one.event.answer, one.event.metadata)
        for one in log.read(Prompt, groups, skip_unreadable=True)
    }
    found, rewarded = Rejudged(), dict[SampleId, RewardedSample]()
    judged: dict[SampleId, tuple[OutcomeReported, str]] = {}
    with asyncio.Runner() as runner:

        def judge(cases: Iterable[_Case]) -> None:
            for some in batched(cases, AT_ONCE):
                said = runner.run(_all(some, grader))
                judged.update(zip((case.name for case in some), said, strict=True))

        judge(
            _Case(_name(session), partial(_of_session, session, asked, decode), _last(session))
            for session in _closed(log, found)
            if groups is None or _name(session).group_id in groups
        )
        judge(_plain(log, groups, asked, decode, judged, rewarded))
    found.outcomes += [
        NewOutcome(event=event, sample=name, was=_reward(rewarded.get(name)), text=text)
        for name, (event, text) in judged.items()
    ]
    now = {
        one.sample: Judgement(reward=one.event.reward, parts=one.event.parts)
        for one in found.outcomes
        if one.event.kind == REWARD and one.was is not None
    }
    for step in log.steps():
        if groups is not None and not any(ref.group_id in groups for ref in step.samples):
            continue
        code = claims[step.epoch].code if step.epoch in claims else {}
        again = advantages_again(step, now, rewarded, by, code)
        found.num_steps += 1
        found.num_exact += again.is_exact
        if any(name in now and now[name].reward != ref.reward
               for name, ref in zip(again.names, step.samples, strict=True)):  # fmt: skip
            found.steps.append(again)
    return found


def _closed(log: RunLog, found: Rejudged) -> Iterator[Session]:
    """Yield the sessions to be judged, and forget each."""
    sessions = SessionLog()
    for topic in (OUTCOMES, CALLS):  # outcomes first: they must be there when a close is read
        for record in log.read_topic(topic, skip_unreadable=True):
            sessions.apply(record.event, record.position.offset)
            session = sessions.get(getattr(record.event, "session_id", ""))
            if session is None or session.closed is None:
                continue
            sessions.forget(session.session_id)
            if session.closed.kind in JUDGED:
                yield session
            else:
                found.num_unjudged += 1
    found.num_open = sum(bool(one.starts or one.nodes) for one in sessions)


def _plain(
    log: RunLog,
    groups: Collection[str] | None,
    asked: Mapping[SampleId, _Asked],
    decode: Decode,
    judged: Mapping[SampleId, object],
    rewarded: dict[SampleId, RewardedSample],
) -> Iterator[_Case]:
    """Yield samples that were no sessions; fill `rewarded` for all samples."""
    of_sessions = set(judged)
    for record in log.read(Trajectory, groups, skip_unreadable=True):
        event = record.event
        name = SampleId.of(event)
        rewarded[name] = RewardedSample.of(event, event.reward)
        if name not in of_sessions:
            yield _Case(name, partial(_of_trajectory, event, asked, decode))


def _of_session(
    session: Session, asked: Mapping[SampleId, _Asked], decode: Decode
) -> tuple[AnswerToJudge, str | None]:
    chain = main_chain(session, session.terminal)
    said = _said_to(asked, _name(session))
    sample = sample_of_chain(chain, said.text, said.answer, said.metadata, decode)
    return sample, chain.calls[-1].call_id


def _of_trajectory(
    event: Trajectory, asked: Mapping[SampleId, _Asked], decode: Decode
) -> tuple[AnswerToJudge, str | None]:
    said = _said_to(asked, SampleId.of(event))
    return sample_of_trajectory(event, said.text, said.answer, said.metadata, decode), None


async def _all(cases: Sequence[_Case], grader: Grader) -> list[tuple[OutcomeReported, str]]:
    return list(await asyncio.gather(*(_judge(case, grader) for case in cases)))


async def _judge(case: _Case, grader: Grader) -> tuple[OutcomeReported, str]:
    """Return the grader's outcome, or its failure, and the judged answer."""
    kind, judged, note, text, call_id = REWARD, Judgement(reward=0.0), "", "", None
    try:
        sample, call_id = case.sample()
        text = sample.completion
        judged = await grader.verifier.verify(sample)
        note = judged.note
    except (RewardError, NoChainError, TensorError, ValueError) as err:
        kind, note, call_id = GRADER, str(err), None
    session_id = str(case.name)
    event = OutcomeReported(
        session_id=session_id,
        group_id=case.name.group_id,
        outcome_id=text_id(session_id, grader.name, grader.hash),
        kind=kind,
        reward=judged.reward,
        grader=grader.name,
        call_id=call_id,
        grader_hash=grader.hash,
        parts=judged.parts,
        note=note,
        supersedes=case.supersedes,
    )
    return event, text


def _said_to(asked: Mapping[SampleId, _Asked], name: SampleId) -> _Asked:
    if name not in asked:
        raise RewardError(f"the prompt of {name} is not in the log")
    return asked[name]


def advantages_again(
    step: StepCompleted,
    now: Mapping[SampleId, Judgement],
    rewarded: Mapping[SampleId, RewardedSample],
    by: TrainerSection,
    code: Code,
) -> NewAdvantages:
    """Return the advantages of a step, from these rewards instead of the recorded ones.

    Args:
        now: other rewards, by sample; a sample without one keeps its own.
        rewarded: samples as they are in the log.
        code: source of the user's advantage, of the step's claim.

    Raises:
        ConfigError: rewards that `by` is not defined for; names the group.
    """
    names = [SampleId.of(ref) for ref in step.samples]
    was = np.array([ref.advantage for ref in step.samples], np.float32)
    old = [
        replace(rewarded.get(name) or RewardedSample.unread(name), reward=ref.reward)
        for name, ref in zip(names, step.samples, strict=True)
    ]
    new = [
        replace(one, reward=now[name].reward, parts=now[name].parts) if name in now else one
        for name, one in zip(names, old, strict=True)
    ]

    def advantages(samples: list[RewardedSample]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        rewards = [one.reward for one in samples]
        if by.loss.overlong_tokens:
            taken = [overlong_penalty(one.num_tokens, by.loss) for one in samples]
            rewards = [r + p for r, p in zip(rewards, taken, strict=True)]
        if by.control == "permuted":
            rewards = permuted(rewards, step.step - 1)  # the number of steps before
        shaped = [replace(one, reward=r) for one, r in zip(samples, rewards, strict=True)]
        return advantages_of(shaped, by.loss, code).of_samples

    return NewAdvantages(
        step=step.step,
        names=tuple(names),
        was=tuple(was.tolist()),
        now=tuple(advantages(new).tolist()),
        is_exact=bool(np.array_equal(advantages(old), was)),
    )


def _reward(sample: RewardedSample | None) -> float | None:
    return None if sample is None else sample.reward


def _last(session: Session) -> str | None:
    """Return the outcome id of the session's newest standing reward."""
    rewards = [one for one in session.standing if one.kind == REWARD]
    return rewards[-1].outcome_id if rewards else None


def _name(session: Session) -> SampleId:
    closed = session.closed
    assert closed is not None, "only closed sessions are judged"
    return SampleId.of(closed)

"""Runs the session of a prompt to its close: starts an agent on it, and judges its work.

Runs on the engine's event loop. The agent calls the model over HTTP; each call is in the log before
it is answered (`workers.gateway`). So a session that was begun before, here or elsewhere, goes on:
its agent is started again, and its earlier requests are answered from the log.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rlstreams.schemas.calls import (
    ABANDONED,
    AGENT,
    ENDED,
    GRADER,
    INFRASTRUCTURE,
    JUDGED,
    LIMIT,
    REWARD,
)
from rlstreams.schemas.events import EVALUATE, OutcomeReported, Prompt
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Outgoing, Record
from rlstreams.streams.log.topics import TRAJECTORIES
from rlstreams.streams.sessions.chain import (
    Chain,
    NoChainError,
    main_chain,
    off_path,
)
from rlstreams.streams.sessions.session import Session, sampled_tokens
from rlstreams.streams.sessions.verdict import Verdict
from rlstreams.workers.agents.agent import Agent, Ending, LostAgentError, Start
from rlstreams.workers.agents.asking import Runners
from rlstreams.workers.config.agents import AgentSection
from rlstreams.workers.engines.base import Sampling
from rlstreams.workers.gateway.auxiliary import Auxiliary
from rlstreams.workers.gateway.canonical import Matcher
from rlstreams.workers.gateway.limits import CallLimits
from rlstreams.workers.gateway.open_session import OpenSession
from rlstreams.workers.gateway.open_sessions import OpenSessions
from rlstreams.workers.gateway.port import Report
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.dead_letters import set_aside
from rlstreams.workers.rollout.clock import SampleClock
from rlstreams.workers.rollout.ends import REASONS, trajectory_of_session
from rlstreams.workers.rollout.judged import sample_of_chain
from rlstreams.workers.rollout.tasks import place_of, task_of
from rlstreams.workers.sandbox.reward import AnswerToJudge, RewardError, Verifier

if TYPE_CHECKING:
    from rlstreams.workers.gateway.http.elsewhere import Elsewhere
    from rlstreams.workers.gateway.http.serve import GatewayServer

LAST_WORDS_S = 5.0  # from an agent's word that it is done to its end
KEY_S = 60.0  # that its key holds beyond an agent's time
CLIENTS_KEY_S = 30 * 86_400.0  # that a client's key holds: it outlives workers


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredAgent:
    """An agent of the run."""

    section: AgentSection
    agent: Agent
    code_hash: str  # SHA-256 of its settings and files


@dataclass(slots=True, kw_only=True)
class Closed:
    """A session that is over, with the records of its end that are still to be written."""

    session: OpenSession
    kind: str
    detail: str
    outcome: OutcomeReported | None = None  # the verifier's, to be written
    judged: OutcomeReported | None = None  # by which it is rewarded
    chain: Chain | None = None
    sample_s: float = 0.0
    num_starts: int = 1
    is_waiting: bool = False  # its close is in the log, and its graders have not spoken

    @property
    def versions(self) -> set[int]:
        """Empty: its calls are in the log already, so it waits for no load."""
        return set()

    def counts(self) -> dict[str, float]:
        """Counts for the worker's report."""
        calls = self.session.log.calls
        mine = [call for call in calls if call.start >= self.session.start + 1 - self.num_starts]
        return {
            "samples": 1,
            "tokens": sum(map(sampled_tokens, mine)),
            "tokens_replayed": sum(map(sampled_tokens, calls)) - sum(map(sampled_tokens, mine)),
            "tokens_off_path": 0 if self.chain is None else off_path(self.session.log, self.chain),
            "turns": len(calls),
            "calls": len(mine),
            "calls_replayed": len(calls) - len(mine),
            "sample_s": self.sample_s,
        }

    def outputs(
        self, record: Record[Prompt], engine: str, context: Context, judge: str
    ) -> tuple[Outgoing, ...]:
        """The records that end it, in one transaction with its prompt's position."""
        records, log = self.session.records, self.session.log
        close = records.outgoing(records.closed(log, self.kind, self.detail))
        said = () if self.outcome is None else (records.outgoing(self.outcome),)
        if self.kind not in JUDGED or self.chain is None or self.judged is None:
            reason = REASONS[self.kind]
            return (close, *said, set_aside(context, record, reason=reason, detail=self.detail))
        judged = self.judged
        verdict = Verdict(kind=REWARD, reward=judged.reward, parts=judged.parts, note=judged.note)
        made = trajectory_of_session(record, log, self.chain, verdict, engine, context, judge)
        return (close, *said, outgoing(TRAJECTORIES, made))


@dataclass(slots=True, kw_only=True)
class Sessions:
    """Runs the sessions of a worker: its agents, verifier and limits."""

    open_sessions: OpenSessions
    members: Sequence[ConfiguredAgent]
    verifier: Verifier
    verifier_name: str  # that judges what an agent has not judged itself
    by_agent: bool  # the agent's own number is the reward
    sampling: Sampling
    evaluation: Sampling
    deadline_s: float
    graders: Sequence[str] = ()  # that are waited for, after the session
    clock: SampleClock = field(default_factory=SampleClock)
    runners: Runners | None = None  # of agents that run elsewhere
    num_remote: int = 0  # sessions under way that no process of ours works on
    server: GatewayServer | None = None
    elsewhere: Elsewhere | None = None

    async def start(self, addresses: Callable[[], Sequence[str]] | None = None) -> None:
        """Listen for agents, and for requests for sessions of agents that run elsewhere.

        Args:
            addresses: of other workers' gateways, which may have sessions that went away from
                here; None: no session goes on with its client.
        """
        from rlstreams.workers.gateway.http import serve  # a web server, for agents alone

        if (runners := self.runners) is None:
            self.server = await serve.start(self.open_sessions)
            return
        if addresses is not None:
            from rlstreams.workers.gateway.http.elsewhere import Elsewhere

            self.elsewhere = Elsewhere(self.open_sessions, addresses)
        self.server = await serve.start(
            self.open_sessions, desk=runners, door=runners.door, elsewhere=self.elsewhere
        )
        runners.listening(self.server.door_port)

    async def close(self) -> None:
        """Take no more requests, and end what agents keep running."""
        self.open_sessions.end()
        for member in self.members:
            await member.agent.close()
        if self.server is not None:
            await self.server.close(0.0)
        if self.elsewhere is not None:
            await self.elsewhere.close()

    def member_of(self, prompt: Prompt) -> ConfiguredAgent:
        """The agent of a sample: one for all of a group, drawn by weight; for a held-out row one
        that reads rows."""
        members = self.members
        if prompt.purpose == EVALUATE:
            members = [one for one in members if not one.section.outside] or members
        digest = hashlib.sha256(prompt.group_id.encode()).digest()
        drawn = int.from_bytes(digest[:8]) / 2**64 * sum(m.section.weight for m in members)
        for member in members:
            drawn -= member.section.weight
            if drawn < 0:
                return member
        return members[-1]

    async def roll_out(
        self,
        record: Record[Prompt],
        log: Session,
        caught_up: Callable[[], bool] | None = None,
        siblings: Mapping[str, str] | None = None,
    ) -> Closed:
        """Have an agent work on a prompt until its session is over; nothing is written of the end.

        Args:
            log: what is recorded of the session so far.
            caught_up: see `OpenSession.begin`.
            siblings: see `SamplePlace`.

        Raises:
            EngineError: the engine will sample no more.
        """
        member = self.member_of(record.event)
        self.num_remote += member.section.is_elsewhere
        place = place_of(record.event, log, siblings or {})
        try:
            client_group = await member.agent.taken(place)  # its time begins when it is worked on
            began_s = time.monotonic()
            closed = await self._closed(record, log, member, caught_up, client_group)
            closed.sample_s = time.monotonic() - began_s
            await self._leave_open(closed)
        finally:
            self.num_remote -= member.section.is_elsewhere
        return closed

    async def _closed(
        self,
        record: Record[Prompt],
        log: Session,
        member: ConfiguredAgent,
        caught_up: Callable[[], bool] | None,
        client_group: str,
    ) -> Closed:
        """Start its agent, again where it is lost, and judge what it did, within the deadline."""
        starts, lost, prompt = 0, "", record.event
        try:
            async with self.clock.limit(self.deadline_s):
                while True:
                    starts += 1
                    session = self._session(record, log, member)
                    name, code = member.section.name, member.code_hash
                    branches = member.section.branches
                    await session.begin(name, code, caught_up, client_group, branches=branches)
                    caught_up = None  # from now on nobody else has it
                    try:
                        kind, detail = await self._played(session, prompt, member)
                        break
                    except LostAgentError as err:
                        kind, detail = INFRASTRUCTURE, str(err)
                    if starts == member.section.starts:
                        break
                    lost = f"; its last start was lost: {detail}"
                    await member.agent.taken(place_of(prompt, log, {}))
                closed = Closed(session=session, kind=kind, detail=detail, num_starts=starts)
                await self._judge(closed, prompt)
                return closed
        except TimeoutError:
            why = (
                f"session {log.session_id} of agent {member.section.name!r} was not over within "
                f"{self.deadline_s:g} s (rollout.sample_deadline_s), after {len(log.nodes)} calls"
                f"{lost}"
            )
            return Closed(session=session, kind=INFRASTRUCTURE, detail=why, num_starts=starts)

    async def _leave_open(self, closed: Closed) -> None:
        """Write the close alone, and let its prompt wait, if graders have still to speak."""
        log, records = closed.session.log, closed.session.records
        if not self.graders or closed.kind not in JUDGED:
            return
        if (outcome := closed.outcome) is not None:
            log.judge(await records.committed(outcome))
            closed.outcome = None
        log.close(await records.committed(records.closed(log, closed.kind, closed.detail)))
        closed.is_waiting = True

    def _session(
        self, record: Record[Prompt], log: Session, member: ConfiguredAgent
    ) -> OpenSession:
        section = member.section
        return OpenSession(
            self.open_sessions.shared,
            record,
            log,
            CallLimits(max_calls=section.max_calls, max_tokens=section.max_tokens),
            self.evaluation if record.event.purpose == EVALUATE else self.sampling,
            Matcher(section.ignore),
            Auxiliary(section.auxiliary_models, section.auxiliary_prompts),
            goes_on=section.outside,
        )

    async def _played(
        self, session: OpenSession, prompt: Prompt, member: ConfiguredAgent
    ) -> tuple[str, str]:
        """Run one start of the agent; return kind and detail of its end."""
        limit_s, ours = member.section.timeout_s, not member.section.outside
        key = self.open_sessions.open(session, self.deadline_s + KEY_S if ours else CLIENTS_KEY_S)
        assert self.server is not None
        begun = Start(
            session_id=session.session_id,
            task=task_of(prompt, session.session_id, with_answer=self.by_agent),
            url=self.server.url,
            key=key,
            ended=session.word.ended,
            silent_s=partial(self.open_sessions.silent_s, session),
        )
        running = asyncio.ensure_future(member.agent.run(begun))
        said = asyncio.ensure_future(session.word.ended.wait())
        is_lost = False
        try:
            async with self.clock.limit(limit_s):
                first: set[asyncio.Future[Any]] = {running, said, session.broken}
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                if session.broken.done():
                    session.broken.result()
                if not running.done():
                    await asyncio.wait({running}, timeout=LAST_WORDS_S)
        except TimeoutError:
            return LIMIT, f"it was not done within {limit_s:g} s (agent.timeout_s)"
        except asyncio.CancelledError:
            is_lost = True
            raise
        finally:
            ending = running.result() if _has_result(running) else None
            for task in (running, said):
                task.cancel()
            await asyncio.wait({running, said})
            await self.open_sessions.shut(session, is_lost=is_lost)
        if ending is None and running.done() and not running.cancelled():
            running.result()  # raises: it was lost
        return await self._kind(session, ending or Ending())

    async def _kind(self, session: OpenSession, ending: Ending) -> tuple[str, str]:
        """Return kind and detail of an agent's end; a failed last request counts, too."""
        trouble = session.trouble
        if ending.report is not None:
            session.word.last = session.word.outcome(ending.report)
        if session.word.ended.is_set():
            kind, detail = session.word.end
            if kind != AGENT:
                return kind, detail
            ending = Ending(is_failed=True, detail=detail)  # as if its process had said so
        if trouble is not None and trouble.is_limit:
            return LIMIT, trouble.detail
        if ending.is_abandoned and not session.log.is_rewarded:
            return ABANDONED, ending.detail
        if not ending.is_failed:
            return ENDED, ""
        if trouble is not None:
            return INFRASTRUCTURE, f"{trouble.detail}; then: {ending.detail}"
        return AGENT, ending.detail

    async def _judge(self, closed: Closed, prompt: Prompt) -> None:
        """Give the session its reward, or the kind and detail of why it has none."""
        if closed.kind not in JUDGED:
            return
        log = closed.session.log
        try:
            closed.chain = main_chain(log, log.terminal)
        except NoChainError as err:
            closed.kind, closed.detail = AGENT, str(err)
            return
        returned = closed.session.word.last
        own = [one for one in log.standing if one.grader == AGENT]
        if self.by_agent:
            closed.judged = returned or (own[-1] if own else None)
            is_new = returned is not None and returned.outcome_id not in log.outcomes
            closed.outcome = returned if is_new else None
            if closed.judged is None and closed.kind == LIMIT:
                report = Report(reward=0.0, parts={"unfinished": 1.0})
                closed.outcome = closed.judged = closed.session.records.outcome(report, LIMIT)
            if closed.judged is None:
                closed.kind = AGENT
                closed.detail = "it ended, and gave no reward: reward.verifier is 'agent'"
            return
        try:
            judged = await self.verifier.verify(self._sample(closed.chain, prompt))
        except RewardError as err:
            closed.kind, closed.detail = GRADER, str(err)
            return
        report = Report(reward=judged.reward, parts=judged.parts, note=judged.note)
        closed.outcome = closed.judged = closed.session.records.outcome(report, self.verifier_name)

    def _sample(self, chain: Chain, prompt: Prompt) -> AnswerToJudge:
        """The sample for a verifier: the last answer, and all of them."""
        decode = self.open_sessions.shared.tokenizer.decode
        return sample_of_chain(chain, prompt.text, prompt.answer, prompt.metadata, decode)


def _has_result(task: asyncio.Future[Ending]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None

"""A rollout worker whose agents are coroutines of this process, over the in-memory log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from rlstreams.schemas.events import CallCommitted, CallReplayed, SessionClosed, SessionOpened
from rlstreams.streams.log.topics import CALLS
from rlstreams.workers.agents.agent import Ending, SamplePlace, Start
from rlstreams.workers.agents.asking import Runners
from rlstreams.workers.agents.outside import OutsideAgent
from rlstreams.workers.agents.remote import RemoteAgent
from rlstreams.workers.config.agents import AgentSection
from rlstreams.workers.engines.base import Sampling
from rlstreams.workers.gateway.http.dialects import read_again
from rlstreams.workers.gateway.keys import Keys
from rlstreams.workers.gateway.open_sessions import OpenSessions
from rlstreams.workers.gateway.plain import PlainRenderer
from rlstreams.workers.gateway.port import CallAnswer, CallRequest
from rlstreams.workers.gateway.shared import SharedParts
from rlstreams.workers.loop.commit_requests import CommitRequests
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.model.tokenizer import Tokenizer
from rlstreams.workers.rollout.session_player import SessionPlayer
from rlstreams.workers.rollout.sessions import ConfiguredAgent, Sessions
from rlstreams.workers.rollout.worker import make_worker
from rlstreams.workers.sandbox.reward import Verifier
from rlstreams.workers.weights.file import FileWeightChannel
from tests.fake_engine import EOS, FakeEngine
from tests.unit.roles.stand import DEADLINE_S, Stand, length

SECRET = "a secret of this test"


@dataclass
class Client:
    """What an agent of a test is given: it calls without HTTP."""

    open_sessions: OpenSessions
    start: Start
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def call(self, **changes: Any) -> CallAnswer:
        return await self.open_sessions.call(self.start.key, request_of(self.messages, **changes))

    async def say(self, text: str) -> CallAnswer:
        """One more message, and its answer, which is kept as an agent keeps it."""
        self.messages.append({"role": "user", "content": text})
        answer = await self.call()
        self.messages.append({"role": "assistant", "content": answer.parsed.content})
        return answer


def request_of(messages: list[dict[str, Any]], **changes: Any) -> CallRequest:
    values = {"dialect": "chat", "body": b"{}", "messages": tuple(messages)}
    return CallRequest(**{**values, **changes})


Script = Callable[[Client], Awaitable[Ending | None]]


class ScriptedAgent:
    """The port `Agent`: a coroutine."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.open_sessions: OpenSessions | None = None
        self.starts: list[Start] = []

    async def taken(self, place: SamplePlace) -> str:
        """It is started here."""
        return ""

    async def run(self, start: Start) -> Ending:
        self.starts.append(start)
        assert self.open_sessions is not None
        return await self.script(Client(self.open_sessions, start)) or Ending()

    async def close(self) -> None:
        """Nothing to end."""


def worker_of(
    stand: Stand,
    engine: FakeEngine,
    agent: ScriptedAgent | None,
    *,
    by_agent: bool = False,
    sampling: Sampling | None = None,
    commits: CommitRequests | None = None,
    deadline_s: float = DEADLINE_S,
    ordinal: int = 0,
    **section: Any,
) -> StageLoop:
    """
    Args:
        agent: None: a remote one, or one that is outside.
    """
    context = stand.context("rollout", ordinal)
    tokenizer = Tokenizer.load(stand.config.model.path)
    shared = SharedParts(
        engine=engine,
        renderer=PlainRenderer(tokenizer, frozenset({EOS})),
        tokenizer=tokenizer,
        commits=commits or CommitRequests(),
        appender=context.bus.appender(),
        loads=dict,
        read_again=read_again,
        worker=context.worker,
        instance=context.instance,
    )
    open_sessions, keys = OpenSessions(shared, Keys(SECRET), "demo"), Keys(SECRET)
    how = {"remote": not section.get("outside")} if agent is None else {"command": ("none",)}
    settings = AgentSection(**{**how, "timeout_s": DEADLINE_S / 2, **section})
    runners = None
    if agent is None:
        kind = RemoteAgent if settings.remote else OutsideAgent
        away = kind(settings, context.folder / settings.name, max_asking=8)
        runners = Runners([away], keys, stand.config.gateway, context.ordinal)
    else:
        agent.open_sessions = open_sessions
    sessions = Sessions(
        open_sessions=open_sessions,
        runners=runners,
        members=[ConfiguredAgent(section=settings, agent=agent or away, code_hash="")],
        verifier=Verifier(length, require_stop=False),
        verifier_name="length",
        by_agent=by_agent,
        sampling=sampling or Sampling(max_new_tokens=6),
        evaluation=Sampling(max_new_tokens=6, temperature=0.0),
        deadline_s=deadline_s,
        graders=stand.config.outcome.wait_for,
    )
    player = SessionPlayer(sessions, context.bus, stand.config.outcome)
    return make_worker(context, context.bus, engine, FileWeightChannel(), player)


@dataclass
class Recorded:
    """What the log has of sessions."""

    opened: list[SessionOpened]
    calls: list[CallCommitted]
    replays: list[CallReplayed]
    closed: list[SessionClosed]


def recorded(stand: Stand) -> Recorded:
    return Recorded(
        stand.read(CALLS.name, SessionOpened),
        stand.read(CALLS.name, CallCommitted),
        stand.read(CALLS.name, CallReplayed),
        stand.read(CALLS.name, SessionClosed),
    )

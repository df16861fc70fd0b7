"""Whoever dies between two calls of a session: it goes on, and ends with the same tokens."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rlstreams.schemas.events import CallCommitted, OutcomeReported, Trajectory
from rlstreams.streams.log.errors import OutcomeUnknownError
from rlstreams.streams.log.topics import CALLS, OUTCOMES, TRAJECTORIES
from rlstreams.streams.sessions.fold import SessionLog
from rlstreams.streams.sessions.session import sampled_tokens
from rlstreams.workers.agents.agent import LostAgentError
from rlstreams.workers.gateway.port import CallAnswer
from rlstreams.workers.loop.stage import StageLoop
from tests.memory.log import Fault
from tests.unit.roles.sessions_stand import Client, ScriptedAgent, recorded, request_of, worker_of
from tests.unit.roles.stand import Stand, tick_until
from tests.unit.roles.test_turns import EndsTurns

NUM_CALLS = 8
KINDS = (
    "worker",  # the worker dies while the next call is sampled
    "unwritten",  # it dies with a call that is sampled and not in the log
    "unknown",  # it dies with a call that is in the log and not answered
    "aborted",  # a transaction fails, and is sent again
    "agent",  # the agent's process dies behind an answer
)


@dataclass(frozen=True)
class Kill:
    kind: str
    after: int  # so many calls of the session are in the log


class World:
    """A sample, whose agent hears answers in every start; workers come and go."""

    def __init__(self, folder: Path) -> None:
        self.stand = Stand(folder)
        self.stand.publish(0)
        self.stand.issue("0", 1)
        self.heard: dict[str, set[CallAnswer]] = {}
        self.sampled: Counter[str] = Counter()
        self.early: list[str] = []  # calls that the agent heard before they were in the log
        self.agent_dies = False
        self.counted: Mapping[str, float] = {}  # by the worker that closed it

    async def script(self, client: Client) -> None:
        """Says other things by what it hears; asks side by side, and the same thing twice."""
        text = "1"
        for _ in range(4):
            answer = self._hears(await client.say(text))
            text = "10" if "7" in answer.parsed.content else "11"
        ask = {"role": "user", "content": "0"}
        sides = [
            client.open_sessions.call(client.start.key, request_of([ask], retry=0))
            for _ in range(2)
        ]
        for answer in await asyncio.gather(*sides):
            self._hears(answer)
        for _ in range(2):
            self._hears(
                await client.open_sessions.call(client.start.key, request_of([ask], max_tokens=9))
            )

    def _hears(self, answer: CallAnswer) -> CallAnswer:
        said = (answer.parsed, answer.created_s, answer.logprobs, answer.tokens)
        self.heard.setdefault(answer.call_id, set()).add(said)
        if answer.call_id not in self.committed():
            self.early.append(answer.call_id)
        if self.agent_dies:
            self.agent_dies = False
            raise LostAgentError("killed")
        return answer

    def committed(self) -> list[str]:
        return [call.call_id for call in self.stand.read(CALLS.name, CallCommitted)]

    def num_calls(self) -> int:
        return len(self.committed())

    def is_over(self) -> bool:
        return bool(self.stand.read(TRAJECTORIES.name, Trajectory))

    def play(self, kill: Kill | None) -> None:
        """One worker, until it is killed or the sample is done."""
        engine = EndsTurns()
        loop = worker_of(self.stand, engine, ScriptedAgent(self.script), starts=20)
        try:
            self._play(loop, kill)
        finally:
            self.sampled.update(request.sample_id for request in engine.requests)
            self.counted = dict(loop._reporter._counters)
            loop.close()

    def _play(self, loop: StageLoop, kill: Kill | None) -> None:
        def reached() -> bool:
            return self.is_over() or (kill is not None and self.num_calls() >= kill.after)

        tick_until(loop, reached)
        if kill is None or self.is_over():
            return
        if kill.kind in ("unwritten", "unknown"):
            fault = Fault.AFTER if kill.kind == "unknown" else Fault.BEFORE
            self.stand.log.fail_next_append(fault)
        if kill.kind == "aborted":
            self.stand.log.fail_next_commit("demo.rollout.0", Fault.BEFORE)
        if kill.kind == "agent":
            self.agent_dies = True
        if kill.kind != "worker":
            with suppress(OutcomeUnknownError):
                tick_until(loop, self.is_over)

    def tokens(self) -> list[tuple[str, list[int]]]:
        (trajectory,) = self.stand.read(TRAJECTORIES.name, Trajectory)
        return [(s.author, s.token_ids.numpy().tolist()) for s in trajectory.segments]


def played(folder: Path, kills: list[Kill]) -> World:
    world = World(folder)
    for kill in [*kills, None]:
        if not world.is_over():
            world.play(kill)
    return world


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.builds(Kill, kind=st.sampled_from(KINDS), after=st.integers(0, NUM_CALLS)), max_size=5
    )
)
@example([Kill(kind, 3) for kind in KINDS])
@example([Kill("aborted", number) for number in range(4)])
@example([Kill("unknown", 5), Kill("unwritten", 6), Kill("worker", 4)])
def test_kills_between_calls_change_nothing(kills: list[Kill]) -> None:
    """Tokens are those of a run without kills; each call that the agent heard is in the log, once,
    and is heard word for word alike in every start; a kill costs the calls under way at most."""
    with tempfile.TemporaryDirectory() as calm, tempfile.TemporaryDirectory() as folder:
        wanted = played(Path(calm), [])
        world = played(Path(folder), kills)
    assert world.tokens() == wanted.tokens()
    assert [] == world.early  # where a transaction is aborted, its answers wait for the next
    log = recorded(world.stand)
    named = [call.call_id for call in log.calls]
    assert len(named) == len(set(named)) == NUM_CALLS
    assert set(world.heard) == set(named) == set(wanted.heard)
    assert all(len(answers) == 1 for answers in world.heard.values())
    assert sum(world.sampled.values()) - NUM_CALLS <= 2 * len(kills)  # two are under way at most
    assert all(sample.count("/") == 3 for sample in world.sampled)
    assert len(log.closed) == len(world.stand.read(OUTCOMES.name, OutcomeReported)) == 1
    fold = SessionLog()
    assert all(fold.apply(raw) for raw in _all_calls(world))  # none is a copy, late or void
    all_tokens = sum(map(sampled_tokens, log.calls))
    by_path = sum(len(ids) for author, ids in world.tokens() if author == "policy")
    assert world.counted["tokens_off_path"] == all_tokens - by_path > 0
    assert world.counted["tokens"] + world.counted["tokens_replayed"] == all_tokens


def _all_calls(world: World) -> list[object]:
    return world.stand.read(CALLS.name, object)

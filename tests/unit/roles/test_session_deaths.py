"""Sandboxes that die say nothing of the policy: the advantages of all others are those without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rlstreams.schemas.calls import ENVIRONMENT_FAILED
from rlstreams.schemas.events import DeadLetter, Trajectory
from rlstreams.streams.log.topics import DEAD_LETTERS, TRAJECTORIES
from rlstreams.workers.agents.agent import Ending
from rlstreams.workers.gateway.port import Report
from rlstreams.workers.trainer.learn.advantage import group_advantages
from tests.unit.roles.sessions_stand import Client, ScriptedAgent, worker_of
from tests.unit.roles.stand import Stand, tick_until
from tests.unit.roles.test_turns import EndsTurns

GROUPS, SIZE = 5, 8
EVERY = 10  # one sandbox of so many dies


def reward_of(session: str) -> float:
    group, _, sample = session.partition("/")
    return (3 * int(group) + 5 * int(sample)) % 8 / 8


def dies(session: str) -> bool:
    group, _, sample = session.partition("/")
    return (SIZE * int(group) + int(sample)) % EVERY == EVERY - 1


def played(folder: Path, *, has_deaths: bool) -> tuple[dict[str, Trajectory], list[DeadLetter]]:
    """Trajectories by session, and letters."""
    stand = Stand(folder)
    stand.publish(0)
    for group in range(GROUPS):
        stand.issue(str(group), SIZE)

    async def works(client: Client) -> Ending | None:
        session = client.start.session_id
        await client.say("1" + "0" * int(session[-1]))
        if has_deaths and dies(session):
            open_sessions, key = client.open_sessions, client.start.key
            await open_sessions.close(key, ENVIRONMENT_FAILED, "the sandbox died")
            return None
        return Ending(report=Report(reward=reward_of(session)))

    loop = worker_of(stand, EndsTurns(), ScriptedAgent(works), by_agent=True)
    found: dict[str, Trajectory] = {}
    letters: list[DeadLetter] = []

    def is_over() -> bool:
        nonlocal letters
        read = stand.read(TRAJECTORIES.name, Trajectory)
        found.update({f"{one.group_id}/{one.sample}": one for one in read})
        letters = stand.read(DEAD_LETTERS.name, DeadLetter)
        return len(found) + len(letters) == GROUPS * SIZE

    tick_until(loop, is_over)
    loop.close()
    return found, letters


def advantages(rewards: Mapping[str, float]) -> dict[str, float]:
    groups = [session.partition("/")[0] for session in rewards]
    found = group_advantages([*rewards.values()], groups).tolist()
    return dict(zip(rewards, found, strict=True))


def test_sandboxes_that_die_do_not_bend_advantages(tmp_path: Path) -> None:
    """As if these samples had never been issued; a run that books them as zeros is shown beside."""
    calm, _ = played(tmp_path / "calm", has_deaths=False)
    left, letters = played(tmp_path / "deaths", has_deaths=True)
    dead = {session for session in calm if dies(session)}
    assert len(dead) == GROUPS * SIZE // EVERY
    assert {(f"{one.group_id}/{one.sample}", one.reason) for one in letters} == {
        (session, "environment") for session in dead
    }
    assert left.keys() == calm.keys() - dead
    for session, one in left.items():
        said = [part.token_ids.numpy().tolist() for part in one.segments]
        assert said == [part.token_ids.numpy().tolist() for part in calm[session].segments]
    without = {session: one.reward for session, one in calm.items() if session not in dead}
    kept = advantages({session: left[session].reward for session in without})
    assert kept == advantages(without)
    zeros = advantages({session: without.get(session, 0.0) for session in calm})
    struck = {session.partition("/")[0] for session in dead}
    bias = [zeros[session] - kept[session] for session in kept if session[0] in struck]
    assert np.mean(bias) > 0.05, "a zero for the sandbox praises all of its siblings"

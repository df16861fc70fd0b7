"""What an agent says of its own session: which of its rewards is the sample's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlstreams.workers.agents.agent import Ending, LostAgentError
from rlstreams.workers.gateway.port import CallRefusedError, Report
from tests.unit.roles.sessions_stand import Client
from tests.unit.roles.test_sessions import Ended


async def says(client: Client, reward: float, **more: object) -> str:
    report = Report(reward=reward, **more)  # type: ignore[arg-type]
    return await client.open_sessions.report(client.start.key, report)


def test_the_reward_is_what_was_said_last(tmp_path: Path) -> None:
    """Also where the same was said before; only the repetition of the last word is the same."""
    ids: list[str] = []

    async def wavers(client: Client) -> None:
        await client.say("1")
        ids.extend([await says(client, reward) for reward in (1.0, 0.0, 1.0, 1.0)])

    ended = Ended(tmp_path, wavers, by_agent=True)
    assert [ids[2]] == [ids[3]] != [ids[0]]
    assert [one.reward for one in ended.outcomes] == [1.0, 0.0, 1.0]
    assert ended.trajectories[0].reward == 1.0


@pytest.mark.parametrize("name", ["", "mine"])
@pytest.mark.parametrize(
    ("again", "wanted"),
    [((0.0,), 0.0), ((0.0, 1.0), 1.0), ((1.0,), 1.0), ((), None)],
    ids=["less", "the same", "the last", "nothing"],
)
def test_what_a_lost_start_said_is_not_the_next_ones_word(
    tmp_path: Path, again: tuple[float, ...], wanted: float | None, name: str
) -> None:
    """It forked: the reward of the work that was lost is no reward of its own."""
    starts: list[int] = []

    async def forks(client: Client) -> None:
        starts.append(len(starts))
        await client.say(str(len(starts)))
        for number, reward in enumerate((0.0, 1.0) if len(starts) == 1 else again):
            await says(client, reward, outcome_id=name and f"{name}{number}")
        if len(starts) == 1:
            raise LostAgentError("its process ended")

    ended = Ended(tmp_path, forks, by_agent=True)
    rewards = [one.reward for one in ended.trajectories]
    assert rewards == ([] if wanted is None else [wanted])
    assert [one.reason for one in ended.letters] == ["agent"] * (wanted is None)
    assert [one.start for one in ended.outcomes] == [0, 0, *[1] * len(again)]


def test_a_returned_reward_is_in_the_log_behind_those_that_were_posted(tmp_path: Path) -> None:
    async def returns(client: Client) -> Ending:
        await client.say("1")
        for reward in (1.0, 0.0):
            await says(client, reward)
        return Ending(report=Report(reward=1.0))

    ended = Ended(tmp_path, returns, by_agent=True)
    assert [one.reward for one in ended.outcomes] == [1.0, 0.0, 1.0]
    assert ended.trajectories[0].reward == 1.0


async def _reuses(client: Client) -> None:
    assert "a" == await says(client, 1.0, outcome_id="a")
    assert "a" == await says(client, 1.0, outcome_id="a")
    await says(client, 0.5, outcome_id="a")


async def _replaces_nothing(client: Client) -> None:
    await says(client, 0.5, supersedes="b")


@pytest.mark.parametrize(
    ("does", "param"), [(_reuses, "outcome_id"), (_replaces_nothing, "supersedes")]
)
def test_a_word_that_would_be_lost_is_refused(
    tmp_path: Path, does: Callable[[Client], object], param: str
) -> None:
    """It was answered as if it counted."""
    refused: list[CallRefusedError] = []

    async def script(client: Client) -> None:
        await client.say("1")
        first = await says(client, 0.25)
        with pytest.raises(CallRefusedError) as caught:
            await does(client)  # type: ignore[misc]
        refused.append(caught.value)
        await says(client, 1.0, supersedes=first)

    ended = Ended(tmp_path, script, by_agent=True)
    assert [(one.status, one.param) for one in refused] == [(400, param)]
    assert ended.trajectories[0].reward == 1.0

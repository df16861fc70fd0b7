"""Places of an outside agent whose partition goes to another worker, and comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rlstreams.workers.agents.agent import Ending, SamplePlace, Start
from rlstreams.workers.agents.outside import OutsideAgent
from rlstreams.workers.config.agents import AgentSection

WAIT_S = 5.0
LEASE_S = 0.1


def agent_in(folder: Path, lease_s: float) -> OutsideAgent:
    return OutsideAgent(AgentSection(name="own", outside=True, lease_s=lease_s), folder)


def place(group_id: str, sample: int, client_group: str = "", size: int = 2) -> SamplePlace:
    return SamplePlace(
        session_id=f"{group_id}/{sample}",
        group_id=group_id,
        group_size=size,
        client_group=client_group,
    )


def start(group_id: str, sample: int) -> Start:
    return Start(session_id=f"{group_id}/{sample}", task={}, url="", key="k")


async def lose(*tasks: asyncio.Task[object]) -> None:
    """What becomes of a partition's sessions when another worker gets it."""
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def begun(agent: OutsideAgent, group_id: str, client_group: str) -> asyncio.Task[Ending]:
    """The client group's session in sample 0 of the group."""
    waiting = asyncio.create_task(agent.taken(place(group_id, 0)))
    asking = asyncio.create_task(agent.ask(WAIT_S, client_group))
    assert client_group == await waiting
    running = asyncio.create_task(agent.run(start(group_id, 0)))
    given = await asking
    assert given is not None
    assert f"{group_id}/0" == given["session"]
    return running


async def test_a_client_whose_group_went_away_gets_a_place_of_another(tmp_path: Path) -> None:
    """Its siblings' places are another worker's now: it does not wait for them here for ever."""
    agent = agent_in(tmp_path, LEASE_S)
    running = await begun(agent, "moved", "mine")
    await lose(running, asyncio.create_task(agent.taken(place("moved", 1))))
    waiting = asyncio.create_task(agent.taken(place("here", 0)))
    await asyncio.sleep(2 * LEASE_S)
    asking = asyncio.create_task(agent.ask(WAIT_S, "mine"))
    assert "mine" == await asyncio.wait_for(waiting, WAIT_S)
    await lose(asking)


async def test_a_client_waits_for_its_siblings_places_meanwhile(tmp_path: Path) -> None:
    """The worker may be full: a place of another group is not for who has one of its own."""
    agent = agent_in(tmp_path, WAIT_S)
    running = await begun(agent, "own", "mine")
    other = asyncio.create_task(agent.taken(place("other", 0)))
    asking = asyncio.create_task(agent.ask(WAIT_S, "mine"))
    assert "mine" == await agent.taken(place("own", 1))
    assert not other.done()
    await lose(running, other, asking)


async def test_a_session_that_comes_back_is_run_once_more(tmp_path: Path) -> None:
    """It was not over when its partition went, though it ended here."""
    agent = agent_in(tmp_path, WAIT_S)
    alone = place("back", 0, size=1)
    waiting = asyncio.create_task(agent.taken(alone))
    asking = asyncio.create_task(agent.ask(WAIT_S, "mine"))
    assert "mine" == await waiting
    running = asyncio.create_task(agent.run(start("back", 0)))
    await asking
    await lose(running)
    assert "mine" == await agent.taken(place("back", 0, "mine", size=1))
    assert "others" == await agent.taken(place("other", 0, "others"))  # forgets what is over
    again = start("back", 0)
    again.ended.set()
    assert Ending() == await agent.run(again)

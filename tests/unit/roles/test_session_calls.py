"""Calls of a session in the rollout role: experts of the engine, and when it takes no more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from rlstreams.schemas.events import CallFailed
from rlstreams.streams.log.topics import CALLS
from rlstreams.workers.gateway.port import CallRefusedError
from rlstreams.workers.gateway.shared import BUSY_S, CALLS_PER_SLOT
from tests.fake_engine import NUM_EXPERTS
from tests.unit.roles.sessions_stand import Client, recorded
from tests.unit.roles.test_sessions import Ended, three_turns


def test_routed_experts_of_calls_are_those_of_the_sample(tmp_path: Path) -> None:
    """A call records the rows behind its parent alone; together they are what the engine gave."""
    ended = Ended(tmp_path, three_turns)
    (trajectory,), calls = ended.trajectories, recorded(ended.stand).calls
    assert [call.routed_experts_start > 0 for call in calls] == [False, True, True]
    whole = np.concatenate([s.token_ids.numpy() for s in trajectory.segments])
    experts = trajectory.routed_experts
    assert experts is not None
    rows = experts.numpy()
    assert len(rows) == len(whole) - 1  # the last token was passed by nobody
    wanted = np.stack([whole, whole + 1], -1)[: len(rows), None] % NUM_EXPERTS
    assert rows.tolist() == wanted.tolist()
    assert trajectory.routed_experts_mask is None


def test_more_calls_than_the_engine_takes_are_told_when_to_come_again(tmp_path: Path) -> None:
    """Their try is no call, and no record; sent again it is sampled."""
    refused: list[CallRefusedError] = []

    async def crowds(client: Client) -> None:
        most = CALLS_PER_SLOT * client.keeper.shared.engine.capacity
        client.messages = [{"role": "user", "content": "1"}]
        calls = [client.call(choice=number) for number in range(most + 1)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused.extend(one for one in answers if isinstance(one, CallRefusedError))
        await client.call(choice=most, retry=1)

    ended = Ended(tmp_path, crowds)
    assert [(one.status, one.retry_after_s) for one in refused] == [(429, BUSY_S)]
    log = recorded(ended.stand)
    assert len(log.calls) == len({call.call_id for call in log.calls}) > 1
    assert len(ended.engine.requests) == len(log.calls)
    assert not ended.stand.read(CALLS.name, CallFailed)

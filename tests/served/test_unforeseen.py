"""A pull that fails of something nobody expected leaves no paused server behind an open gate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.file import FileWeightChannel
from tests.contract.engine_rigs import collect, request
from tests.served.test_gate import until_passed_by
from tests.servers.fake_server import VERSIONS
from tests.servers.world import World

UNREADABLE = {
    "no memory in torch": RuntimeError("can't allocate memory"),
    "no memory in Python": MemoryError(),
    "a network file system that went away": OSError(116, "Stale file handle"),
}


class BrokenChannel(FileWeightChannel):
    """Whoever pulls from it meets the error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def pull(
        self, published: PolicyPublished, deadline_s: float
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing comes."""
        raise self._error


@pytest.mark.parametrize("flavour", VERSIONS)
@pytest.mark.parametrize("error", UNREADABLE.values(), ids=UNREADABLE)
async def test_what_cannot_be_read_leaves_the_old_version_in_service(
    world: World, flavour: str, error: Exception
) -> None:
    """The server was not touched: it goes on."""
    server = world.serve(flavour)
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        with pytest.raises(WeightError, match="policy version 1 cannot be read"):
            await engine.pull(world.publish(1), BrokenChannel(error))
        assert 0 == engine.policy_version
        assert not server.core.paused
        assert {0} == {s.policy_version for s in await collect(engine, request())}


@pytest.mark.parametrize("flavour", VERSIONS)
async def test_what_nobody_foresaw_shuts_the_server_until_a_pull_succeeds(
    world: World, flavour: str
) -> None:
    """Its weights may be damaged, for all that is known."""
    server = world.serve(flavour)
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        with pytest.raises(WeightError, match=r"policy version 1: ZeroDivisionError\('by what'\)"):
            await engine.pull(world.publish(1), BrokenChannel(ZeroDivisionError("by what")))
        assert -1 == engine.policy_version
        early = asyncio.create_task(collect(engine, request()))
        await until_passed_by(engine, server)
        await engine.pull(world.publish(1), world.channel)
        assert {1} == {s.policy_version for s in await early}

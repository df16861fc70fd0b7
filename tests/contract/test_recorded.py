"""A recording answers as the server did, and nothing that it was not asked when it was made.

`tests/gpu/engine_contract.py --record` makes recordings of real servers. None is there yet: what is
held here is the mechanism, against the stand-in server.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.contract.engine_rigs import collect, request
from tests.servers.recorded import Recorder, Replay
from tests.servers.scenario import exercise
from tests.servers.served import engine_of_urls
from tests.servers.world import World
from workers.engines.base import EngineError


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """What the scenario makes of a stand-in SGLang."""
    world = World(tmp_path)
    recorder = Recorder(world.serve("sglang-0.5.17").url, tmp_path / "r.jsonl", "sglang/0.5.17")
    seen = asyncio.run(_exercise(recorder.url, tmp_path, world))
    recorder.close()
    world.close()
    (tmp_path / "seen.txt").write_text("\n".join(seen))
    return tmp_path / "r.jsonl"


async def _exercise(url: str, folder: Path, world: World) -> list[str]:
    engine = engine_of_urls("sglang", [url], folder)
    await engine.start()
    try:
        versions = (world.publish(0), world.publish(1))
        return await exercise(engine, versions, world.channel)
    finally:
        await engine.close()


def test_a_replay_is_the_server_again(recording: Path, tmp_path: Path) -> None:
    """The same scenario sees the same, and nothing is asked that was not recorded."""
    replay = Replay(recording)
    seen = asyncio.run(_exercise(replay.url, tmp_path, World(tmp_path)))
    replay.close()
    assert (tmp_path / "seen.txt").read_text().splitlines() == seen
    assert len(seen) == 2 * (1 + 3 * 2) + 1
    assert replay.unrecorded == []


def test_what_was_never_recorded_fails(recording: Path, tmp_path: Path) -> None:
    """A request that differs in one field is named."""
    replay = Replay(recording)

    async def scenario() -> None:
        world = World(tmp_path)
        engine = engine_of_urls("sglang", [replay.url], tmp_path)
        await engine.start()
        await engine.pull(world.publish(0), world.channel)
        with pytest.raises(EngineError, match="never recorded"):
            await collect(engine, request(max_new_tokens=7))
        await engine.close()

    asyncio.run(scenario())
    replay.close()
    assert len(replay.unrecorded) == 1

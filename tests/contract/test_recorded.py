"""A recording answers as the server did, and nothing that it was not asked when it was made.

`tests/gpu/engine_contract.py --record` makes recordings of real servers; they belong beside this
file, into `recordings/`, and every one there is held here, beside the mechanism, which is held
against the stand-in servers.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rlstreams.workers.model.base import EngineError
from tests.contract.engine_rigs import collect, request
from tests.servers.recorded import Recorder, Replay
from tests.servers.replayed import NoWeights, engine_of, head_of, replay
from tests.servers.scenario import exercise
from tests.servers.served import engine_of_urls, model_folder
from tests.servers.world import World

STAND_INS = ("sglang-0.5.17", "sglang-0.5.23", "vllm-0.32.0")
RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.jsonl"))


def record(folder: Path, flavour: str) -> Path:
    """What the scenario makes of a stand-in, written as the GPU script writes it."""
    world, file = World(folder), folder / "recording.jsonl"
    versions = (world.publish(0), world.publish(1))
    name = flavour.replace("-", "/")
    head = head_of(name, model_folder(folder), True, versions)
    recorder = Recorder(world.serve(flavour).url, file, head)

    async def main() -> None:
        engine = engine_of_urls(name.partition("/")[0], [recorder.url], folder)
        await engine.start()
        recorder.finish(await exercise(engine, versions, world.channel))
        await engine.close()

    asyncio.run(main())
    recorder.close()
    world.close()
    return file


@pytest.mark.parametrize("source", [*STAND_INS, *RECORDINGS], ids=str)
def test_a_replay_is_the_server_again(tmp_path: Path, source: str | Path) -> None:
    """The same scenario sees the same, without the server, its weights or its folders."""
    file = source if isinstance(source, Path) else record(tmp_path / "there", source)
    replayed = replay(file, tmp_path / "here")
    assert replayed.recorded == replayed.seen
    assert 2 * (1 + 3 * 2) + 1 == len(replayed.seen)
    assert [] == replayed.unrecorded


def test_what_was_never_recorded_fails(tmp_path: Path) -> None:
    """A request that differs in one field is answered with 500, and named."""
    stand_in = Replay(record(tmp_path / "there", "sglang-0.5.17"))
    engine, versions = engine_of(stand_in, tmp_path / "here")

    async def scenario() -> None:
        await engine.start()
        await engine.pull(versions[0], NoWeights())
        with pytest.raises(EngineError, match="never recorded"):
            await collect(engine, request(max_new_tokens=7))
        await engine.close()

    asyncio.run(scenario())
    stand_in.close()
    (asked,) = stand_in.unrecorded
    assert ["POST", "/generate"] == json.loads(asked)[:2]


def test_a_recording_that_breaks_off_is_no_recording(tmp_path: Path) -> None:
    """The script was ended in the middle: what is missing would look like a server's silence."""
    file = record(tmp_path, "sglang-0.5.17")
    file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(AssertionError, match="its scenario was not finished"):
        Replay(file)

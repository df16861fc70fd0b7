"""What a call costs in a dialogue that is sent again with each turn, as agents do.

    python tests/bench/agent_turns.py [--sessions 16] [--turns 20] [--save]

The figure is the CPU of the thread that gateway, engine and agents share, from the bytes of a body
to the answer, without HTTP; `of_the_engine` is what the engine takes of it for the same answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlstreams.workers.engines.base import SampleRequest
from rlstreams.workers.engines.thread import EngineThread
from rlstreams.workers.engines.turn import whole_turn
from rlstreams.workers.gateway.http.chat import Chat
from rlstreams.workers.weights.file import FileWeightChannel
from tests.bench.agent_calls import LIMIT_S, TimedEngine, drive
from tests.bench.hardware import hardware
from tests.unit.roles.sessions_stand import Client, ScriptedAgent, worker_of
from tests.unit.roles.stand import Stand


class Turns:
    """Dialogues of so many turns, as fast as they go."""

    def __init__(self, num: int, turns: int) -> None:
        self._num, self._turns = num, turns
        self._begun_s = self._ended_s = 0.0  # of the CPU of the loop's thread
        self._left = num

    async def _works(self, client: Client) -> None:
        self._begun_s = self._begun_s or time.thread_time()
        for number in range(self._turns):
            client.messages.append({"role": "user", "content": "1010" * 250 + "1" * number})
            body = json.dumps({"model": "m", "messages": client.messages}).encode()
            (asked,) = Chat().asked(body, {}).calls
            answer = await client.open_sessions.call(client.start.key, asked)
            client.messages.append({"role": "assistant", "content": answer.parsed.content})
        self._left -= 1
        if not self._left:
            self._ended_s = time.thread_time()

    def measured(self, stand: Stand) -> dict[str, Any]:
        """
        Args:
            stand: any; what its log costs is on other threads.
        """
        engine = TimedEngine(self._num)
        engine.max_tokens = 100_000
        stand.issue(f"{time.monotonic_ns()}", self._num)
        loop = worker_of(stand, engine, ScriptedAgent(self._works), max_calls=1000)
        drive(loop, lambda: self._left == 0)
        asked = list(engine.requests)
        loop.close()
        calls = self._num * self._turns
        return {
            "how": "turns",
            "sessions": self._num,
            "turns": self._turns,
            "calls": len(asked),
            "cpu_ms_per_call": round(1000 * (self._ended_s - self._begun_s) / calls, 2),
            "of_the_engine": round(1000 * _engine_cpu_s(stand, asked) / calls, 2),
            "load_average": round(os.getloadavg()[0], 1),
        }


def _engine_cpu_s(stand: Stand, asked: Sequence[SampleRequest]) -> float:
    """The CPU of the thread for these requests alone, as many at once."""
    engine, thread = TimedEngine(16), EngineThread()
    engine.max_tokens = 100_000
    thread.submit(engine.pull(stand.publish(0, announce=False), FileWeightChannel())).result(60)

    async def all_of_them() -> float:
        begun_s = time.thread_time()
        for at in range(0, len(asked), 16):
            await asyncio.gather(*(whole_turn(engine, one) for one in asked[at : at + 16]))
        return time.thread_time() - begun_s

    took_s = thread.submit(all_of_them()).result(LIMIT_S)
    thread.submit(engine.close()).result(LIMIT_S)
    thread.close()
    return took_s


def of_turns(sessions: int, turns: int) -> dict[str, Any]:
    """Over a log in memory: threads of the broker's client would change no figure of it."""
    with tempfile.TemporaryDirectory() as folder:
        stand = Stand(Path(folder))
        stand.publish(0)
        Turns(4, 5).measured(stand)  # what is imported and compiled at the first call
        return Turns(sessions, turns).measured(stand)


def main() -> None:
    """Measure, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    started = hardware()
    row = of_turns(args.sessions, args.turns)
    print(json.dumps(row))  # noqa: T201
    if args.save:
        file = Path(__file__).with_name("results") / f"agent_turns-{time.strftime('%Y-%m-%d')}.json"
        result = {"hardware": started, "rows": [row]}
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

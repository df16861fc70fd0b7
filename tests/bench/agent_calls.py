"""What it costs that a call is in the log before it is answered, and what that saves after a kill.

    python tests/bench/agent_calls.py [--seconds 10] [--workers 2] [--save]

One rollout worker, one broker of one node, agents that are coroutines. Overhead is the time of a
call less what the engine itself took for it, so the engine (a table in memory) does not matter.
Rows: calls at a steady rate, each session waiting for its next tick, whatever came before; and as
many as go. `direct` calls the sessions in the process, `http` is a client of the gateway in a
thread of its own. Each record carries a request of 12 kB that zstd cannot shrink. `cpu_ms` is CPU
of a call by thread: the gateway (with sessions and agents), the role, the table that stands for an
engine, the client of HTTP, all others (Kafka's client), and the broker. Each row is a run of its
own: a worker that starts reads what its log holds of calls. Nobody else reads them meanwhile.

With `--workers N` only CPU is measured, over logs in memory, for which no broker is started: of one
worker, and of N side by side, each a process with a gateway of its own.

The last row kills a worker in turn 8 of 10 of each session, and counts the calls that the next one
samples again; without the log that is all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp
import numpy as np
import torch

from rlstreams.schemas.events import CallCommitted, SessionClosed
from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.record import RawRecord
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import CALLS, TRAJECTORIES
from rlstreams.workers.engines.base import SampleRequest, Sampling
from rlstreams.workers.engines.thread import EngineThread
from rlstreams.workers.engines.turn import whole_turn
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.weights.file import FileWeightChannel
from tests.bench.hardware import Cpu, hardware
from tests.unit.roles.sessions_stand import Client, ScriptedAgent, request_of, worker_of
from tests.unit.roles.stand import Stand
from tests.unit.roles.test_turns import EndsTurns

SLOTS = 64
BODY_BYTES = 12_000
RATES = (100, 500)  # calls a second
LIMIT_S = 120.0
WARM_UP = 200  # calls that the broker's compiler sees first


Call = Callable[[Client, int], Awaitable[str]]  # the id of the call


class TimedEngine(EndsTurns):
    """Knows how long it took for each call."""

    def __init__(self, slots: int = SLOTS) -> None:
        super().__init__()
        torch.set_num_threads(1)  # as roles do: further ones would spin beside the gateway
        self.capacity = self.max_capacity = slots
        self.took_s: dict[str, float] = {}

    async def generate(self, request: Any) -> Any:
        begun_s = time.perf_counter()
        async for segment in super().generate(request):
            yield segment
        self.took_s[request.sample_id.split("/")[2]] = time.perf_counter() - begun_s


class OnBroker(Stand):
    """A stand whose log is on a broker."""

    def __init__(self, bootstrap: str, run: str, folder: Path) -> None:
        self._of_broker = (bootstrap, run)
        apply(bootstrap, run, TopicPlan(rollout_workers=1, logprob_workers=1))
        super().__init__(folder)

    def bus(self) -> Bus:
        return KafkaBus(*self._of_broker)


def drive(loop: StageLoop, done: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not done():
        loop.tick()
        if time.monotonic() > until_s:
            raise TimeoutError(f"not done within {LIMIT_S:g} s")


def body(number: int) -> bytes:
    noise = base64.b64encode(os.urandom(BODY_BYTES * 3 // 4)).decode()
    return json.dumps({"number": number, "noise": noise}).encode()


async def direct(client: Client, number: int) -> str:
    request = request_of([{"role": "user", "content": "1"}], choice=number, body=body(number))
    return (await client.open_sessions.call(client.start.key, request)).call_id


class HttpClient:
    """In a thread of its own, so that its CPU is apart."""

    def __init__(self) -> None:
        self._thread = EngineThread("client")
        self._session: aiohttp.ClientSession | None = None

    async def call(self, client: Client, number: int) -> str:
        """The id of a call over HTTP."""
        return await asyncio.wrap_future(self._thread.submit(self._call(client, number)))

    async def _call(self, client: Client, number: int) -> str:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        messages = [{"role": "user", "content": "1"}]
        noise = json.loads(body(number))["noise"]
        sent = {"model": "m", "messages": messages, "max_tokens": 1000 + number, "user": noise}
        async with self._session.post(
            f"{client.start.url}/v1/chat/completions",
            json=sent,
            headers={"authorization": f"Bearer {client.start.key}"},
        ) as answer:
            said = await answer.json()
            assert answer.status == 200, said
            return str(said["id"]).rpartition("-")[2]

    def close(self) -> None:
        """End the thread."""
        if self._session is not None:
            self._thread.submit(self._session.close()).result(LIMIT_S)
        self._thread.close()


class Row:
    """Sessions that call at a rate for a while."""

    def __init__(self, stand: Stand, how: str, rate: float, seconds: float, broker: int) -> None:
        self._broker = broker
        self.took_s: list[tuple[str, float]] = []
        self.begun_s = self.ended_s = 0.0
        self._stand, self._how, self._rate, self._seconds = stand, how, rate, seconds
        self._http = HttpClient() if how == "http" else None

    def measured(self) -> dict[str, Any]:
        engine, num = TimedEngine(), SLOTS
        group = f"{time.monotonic_ns()}"
        self._stand.issue(group, num)
        agent = ScriptedAgent(lambda client: self._session(client, num))
        loop = worker_of(self._stand, engine, agent, max_calls=1_000_000)
        closed: list[RawRecord] = []
        reader = self._stand.bus().reader(self._stand.bus().ends(TRAJECTORIES.name))

        def is_done() -> bool:
            closed.extend(reader.poll(1000, 0.0))  # committed with their sessions' closes
            return len(closed) == num

        cpu = Cpu(self._broker)
        drive(loop, is_done)
        parts = cpu.ms_per_call(len(self.took_s))
        reader.close()
        loop.close()
        if self._http is not None:
            self._http.close()
        over_ms = sorted(1000 * (took - engine.took_s[name]) for name, took in self.took_s)
        span_s = self.ended_s - self.begun_s
        return {
            "how": self._how,
            "wanted_per_s": self._rate or "as many as go",
            "sessions": num,
            "calls": len(over_ms),
            "calls_per_s": round(len(over_ms) / span_s, 1),
            "overhead_p50_ms": round(statistics.median(over_ms), 2),
            "overhead_p99_ms": round(over_ms[int(0.99 * (len(over_ms) - 1))], 2),
            "cpu_ms": parts,
            "engine_p50_ms": round(1000 * statistics.median(engine.took_s.values()), 2),
            "load_average": round(os.getloadavg()[0], 1),
        }

    async def _bare(self, engine: TimedEngine, place: int) -> None:
        """The engine's own part: the same requests, one after the other."""
        number = 0
        while time.perf_counter() < self.begun_s + self._seconds:
            named = f"{place}-{number}"
            ids = np.array([1, 5], np.int32)
            await whole_turn(
                engine,
                SampleRequest(
                    sample_id=f"0/{place}/{named}/0",
                    group_id="0",
                    token_ids=ids,
                    prompt_tokens=2,
                    sampling=Sampling(max_new_tokens=6),
                    seed=0,
                ),
            )
            self.took_s.append((named, 0.0))
            number += 1

    def bare(self) -> dict[str, Any]:
        """The engine alone, as many at once."""
        engine, thread = TimedEngine(), EngineThread()
        stand = self._stand
        published = stand.publish(0, announce=False)
        thread.submit(engine.pull(published, FileWeightChannel())).result(LIMIT_S)
        self.begun_s = time.perf_counter()
        begun_cpu_s = time.process_time()
        futures = [thread.submit(self._bare(engine, place)) for place in range(SLOTS)]
        for future in futures:
            future.result(LIMIT_S)
        cpu_s, span_s = time.process_time() - begun_cpu_s, time.perf_counter() - self.begun_s
        thread.submit(engine.close()).result(LIMIT_S)
        thread.close()
        return {
            "how": "bare engine",
            "sessions": SLOTS,
            "calls": len(self.took_s),
            "calls_per_s": round(len(self.took_s) / span_s, 1),
            "cpu_ms_per_call": round(1000 * cpu_s / len(self.took_s), 2),
            "engine_p50_ms": round(1000 * statistics.median(engine.took_s.values()), 2),
            "load_average": round(os.getloadavg()[0], 1),
        }

    async def _session(self, client: Client, num: int) -> None:
        call: Call = direct if self._http is None else self._http.call
        place = int(client.start.session_id.rpartition("/")[2])
        every_s = num / self._rate if self._rate else 0.0
        self.begun_s = self.begun_s or time.perf_counter()
        begun_s = time.perf_counter() + every_s * place / num
        number = 0
        while (at_s := begun_s + number * every_s) < self.begun_s + self._seconds or not every_s:
            if (wait_s := at_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            sent_s = time.perf_counter()
            if sent_s > self.begun_s + self._seconds:
                break
            named = await call(client, number)
            self.ended_s = time.perf_counter()
            self.took_s.append((named, self.ended_s - sent_s))
            number += 1


async def _opened(gate: list[bool]) -> None:
    while not gate:  # noqa: ASYNC110  (another thread opens it)
        await asyncio.sleep(0.01)


def saved(stand: OnBroker, num: int = 8, turns: int = 10, killed_in: int = 8) -> dict[str, Any]:
    """A worker is killed while each of its sessions is in turn `killed_in`."""
    gate: list[bool] = []

    async def works(client: Client) -> None:
        for number in range(turns):
            if number == killed_in - 1:
                await asyncio.wait_for(_opened(gate), LIMIT_S)
            await direct(client, number)

    group = f"{time.monotonic_ns()}"
    stand.issue(group, num)
    engines = [TimedEngine(), TimedEngine()]
    first = worker_of(stand, engines[0], ScriptedAgent(works), max_calls=100)
    reader = stand.bus().reader(stand.bus().ends(CALLS.name))
    calls: list[CallCommitted] = []
    closed: list[SessionClosed] = []

    def read() -> None:
        for raw in reader.poll(1000, 0.0):
            event = decoded(raw).event
            calls.extend([event] if isinstance(event, CallCommitted) else [])
            closed.extend([event] if isinstance(event, SessionClosed) else [])

    def reached(count: int) -> bool:
        read()
        return len(calls) >= count

    drive(first, lambda: reached(num * (killed_in - 1)))
    gate.append(True)
    while len(engines[0].requests) < num * killed_in:  # sampled; some of them are in the log
        time.sleep(0.005)
    first.close()  # without its last transaction: what the next one finds is as of SIGKILL
    begun_s = time.perf_counter()
    second = worker_of(stand, engines[1], ScriptedAgent(works), max_calls=100)
    drive(second, lambda: reached(num * turns) and len(closed) == num)
    second.close()
    sampled = [len(engine.requests) for engine in engines]
    again = sum(sampled) - num * turns
    return {
        "sessions": num,
        "turns": turns,
        "killed_in_turn": killed_in,
        "calls_sampled_before": sampled[0],
        "calls_sampled_again": again,
        "again_per_session": again / num,
        "without_the_log": num * killed_in,
        "saved_share": round(1 - again / (num * killed_in), 3),
        "seconds_to_the_end": round(time.perf_counter() - begun_s, 2),
    }


def one_of(seconds: float) -> dict[str, Any]:
    """The `http` row of one worker over a log in memory."""
    with tempfile.TemporaryDirectory() as folder:
        stand = Stand(Path(folder))
        stand.publish(0)
        Row(stand, "http", 0, WARM_UP / 100, 0).measured()
        return Row(stand, "http", 0, seconds, 0).measured()


def side_by_side(num: int, seconds: float) -> list[dict[str, Any]]:
    """As many calls as go, by one worker, and by `num` in processes of their own."""
    found = []
    for workers in (1, num):
        command = [sys.executable, __file__, "--seconds", str(seconds), "--one"]
        shares = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for _ in range(workers)
        ]
        for share in shares:
            said, _ = share.communicate(timeout=LIMIT_S + seconds)
            found.append({"workers": workers} | json.loads(said.splitlines()[-1]))
    return found


def save(name: str, result: dict[str, Any]) -> None:
    """Write a result beside the others."""
    file = Path(__file__).with_name("results") / f"{name}-{time.strftime('%Y-%m-%d')}.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--one", action="store_true", help="a worker of --workers")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one_of(args.seconds)))  # noqa: T201
        return
    started = hardware()
    if args.workers:
        found = {"hardware": started, "rows": side_by_side(args.workers, args.seconds)}
        print(json.dumps(found, indent=1))  # noqa: T201
        if args.save:
            save("agent_cpu", found)
        return
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        state = broker.start()
        bootstrap, pid = state.bootstrap, state.pid
        try:

            def made(name: str) -> OnBroker:
                stand = OnBroker(bootstrap, name, Path(folder) / name)
                stand.publish(0)
                return stand

            Row(made("warm-up"), "direct", 0, WARM_UP / 100, pid).measured()
            rows = [Row(made("bare"), "bare", 0, args.seconds, pid).bare()]
            rows += [
                Row(made(f"{how}-{rate}"), how, rate, args.seconds, pid).measured()
                for how in ("direct", "http")
                for rate in (*RATES, 0)
            ]
            for row in rows:
                print(json.dumps(row))  # noqa: T201
            kill = saved(made("kill"))
            print(json.dumps(kill))  # noqa: T201
        finally:
            broker.stop()
    result = {"hardware": started, "rows": rows, "kill": kill}
    if args.save:
        save("agent_calls", result)


if __name__ == "__main__":
    main()

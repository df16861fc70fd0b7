"""A judge on a device that roles share: its server is not asked while it sleeps."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from rlstreams.schemas.events import WorkerReport
from rlstreams.streams.broker.ports import free_ports
from rlstreams.streams.leases import GRANTED, HELD, RECALLED, Lease
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import WORKER_EVENTS
from rlstreams.workers.bootstrap.model_server import make_server_role
from rlstreams.workers.config.across import judging
from rlstreams.workers.config.load import load
from rlstreams.workers.rollout.verifiers import make_verifier
from rlstreams.workers.sandbox.reward import AnswerToJudge, Judgement, RewardError, Verifier
from rlstreams.workers.server import gate
from rlstreams.workers.server import worker as module
from rlstreams.workers.server.judge import JudgeInShifts
from rlstreams.workers.server.worker import ServerEndedError
from tests.servers.judge_python import write_python
from tests.unit.roles.stand import Stand
from tests.unit.workers.test_config_load import write

LIMIT_S = 60.0
SHARED = (
    "[reward]\nverifier = 'judge'\n[judge]\nmodel = 'hf:org/judge'\n"
    "[[devices]]\nname = 'card'\nroles = ['rollout', 'judge']\n"
)


class Shared:
    """The role, driven as its loop would, with leases as `up` would grant them."""

    def __init__(self, folder: Path) -> None:
        (folder / "judge-model").mkdir()
        (port,) = free_ports(1)
        judge = {"model": folder / "judge-model", "port": port}
        judge["python"] = write_python(folder / "python")
        section = "\n".join(f"{name} = {str(value)!r}" for name, value in judge.items())
        text = SHARED.replace("model = 'hf:org/judge'", section.replace(f"'{port}'", str(port)))
        self.stand = Stand(folder)
        self.stand.config = load([write(folder, text)], [f"run.dir={folder}"])
        role = make_server_role(self.stand.context("server", 0))
        assert isinstance(role, JudgeInShifts)
        self.role, self.threads = role, ThreadPoolExecutor(4)

    def until(self, name: str, holder: str, state: str) -> None:
        """Drive it until its half of a change of the lease is done."""
        until_s = time.monotonic() + LIMIT_S
        self.role.follow(Lease(shift=1, state=state, holder=holder))
        while not getattr(self.role, name)():
            assert time.monotonic() < until_s, name
            self.role.tick()

    def takes(self) -> None:
        self.until("take_device", "server-0", GRANTED)

    def gives_up(self) -> None:
        self.until("give_up_device", "server-0", RECALLED)

    def shifts(self, until: Future[Judgement]) -> Judgement:
        """What the verifier says, with the role's loop under way."""
        until_s = time.monotonic() + LIMIT_S
        while not until.done():
            assert time.monotonic() < until_s, "no answer"
            self.role.tick()
        return until.result()

    def verifier(self, **options: float) -> Verifier:
        section = judging(self.stand.config)
        section.options.update(options)
        return make_verifier(section)

    def unanswered(self) -> float:
        """As `up` reads it."""
        self.role._reporter._next = 0.0
        self.role.tick()
        newest = self.stand.read(WORKER_EVENTS.name, WorkerReport)[-1]
        return newest.counters["requests"] - newest.counters["answers"]


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setattr(gate, "HOLD_S", 0.2)
    made = Shared(tmp_path)
    yield made
    made.role.close()
    made.threads.shutdown()


SAMPLE = AnswerToJudge("a question", "the answer", "the answer", {})


def test_a_question_waits_for_the_judges_shift(shared: Shared) -> None:
    """Also one that comes while the server sleeps, which would end it: `up` sees that it waits."""
    with shared.verifier() as verifier:
        early = shared.threads.submit(verifier.judge, SAMPLE)
        shared.takes()
        assert 0.75 == shared.shifts(early).reward
        shared.gives_up()
        late = shared.threads.submit(verifier.judge, SAMPLE)
        until_s = time.monotonic() + LIMIT_S
        while not shared.unanswered():
            assert time.monotonic() < until_s
        assert not late.done()
        shared.takes()
        assert 0.75 == shared.shifts(late).reward
        assert 0 == shared.unanswered()


def test_a_judge_that_gets_no_shift_names_who_has_the_device(shared: Shared) -> None:
    shared.takes()
    shared.gives_up()
    shared.role.follow(Lease(shift=2, state=HELD, holder="trainer-0"))
    with shared.verifier(patience_s=1.0) as verifier:
        asked = shared.threads.submit(verifier.judge, SAMPLE)
        with pytest.raises(RewardError, match=r"'card', which trainer-0 has .*again for 1 s"):
            shared.shifts(asked)


def test_what_it_works_on_when_its_shift_ends_is_cut_and_asked_again(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "FINISH_S", 0.2)
    shared.takes()
    with shared.verifier(patience_s=2.0) as verifier:
        slow = AnswerToJudge("slowly: a question", "the answer", "the answer", {})
        asked = shared.threads.submit(verifier.judge, slow)
        until_s = time.monotonic() + LIMIT_S
        while not shared.unanswered():
            assert time.monotonic() < until_s
        shared.gives_up()
        with pytest.raises(RewardError, match="waits for its shift on device 'card'"):
            shared.shifts(asked)


def test_a_client_that_hangs_up_leaves_no_request_behind() -> None:
    """The server would go on writing an answer that nobody reads, and `shut` would wait for it."""

    async def left_open() -> int:
        ended = asyncio.Event()

        async def never(_: web.Request) -> web.Response:
            try:
                await asyncio.sleep(LIMIT_S)
            finally:
                ended.set()
            return web.Response()

        app = web.Application()
        app.router.add_post("/ask", never)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        server, port = free_ports(2)
        await web.TCPSite(runner, "127.0.0.1", server).start()
        door = gate.Gate(f"http://127.0.0.1:{server}", LIMIT_S)
        await door.start("127.0.0.1", port)
        await door.open()
        limit = aiohttp.ClientTimeout(total=0.3)
        async with aiohttp.ClientSession(timeout=limit) as client:
            with pytest.raises(TimeoutError):
                await client.post(f"http://127.0.0.1:{port}/ask")
        await asyncio.wait_for(ended.wait(), LIMIT_S / 2)
        await door.close()
        await runner.cleanup()
        return door.num_asked - door.num_answered

    assert asyncio.run(left_open()) == 0


def test_a_server_that_dies_in_its_sleep_ends_its_role(shared: Shared) -> None:
    shared.takes()
    shared.gives_up()
    child = shared.role._process.child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(LIMIT_S)
    with pytest.raises(ServerEndedError, match="was ended by SIGKILL"):
        shared.role.tick()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SHARED.replace("[[dev", "engine = 'sglang'\n[[dev"), "would wake without its weights"),
        (SHARED.replace("[[dev", "env = { CUDA_VISIBLE_DEVICES = '1' }\n[[dev"), "leave it out"),
        ("[[devices]]\nname = 'card'\nroles = ['rollout', 'judge']\n", "judge.model is empty"),
    ],
)
def test_what_cannot_have_shifts_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load([write(tmp_path, text)])

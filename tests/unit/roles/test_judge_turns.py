"""A judge on the sampler's GPUs: never are both awake, and every sample is judged."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlstreams.schemas.events import Trajectory, WorkerReport
from rlstreams.streams.log.errors import ConfigError, StreamsError
from rlstreams.streams.log.topics import TRAJECTORIES, WORKER_EVENTS
from rlstreams.workers.config.load import load
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.rollout.judge_turns import JudgeTurns
from rlstreams.workers.rollout.worker import make_worker
from rlstreams.workers.sandbox.reward import Judgement, Sample, Verifier
from rlstreams.workers.weights.file import FileWeightChannel
from tests.fake_engine import FakeEngine
from tests.unit.roles.stand import EXAMPLE, Stand, make_sampler, turn_until

DEADLINE_S = 20.0


class Card:
    """Who is awake on it; a judge's server that says what it is told."""

    def __init__(self) -> None:
        self.awake = {"judge"}  # as its user started it
        self.most, self.told, self.judged_by = 1, list[str](), list[int]()
        self.status = 200
        card = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                card.told.append(self.path)
                if card.status == 200:
                    card.change("judge", is_awake=self.path == "/wake_up")
                self.send_response(card.status)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def change(self, who: str, *, is_awake: bool) -> None:
        self.awake = self.awake | {who} if is_awake else self.awake - {who}
        self.most = max(self.most, len(self.awake))

    async def judge(self, sample: Sample) -> Judgement:
        assert self.awake == {"judge"}, "asked outside of its turn"
        self.judged_by.append(len(self.told))
        return Judgement(reward=float(len(sample.token_ids)))

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Sampling(FakeEngine):
    """Loses its weights when it sleeps, as a server does."""

    def __init__(self, card: Card) -> None:
        super().__init__(slots=4, step_s=0.001)
        self._card = card

    async def start(self) -> None:
        self._card.change("sampler", is_awake=True)
        await super().start()

    async def sleep(self) -> None:
        await super().sleep()
        self._card.change("sampler", is_awake=False)

    async def wake(self) -> None:
        self._card.change("sampler", is_awake=True)
        await super().wake()


@pytest.fixture
def card() -> Iterator[Card]:
    made = Card()
    yield made
    made.close()


def make_rollout(stand: Stand, card: Card) -> StageLoop:
    engine, context = Sampling(card), stand.context("rollout")
    sampler = replace(
        make_sampler(stand, engine, max_new_tokens=8),
        verifier=Verifier(card.judge, require_stop=False),
    )
    turns = JudgeTurns(f"{card.url}/v1", DEADLINE_S)
    return make_worker(context, context.bus, engine, FileWeightChannel(), sampler, turns)


def test_judge_and_sampler_take_turns_until_all_is_judged(tmp_path: Path, card: Card) -> None:
    """More than one turn can hold; a later one samples under the version of its own time."""
    stand = Stand(tmp_path)
    rollout = make_rollout(stand, card)
    assert card.awake == {"sampler"}, "the judge sleeps before servers start"
    stand.publish(0)
    stand.issue("0", 30)
    turn_until(rollout, lambda: len(stand.read(TRAJECTORIES.name, Trajectory)) == 30)
    stand.publish(1)
    stand.issue("1", 5, min_policy_version=1)
    turn_until(rollout, lambda: len(stand.read(TRAJECTORIES.name, Trajectory)) == 35)
    until_s = time.monotonic() + DEADLINE_S
    while card.awake != {"sampler"}:
        assert time.monotonic() < until_s, "the sampler has not its GPUs back"
        rollout.turn()
    rollout.close()
    found = stand.read(TRAJECTORIES.name, Trajectory)
    sampled = [[s for s in one.segments if s.author == "policy"] for one in found]
    lengths = [sum(len(s.token_ids.numpy()) for s in segments) for segments in sampled]
    assert lengths == [one.reward for one in found]
    assert {0, 1} == {s.policy_version for segments in sampled for s in segments}
    assert (card.most, len(card.judged_by)) == (1, 35)
    changes = card.told[1:]
    assert changes == ["/wake_up", "/sleep?level=1"] * (len(changes) // 2)
    assert len(changes) >= 4
    said = {report.state for report in stand.read(WORKER_EVENTS.name, WorkerReport)}
    assert "offloaded" not in said, "it has no lease to wait for"


def test_a_judge_that_is_away_has_no_memory(tmp_path: Path, card: Card) -> None:
    """Sampling goes on; whoever asks it waits, which is the verifier's affair."""
    card.close()
    card.awake = set()
    stand = Stand(tmp_path)
    rollout = make_rollout(stand, card)
    assert card.awake == {"sampler"}
    rollout.close()


def test_a_judge_that_cannot_sleep_is_named(tmp_path: Path, card: Card) -> None:
    """Before a server of the sampler's is started; for good, or to be tried again."""
    for card.status, kind in ((404, ConfigError), (500, StreamsError)):
        told = r"/sleep\?level=1.* start it with --enable-sleep-mode"
        with pytest.raises(StreamsError, match=told) as caught:
            make_rollout(Stand(tmp_path / str(card.status)), card)
        assert type(caught.value) is kind
    assert card.awake == {"judge"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--reward.verifier=exact"], "reward.verifier is 'exact': only 'judge' with the `url`"),
        (["--rollout.workers=2"], "rollout.workers is 2, and each would wake it"),
        (
            ["--rollout.engine=vllm", '--engine.urls=["http://a:1"]'],
            "engine.urls names 1 servers, which stay awake",
        ),
    ],
)
def test_who_cannot_take_turns_with_a_judge(words: list[str], error: str) -> None:
    given = ["--reward.by_turns=true", "--reward.verifier=judge", "--reward.options.model=m"]
    given.append("--reward.options.url=http://localhost:1")
    assert load([EXAMPLE], given).reward.by_turns
    with pytest.raises(ConfigError, match=f"reward.by_turns is true, but {error}"):
        load([EXAMPLE], [*given, *words])

"""A run in memory behind its live page: events are written to it while a browser looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlstreams.schemas.events import Event, Segment, Tensor
from rlstreams.show.web.app import server_of
from rlstreams.show.web.beside import listening
from rlstreams.show.web.reading import RunReader
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import TOPICS
from rlstreams.streams.run.run_log import BusLog, RunLog
from rlstreams.workers.config.load import resolved_json
from rlstreams.workers.config.run import RunConfig
from tests import factories
from tests.factories import NOW_MS
from tests.logs import made_log
from tests.memory.bus import MemoryBus

EVIL = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\x1b[2J"
)


@dataclass(frozen=True, slots=True)
class Opened:
    """What commands have of an open run."""

    log: RunLog
    model_path: str = str(Path(__file__).parents[3] / "infra/examples/demo/model")


class MadeRun:
    """A log in memory, and who writes it."""

    def __init__(self, samples_per_step: int = 8, answer_tokens: int = 3) -> None:
        self.log = made_log()
        self.bus = MemoryBus(self.log, "run")
        self._producer = self.bus.producer("test")
        self._samples_per_step, self._answer_tokens = samples_per_step, answer_tokens
        config = resolved_json(RunConfig())
        self.write([factories.trainer_started(config=config, started_at_ms=NOW_MS)])
        self.write([factories.prompt(group_id="1", sample=0, text=EVIL, answer=EVIL)])

    @contextmanager
    def opened(self) -> Iterator[Opened]:
        """As `opened` of the commands."""
        yield Opened(BusLog(self.bus, "run"))

    def write(self, events: Sequence[Event]) -> None:
        """Commit them, each to its topic."""
        topics = {kind: topic for topic in TOPICS for kind in topic.events}
        self._producer.commit([outgoing(topics[type(event)], event) for event in events])

    def make_step(self, number: int, **metrics: float) -> None:
        """A step, and the samples that it trains."""
        names = range(self._samples_per_step)
        refs = [factories.sample_ref(str(number), n, offset=number * 1000 + n, reward=n % 2,
                                     oldest_policy_version=number - 1) for n in names]  # fmt: skip
        sampled = [
            factories.trajectory(
                group_id=str(number), sample=n, reward=float(n % 2),
                segments=segments(number - 1, n, self._answer_tokens),
                finished_at_ms=NOW_MS + number * 1000 + n,
            )
            for n in names
        ]  # fmt: skip
        at_ms = NOW_MS + number * 1000
        values = {"entropy": 1 / number, "kl": number / 1000, "grad_norm": number % 3, **metrics}
        step = factories.step_completed(
            number, samples=tuple(refs), masked=(), metrics=values, loss=-1 / number,
            started_at_ms=at_ms, finished_at_ms=at_ms + 500,
        )  # fmt: skip
        scores = (factories.score(self._answer_tokens),)
        scored = [factories.scored(one, scores=scores) for one in sampled]
        self.write([*sampled, *scored, step])


def segments(version: int, number: int, num_tokens: int = 3) -> tuple[Segment, ...]:
    """A prompt and an answer; every fourth was cut at its length."""
    reason = "length" if number % 4 == 0 else "stop"
    ids = Tensor.of((np.arange(num_tokens, dtype=np.int32) + version + number) % 90 + 4)
    answer = factories.policy_segment(num_tokens, version, token_ids=ids, finish_reason=reason)
    return factories.prompt_segment(), answer


@contextmanager
def served(runs: Mapping[str, MadeRun], *, wait: bool = True) -> Iterator[str]:
    """The address of the page of these runs; with `wait` once their logs are read."""
    readers = {name: RunReader(name, f"runs/{name}", run.opened) for name, run in runs.items()}
    with listening("127.0.0.1", 0) as at:
        server = server_of(readers)
        thread = threading.Thread(target=server.run, args=([at],))
        thread.start()
        try:
            if wait:
                wait_read(readers.values())
            yield f"http://127.0.0.1:{at.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            for reader in readers.values():
                reader.close()


def wait_read(readers: Any) -> None:
    """Until all that was written is folded."""
    until_s = time.monotonic() + 120
    while any(reader.reading for reader in readers):
        assert time.monotonic() < until_s, [reader.problem for reader in readers]
        time.sleep(0.01)

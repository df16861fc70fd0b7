"""How long it takes until all of four workers know of a policy version that was published.

    python -m tests.bench.policy_latency --json tests/bench/results/policy-latency-DATE.json

The embedded broker, the trainer's `LedgerWriter.published` (one transaction a version), and four
processes that each run the real loop of a rollout worker with nothing else to do. An engine that
only listens notes when it is first offered a version: the moment at which the worker would pull.
Time runs from before the event is made until the slowest of the four knows, all on one machine's
monotonic clock. Versions come at irregular intervals, so that no loop keeps step with them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlstreams.schemas.events import PolicyPublished
from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.engines.base import Sampling
from rlstreams.workers.engines.fake import FakeEngine, fake_weights
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.model.tokenizer import Tokenizer
from rlstreams.workers.rollout.sampling import Sampler
from rlstreams.workers.rollout.worker import make_worker
from rlstreams.workers.sandbox.reward import Verifier
from rlstreams.workers.trainer.ledger_writer import LedgerWriter
from rlstreams.workers.weights.channel import Manifest
from rlstreams.workers.weights.file import FileWeightChannel, FileWeightServer
from tests.bench.hardware import hardware
from tests.unit.roles.stand import EXAMPLE, length

RUN = "latency"
NUM_WORKERS = 4
GOAL_MS = 50.0
START_S = 120.0  # of a worker, on a busy machine
SILENCE_S = 30.0


class Listener(FakeEngine):
    """Wants nothing; notes when it was first offered each version."""

    def __init__(self) -> None:
        super().__init__(slots=1)
        self.heard_s: dict[int, float] = {}

    def wants(self, published: PolicyPublished) -> bool:
        """Note it."""
        self.heard_s.setdefault(published.policy_version, time.monotonic())
        return False


def work(bootstrap: str, folder: str, ordinal: int, parent: Connection) -> None:
    """One rollout worker, until the parent says stop; then tell what was heard."""
    config, engine = _config(bootstrap, folder), Listener()
    with KafkaBus(bootstrap, RUN) as bus:
        context = _context(config, bus, "rollout", ordinal)
        sampler = Sampler(
            engine=engine,
            verifier=Verifier(length, require_stop=False),
            tokenizer=Tokenizer.load(config.model.path),
            sampling=Sampling(max_new_tokens=4),
            max_attempts=1,
            deadline_s=60.0,
        )
        worker = make_worker(context, bus, engine, FileWeightChannel(), sampler)
        told = 0
        while not (parent.poll() and parent.recv() == "stop"):
            worker.turn()
            if len(engine.heard_s) > told:
                told = len(engine.heard_s)
                parent.send(told)
        worker.close()
    parent.send(engine.heard_s)


@contextmanager
def workers(bootstrap: str, folder: str) -> Iterator[list[Connection]]:
    """Four processes; whoever is left at the end is killed."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for ordinal in range(NUM_WORKERS):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=work, args=(bootstrap, folder, ordinal, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        yield pipes
        for process in processes:
            process.join(SILENCE_S)
    finally:
        for process in processes:
            process.kill()
            process.join()


def measure(bootstrap: str, folder: str, num_versions: int) -> dict[str, Any]:
    """Publish versions one after the other; each once all know of the one before."""
    config = _config(bootstrap, folder)
    begun_s: dict[int, float] = {}
    committed_s: dict[int, float] = {}
    with ExitStack() as stack:
        bus = stack.enter_context(KafkaBus(bootstrap, RUN))
        context = _context(config, bus, "trainer", 0)
        producer = bus.producer(context.transactional_id)
        writer = LedgerWriter(context, producer, 1, Reporter(context))
        server = FileWeightServer(Path(folder) / "weights", keep=1)
        manifest = server.publish(0, fake_weights(0))
        pipes = stack.enter_context(workers(bootstrap, folder))
        draw = random.Random(0)
        for version in range(num_versions + 1):  # the first one warms up
            told = Manifest(
                policy_version=version,
                weight_hash=f"{version:064x}",
                num_bytes=manifest.num_bytes,
                layout=manifest.layout,
            )
            begun_s[version] = time.monotonic()
            writer.published(version, told, server)
            committed_s[version] = time.monotonic()
            _await(pipes, version + 1, SILENCE_S if version else START_S)
            time.sleep(draw.uniform(0.02, 0.2))
        heard_s = [_last(pipe) for pipe in pipes]
        writer.close()
    versions = range(1, num_versions + 1)
    slowest = [max(heard[v] for heard in heard_s) for v in versions]
    return {
        "workers": NUM_WORKERS,
        "versions": num_versions,
        "all_told_ms": _spread([s - begun_s[v] for s, v in zip(slowest, versions, strict=True)]),
        "after_commit_ms": _spread(
            [s - committed_s[v] for s, v in zip(slowest, versions, strict=True)]
        ),
        "one_told_ms": _spread([h[v] - begun_s[v] for h in heard_s for v in versions]),
        "commit_ms": _spread([committed_s[v] - begun_s[v] for v in versions]),
        "goal_p99_ms": GOAL_MS,
    }


def _await(pipes: Sequence[Connection], count: int, timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    for ordinal, pipe in enumerate(pipes):
        while True:
            if not pipe.poll(max(0.0, until_s - time.monotonic())):
                raise TimeoutError(f"worker {ordinal} did not hear of version {count - 1}")
            if pipe.recv() == count:
                break


def _last(pipe: Connection) -> Mapping[int, float]:
    pipe.send("stop")
    if not pipe.poll(SILENCE_S):
        raise TimeoutError("a worker does not end")
    heard: Mapping[int, float] = pipe.recv()
    return heard


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and worst, milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {
        "p50": round(1000 * statistics.median(seconds), 2),
        "p99": round(1000 * cuts[98], 2),
        "max": round(1000 * max(seconds), 2),
    }


def _config(bootstrap: str, folder: str) -> RunConfig:
    words = [f"run.id={RUN}", f"run.dir={folder}", f"broker.bootstrap={bootstrap}"]
    return load([EXAMPLE], [*words, f"rollout.workers={NUM_WORKERS}"])


def _context(config: RunConfig, bus: KafkaBus, role: str, ordinal: int) -> Context:
    return Context(config=config, bus=bus, role=role, ordinal=ordinal, instance=f"{role}-{ordinal}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", type=int, default=300)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        bootstrap = broker.start().bootstrap
        try:
            apply(bootstrap, RUN, TopicPlan(rollout_workers=NUM_WORKERS, logprob_workers=1))
            result = measure(bootstrap, folder, args.versions)
        finally:
            broker.stop()
    for name in ("commit_ms", "one_told_ms", "all_told_ms", "after_commit_ms"):
        row = result[name]
        print(f"{name:<16} p50 {row['p50']:6.1f}  p99 {row['p99']:6.1f}  max {row['max']:6.1f}")  # noqa: T201
    if args.json:
        told = {"hardware": hardware(), **result}
        Path(args.json).write_text(json.dumps(told, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()

"""Recordings: replay against a live consumer, one of 100,000 samples by id, and memory.

    python tests/bench/recording.py [--samples 100000] [--json FILE]

One embedded broker, one topic of scored trajectories (64 tokens each), ratios taken in one run:

- consume: `bus.reader` over the topic, to its end, records as they come (a live consumer).
- record: the same through a `Recorder` into a folder.
- replay: the recording into another prefix of the same broker, as fast as possible.
- read: the recording alone, no broker.
- by id: opening the recording and one sample by group and number, fresh process state each time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from schemas.events import ScoredTrajectory, Tensor
from streams.admin import apply
from streams.broker import EmbeddedBroker
from streams.codec import outgoing
from streams.kafka import KafkaBus
from streams.record import Outgoing
from streams.recording import Manifest, RecordedTopic, Recording, RecordingWriter
from streams.recording.recorder import Recorder
from streams.recording.selection import Selection
from streams.topic_plan import TopicPlan
from streams.topics import SCORED
from tests import factories
from workers.replay.player import Pace, Player

PLAN = TopicPlan(rollout_workers=1, logprob_workers=1)
BATCH = 1000
TOKENS = 64


def samples(count: int) -> Iterator[Outgoing]:
    """Scored trajectories whose log-probs do not compress."""
    draw = np.random.default_rng(0)
    for number in range(count):
        policy = factories.policy_segment(
            TOKENS, behavior_logprobs=Tensor.of(-draw.random(TOKENS, np.float32))
        )
        trajectory = factories.trajectory(
            group_id=str(number // 8),
            sample=number % 8,
            group_size=8,
            segments=(factories.prompt_segment(16), policy),
        )
        score = factories.score(
            TOKENS, proximal_logprobs=Tensor.of(-draw.random(TOKENS, np.float32))
        )
        event = replace(factories.scored(trajectory), scores=(score,))
        yield outgoing(SCORED, event, partition=number // 8 % 2)


def produce(bus: KafkaBus, count: int) -> None:
    with bus.producer("bench") as producer:
        batch: list[Outgoing] = []
        for record in samples(count):
            batch.append(record)
            if len(batch) == BATCH:
                producer.commit(batch)
                batch = []
        producer.commit(batch)


def consume(bus: KafkaBus) -> tuple[int, float]:
    """Records a second of a live consumer."""
    ends = bus.ends(SCORED.name)
    started_s, num = time.monotonic(), 0
    with bus.reader(bus.beginnings(SCORED.name)) as reader:
        while any(reader.positions().get(p, 0) < end for p, end in ends.items()):
            num += len(reader.poll(BATCH, 0.2))
    return num, time.monotonic() - started_s


def record(bus: KafkaBus, folder: Path) -> float:
    manifest = Manifest(
        run="bench",
        started_at_ms=0,
        topics={SCORED.name: RecordedTopic(id="", partitions=2)},
    )
    started_s = time.monotonic()
    with RecordingWriter(folder, manifest) as writer:
        only = Selection(topics=frozenset([SCORED.name]))
        with Recorder(bus, writer, only) as recorder:
            recorder.up_to_now()
        writer.seal()
    return time.monotonic() - started_s


def replay(recording: Recording, bus: KafkaBus) -> float:
    return Player(bus, "bench", Pace(speed=math.inf)).play(recording.records()).seconds


def by_id(folder: Path, count: int) -> list[float]:
    """Seconds from nothing open to the decoded event."""
    taken = []
    for number in np.random.default_rng(1).integers(0, count, 20).tolist():
        started_s = time.monotonic()
        with Recording(folder) as recording:
            (found,) = recording.by_id(ScoredTrajectory, str(number // 8), number % 8)
            assert found.event.trajectory.sample == number % 8
        taken.append(time.monotonic() - started_s)
    return taken


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(count: int, scratch: Path) -> dict[str, object]:
    broker = EmbeddedBroker(scratch / "broker")
    bootstrap = broker.start().bootstrap
    try:
        for run in ("bench", "again"):
            apply(bootstrap, run, PLAN)
        bus = KafkaBus(bootstrap, "bench")
        produce(bus, count)
        num, consume_s = consume(bus)
        assert num == count
        record_s = record(bus, scratch / "recording")
        before_mb = peak_mb()
        with Recording(scratch / "recording") as recording:
            started_s = time.monotonic()
            assert count == sum(1 for _ in recording.records())
            read_s = time.monotonic() - started_s
            after_mb = peak_mb()
            replay_s = replay(recording, KafkaBus(bootstrap, "again"))
        _, again_s = consume(bus)
        ids = by_id(scratch / "recording", count)
    finally:
        broker.stop()
    live_s = (consume_s + again_s) / 2
    return {
        "samples": count,
        "consume_per_s": round(count / live_s),
        "record_per_s": round(count / record_s),
        "replay_per_s": round(count / replay_s),
        "read_per_s": round(count / read_s),
        "replay_to_consume": round(live_s / replay_s, 2),
        "read_to_consume": round(live_s / read_s, 2),
        "by_id_median_ms": round(1000 * sorted(ids)[len(ids) // 2], 1),
        "by_id_worst_ms": round(1000 * max(ids), 1),
        "peak_mb_before_reading": round(before_mb, 1),
        "peak_mb_after_reading": round(after_mb, 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="rlstreams-bench-"))
    try:
        found = measure(args.samples, scratch)
    finally:
        shutil.rmtree(scratch)
    text = json.dumps(found, indent=1)
    sys.stdout.write(text + "\n")
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Recordings: replay against a live consumer, one of 100,000 samples by id, and memory.

    python tests/bench/recording.py [--samples 100000] [--live 20000] [--json FILE]

One embedded broker, one topic of `--live` scored trajectories (64 tokens each), ratios of one run:

- consume: `bus.reader` over the topic, to its end, records as they come; and decoded, as each role
  has to.
- record: the same through a `Recorder` into a folder.
- replay: the recording into another prefix of the same broker, as fast as possible.
- read: the recording alone, no broker.
- by id: in a recording of `--samples`, made without a broker: opening it, and one group by its
  key, down to the decoded events; nothing is held from one to the next.
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

from rlstreams.debug.replay.player import Player
from rlstreams.schemas.events import Tensor
from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.parts import whole
from rlstreams.streams.log.record import Outgoing, Partition, Position, RawRecord
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import SCORED
from rlstreams.streams.recording import Manifest, RecordedTopic, Recording, RecordingWriter
from rlstreams.streams.recording.recorder import Recorder
from rlstreams.streams.recording.selection import Selection
from tests import factories

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


def consume(bus: KafkaBus, *, is_decoded: bool = False) -> tuple[int, float]:
    """Records and seconds of a live consumer."""
    ends = bus.ends(SCORED.name)
    started_s, num = time.monotonic(), 0
    with bus.reader(bus.beginnings(SCORED.name)) as reader:
        while any(reader.positions().get(p, 0) < end for p, end in ends.items()):
            raws = reader.poll(BATCH, 0.2)
            num += len(raws)
            if is_decoded:
                for raw in raws:
                    decoded(raw)
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
    return Player(bus, "bench", math.inf).play(recording.records()).seconds


def by_id(folder: Path, count: int) -> list[float]:
    """Seconds from nothing open to the decoded event."""
    taken = []
    for number in np.random.default_rng(1).integers(0, count, 20).tolist():
        started_s = time.monotonic()
        with Recording(folder) as recording:
            group = recording.keyed(SCORED.name, [str(number // 8).encode()])
            events = [recording.decoded(raw).event for raw in group]
            assert number % 8 in [e.trajectory.sample for e in events]  # type: ignore[union-attr]
        taken.append(time.monotonic() - started_s)
    return taken


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def record_alone(folder: Path, count: int) -> None:
    """A large recording, without a broker."""
    manifest = Manifest(run="bench", started_at_ms=0)
    at = [0, 0]
    with RecordingWriter(folder, manifest) as writer:
        for number, record_ in enumerate(samples(count)):
            partition = record_.partition or 0
            raw = RawRecord(
                position=Position(SCORED.name, partition, at[partition]),
                offsets=(at[partition],),
                key=record_.key,
                value=whole(record_.value),
                headers=record_.headers,
                timestamp_ms=factories.NOW_MS + number,
            )
            at[partition] += 1
            writer.append(raw)
            if writer.is_due:
                writer.commit({Partition(SCORED.name, p): at[p] for p in (0, 1)}, {})
        writer.commit({Partition(SCORED.name, p): at[p] for p in (0, 1)}, {})
        writer.seal()


def measure_live(count: int, scratch: Path) -> dict[str, object]:
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
        with Recording(scratch / "recording") as recording:
            started_s = time.monotonic()
            assert count == sum(1 for _ in recording.records())
            read_s = time.monotonic() - started_s
            replay_s = replay(recording, KafkaBus(bootstrap, "again"))
        _, decode_s = consume(bus, is_decoded=True)
        _, again_s = consume(bus)
    finally:
        broker.stop()
    live_s = (consume_s + again_s) / 2
    return {
        "live_samples": count,
        "consume_per_s": round(count / live_s),
        "consume_and_decode_per_s": round(count / decode_s),
        "record_per_s": round(count / record_s),
        "replay_per_s": round(count / replay_s),
        "read_per_s": round(count / read_s),
        "replay_to_consume": round(live_s / replay_s, 2),
        "replay_to_consume_and_decode": round(decode_s / replay_s, 2),
        "read_to_consume": round(live_s / read_s, 2),
    }


def measure_large(count: int, folder: Path) -> dict[str, object]:
    record_alone(folder, count)
    ids = by_id(folder, count)
    before_mb = peak_mb()
    with Recording(folder) as recording:
        assert count == sum(1 for _ in recording.records())
    return {
        "samples": count,
        "by_id_median_ms": round(1000 * sorted(ids)[len(ids) // 2], 1),
        "by_id_worst_ms": round(1000 * max(ids), 1),
        "peak_mb_before_reading_all": round(before_mb, 1),
        "peak_mb_after_reading_all": round(peak_mb(), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--live", type=int, default=20_000)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="rlstreams-bench-"))
    try:
        found = measure_large(args.samples, scratch / "large") if args.samples else {}
        found |= measure_live(args.live, scratch) if args.live else {}
    finally:
        shutil.rmtree(scratch)
    found |= {"cores": os.cpu_count(), "machine": platform.machine()}
    found |= {"python": platform.python_version(), "load": os.getloadavg()[0]}
    text = json.dumps(found, indent=1)
    sys.stdout.write(text + "\n")
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A replay into a broker as fast as possible, beside everything that could be called its rival.

    python tests/bench/replay.py [--rounds 3] [--payloads SML] [--json FILE]

Payloads are those of `data_path.py` (S 1k tokens, M 16k, L 8k with routed experts), one topic of
four partitions on one embedded broker; the rows of a round take turns:

- replay: a recording into a fresh topic, by `debug.replay.player`, decompression included.
- append: the bare client, one transaction of ready bytes: what any replay through a broker costs.
- role reads: our reader with decoding, over the topic that the replay has just written.
- bare reads: the bare client over the same topic, bytes only.
- live: what a consumer sees of a run: one process encodes and commits our transactions as fast as
  it can, another one reads committed records and decodes them (the rows `ours` of `data_path.py`).
- live bare: the same with the bare client at both ends.
- read: the recording alone, as records, no broker.

CPU seconds per GB are of client and broker together: a ratio of those hardly depends on the load.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import confluent_kafka

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlstreams.debug.replay.player import Player, outgoing_of
from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.kafka.bus import _CONSUMER, _PRODUCER, KafkaBus
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.parts import num_parts, split
from rlstreams.streams.log.record import Partition, Position, RawRecord
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import TRAJECTORIES
from rlstreams.streams.recording import Manifest, Recording, RecordingWriter
from tests.bench.data_path_ends import pool
from tests.bench.data_path_processes import Bench, _cpu_s_of, cpu_s
from tests.bench.hardware import hardware

COUNTS = {"S": 20_000, "M": 1_500, "L": 60}  # about 180 MB each
PARTITIONS = 4
PLAN = TopicPlan(rollout_workers=2, logprob_workers=2)
TOPIC = TRAJECTORIES.name
LIVE_S = 1.5
ANSWER_S = 60.0


def raws(name: str) -> Iterator[RawRecord]:
    """As a run would have left them in its log."""
    at = [0] * PARTITIONS
    for number, sample in enumerate(islice(cycle(pool(name)), COUNTS[name])):
        event = replace(sample.event, group_id=str(number // 8), sample=number % 8)
        sent = outgoing(TRAJECTORIES, event)
        partition = number // 8 % PARTITIONS
        yield RawRecord(
            position=Position(TOPIC, partition, at[partition]),
            offsets=(at[partition],),
            key=sent.key,
            value=b"".join(sent.value),
            headers=sent.headers,
            timestamp_ms=1_795_000_000_000 + number,
        )
        at[partition] += 1


def write_recording(folder: Path, name: str) -> int:
    """The bytes of its values."""
    num_bytes = 0
    with RecordingWriter(folder, Manifest(run="bench", started_at_ms=0)) as writer:
        for raw in raws(name):
            writer.append(raw)
            num_bytes += len(raw.value)
        writer.commit({Partition(TOPIC, n): 1 << 30 for n in range(PARTITIONS)}, {})
        writer.seal()
    return num_bytes


def replay(bootstrap: str, run: str, folder: Path) -> None:
    with Recording(folder) as recording:
        player = Player(KafkaBus(bootstrap, run), "bench", math.inf)
        assert recording.num_records == player.play(recording.records()).num_records


def append(bootstrap: str, run: str, ready: list[RawRecord]) -> None:
    """Values, keys and headers that lie in memory, in one transaction without reports."""
    servers = {"bootstrap.servers": bootstrap, "log_level": "2"}
    producer = confluent_kafka.Producer(servers | _PRODUCER | {"transactional.id": f"{run}.bare"})
    producer.init_transactions(ANSWER_S)
    producer.begin_transaction()
    topic = f"{run}.{TOPIC}"
    for raw in ready:
        headers = outgoing_of(raw, "bench").headers
        for part in split([raw.value]):
            while True:
                try:
                    producer.produce(
                        topic, part, raw.key, raw.position.partition, headers=dict(headers)
                    )
                except BufferError:
                    producer.poll(0.01)
                else:
                    break
    producer.commit_transaction(ANSWER_S)


def role_reads(bootstrap: str, run: str, count: int) -> None:
    bus = KafkaBus(bootstrap, run)
    num = 0
    with bus.reader(bus.beginnings(TOPIC)) as reader:
        while num < count:
            for raw in reader.poll(1000, 1.0):
                decoded(raw)
                num += 1


def bare_reads(bootstrap: str, run: str, num_messages: int) -> None:
    servers = {"bootstrap.servers": bootstrap, "log_level": "2", "group.id": f"{run}.bare"}
    consumer = confluent_kafka.Consumer(servers | _CONSUMER)
    places = [confluent_kafka.TopicPartition(f"{run}.{TOPIC}", n, 0) for n in range(PARTITIONS)]
    consumer.assign(places)
    num = 0
    while num < num_messages:
        first = consumer.poll(0.2)
        if first is None:
            continue
        for message in (first, *consumer.consume(999, 0)):  # a wait for 1000 would idle at the end
            assert message.error() is None, message.error()
            assert message.value()
            num += 1
    consumer.close()


def read(folder: Path) -> None:
    with Recording(folder) as recording:
        assert recording.num_records == sum(1 for _ in recording.records())


class Rounds:
    """Rows of one payload, measured again and again."""

    def __init__(self, bootstrap: str, broker_pid: int, num_bytes: int) -> None:
        self._bootstrap = bootstrap
        self._broker_pid = broker_pid
        self._num_bytes = num_bytes
        self.rows: dict[str, list[dict[str, float]]] = {}

    def take(self, row: str, work: Callable[[], None]) -> None:
        before_s, started_s = cpu_s() + _cpu_s_of(self._broker_pid), time.monotonic()
        work()
        wall_s = time.monotonic() - started_s
        used_s = cpu_s() + _cpu_s_of(self._broker_pid) - before_s
        self.add(row, self._num_bytes / wall_s / 1e6, used_s / self._num_bytes * 1e9)

    def add(self, row: str, mb_per_s: float, cpu_s_per_gb: float) -> None:
        found = {"mb_per_s": round(mb_per_s, 1), "cpu_s_per_gb": round(cpu_s_per_gb, 2)}
        self.rows.setdefault(row, []).append(found)

    def medians(self) -> dict[str, dict[str, float]]:
        return {
            row: {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
            for row, rounds in self.rows.items()
        }


def measure(bench: Bench, broker: tuple[str, int], name: str, rounds: int, scratch: Path) -> Any:
    bootstrap, pid = broker
    folder = scratch / name
    num_bytes = write_recording(folder, name)
    ready = list(raws(name))
    count = len(ready)
    num_messages = sum(num_parts(len(raw.value)) for raw in ready)
    found = Rounds(bootstrap, pid, num_bytes)
    for number in range(-1, rounds):  # the first one warms the broker's compiler up
        if number == 0:
            found.rows = {}
        again, bare = f"{name}-again{number}", f"{name}-bare{number}"
        apply(bootstrap, again, PLAN)
        apply(bootstrap, bare, PLAN)
        found.take("replay", lambda run=again: replay(bootstrap, run, folder))  # type: ignore[misc]
        found.take("append", lambda run=bare: append(bootstrap, run, ready))  # type: ignore[misc]
        found.take("role reads", lambda run=again: role_reads(bootstrap, run, count))  # type: ignore[misc]
        found.take("bare reads", lambda run=again: bare_reads(bootstrap, run, num_messages))  # type: ignore[misc]
        found.take("read", lambda: read(folder))
        for row, kind in (("live", "ours"), ("live bare", "bare")):
            live = bench.throughput(kind, name, LIVE_S)
            found.add(row, live["mb_per_s"], live["cpu_s_per_gb"])
    rows = found.medians()
    mine = rows["replay"]
    return {
        "records": count,
        "mb": round(num_bytes / 1e6),
        "rows": rows,
        "replay_over": {
            row: round(mine["mb_per_s"] / r["mb_per_s"], 2)
            for row, r in rows.items()
            if row != "replay"
        },
        "rounds": found.rows,
    }


def table(results: Mapping[str, Any]) -> str:
    lines = [f"{'':2} {'row':11} {'MB/s':>7} {'CPU s/GB':>9} {'replay is':>10}"]
    for name, result in results.items():
        for row, r in result["rows"].items():
            ratio = result["replay_over"].get(row)
            times = "" if ratio is None else f"{ratio:>9.2f}x"
            lines.append(
                f"{name:2} {row:11} {r['mb_per_s']:7,.0f} {r['cpu_s_per_gb']:9.2f} {times}"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--payloads", default="SML")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="rlstreams-bench-"))
    broker = EmbeddedBroker(scratch / "broker")
    state = broker.start()
    machine, results = hardware(), {}
    try:
        bench = Bench(state.bootstrap, state.pid, PARTITIONS)
        for name in args.payloads:
            place = (state.bootstrap, state.pid)
            results[name] = measure(bench, place, name, args.rounds, scratch)
            sys.stdout.write(table({name: results[name]}) + "\n")
            sys.stdout.flush()
            found = {"hardware": machine, "rounds": args.rounds, "results": results}
            if args.json:
                Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        bench.close()
    finally:
        broker.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

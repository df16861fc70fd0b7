"""What `broker.fsync` costs a writer, and how soon workers know of a version.

    python tests/bench/broker_costs.py [--save]

`fsync`: one writer commits transactions of each load for `SECONDS`, by turns to a broker that
forces each batch to disk and to one that does not; the share of the records that remains. `told`: a
version is committed, and `READERS` readers without a group wait for it as workers do; milliseconds
from before the commit until the last one has it. Nothing else runs on these brokers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlstreams.streams.broker.config import FSYNC
from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.record import Outgoing, Partition
from tests.bench.hardware import hardware
from tests.contract.buses import KafkaCluster

LOADS = {  # records of a transaction, bytes of each
    "100 of 4 kB": (100, 4_000),
    "20 of 100 kB": (20, 100_000),
    "2 of 12 MB": (2, 12_000_000),
}
ROUNDS = 5
SECONDS = 1.0
READERS = 4
VERSIONS = 200
PAUSE_S = 0.02  # between two versions
VERSION_BYTES = 2_000
LIMIT_S = 60.0
TOPIC = Partition("t", 0)
RESULTS = Path(__file__).parent / "results"


@contextmanager
def broker(*, fsync: bool) -> Iterator[KafkaBus]:
    """A bus with the topic `t` of one partition, on a broker of its own."""
    with tempfile.TemporaryDirectory() as folder:
        embedded = EmbeddedBroker(Path(folder) / "broker", settings=FSYNC if fsync else {})
        state = embedded.start()
        try:
            KafkaCluster(state.bootstrap, "run").create("t", 1)
            yield KafkaBus(state.bootstrap, "run", outage_s=LIMIT_S)
        finally:
            embedded.stop()


def committed_per_s(bus: KafkaBus, num: int, size: int) -> float:
    """Records that one writer commits in a second, `num` a transaction."""
    records = [Outgoing(topic="t", key=b"k", value=(bytes(size),), partition=0) for _ in range(num)]
    with bus.producer("writer") as producer:
        producer.commit(records)
        begun_s, commits = time.perf_counter(), 0
        while (seconds := time.perf_counter() - begun_s) < SECONDS or not commits:
            producer.commit(records)
            commits += 1
    return commits * num / seconds


def fsync_shares() -> dict[str, Any]:
    """By load: medians of both sides, and what remains."""
    found: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in LOADS}
    with ExitStack() as stack:
        buses = {is_on: stack.enter_context(broker(fsync=is_on)) for is_on in (False, True)}
        for _ in range(ROUNDS):
            for name, (num, size) in LOADS.items():
                for is_on, bus in buses.items():
                    found[name][is_on].append(committed_per_s(bus, num, size))
    told = {}
    for name, sides in found.items():
        without, forced = (statistics.median(sides[is_on]) for is_on in (False, True))
        told[name] = {
            "records_per_s": round(without, 1),
            "records_per_s_fsync": round(forced, 1),
            "ratio": round(forced / without, 3),
        }
    return told


def told_ms() -> dict[str, Any]:
    """Milliseconds until all readers have a version, over `VERSIONS` of them."""
    came_s: list[list[float]] = [[] for _ in range(READERS)]
    sent_s: list[float] = []
    with broker(fsync=False) as bus:

        def wait_for_all(mine: list[float]) -> None:
            until_s = time.monotonic() + LIMIT_S
            with bus.reader({TOPIC: 0}) as reader:
                while len(mine) < VERSIONS and time.monotonic() < until_s:
                    found = len(reader.poll(100, 0.1))
                    mine += [time.perf_counter()] * found

        threads = [threading.Thread(target=wait_for_all, args=(mine,)) for mine in came_s]
        for thread in threads:
            thread.start()
        version = Outgoing(topic="t", key=b"v", value=(bytes(VERSION_BYTES),), partition=0)
        with bus.producer("trainer") as producer:
            for _ in range(VERSIONS):
                sent_s.append(time.perf_counter())
                producer.commit([version])
                time.sleep(PAUSE_S)
        for thread in threads:
            thread.join(LIMIT_S)
    assert all(len(mine) == VERSIONS for mine in came_s), [len(mine) for mine in came_s]
    waits_ms = sorted(
        1000 * (max(came) - sent) for sent, *came in zip(sent_s, *came_s, strict=True)
    )
    return {
        "readers": READERS,
        "versions": VERSIONS,
        "p50": round(statistics.median(waits_ms), 1),
        "p99": round(waits_ms[int(0.99 * len(waits_ms))], 1),
        "worst": round(waits_ms[-1], 1),
    }


def main() -> None:
    """Both, shown and kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", action="store_true", help=f"into {RESULTS.name}/")
    args = parser.parse_args()
    told: dict[str, Any] = {"script": "tests/bench/broker_costs.py", "hardware": hardware()}
    told |= {"fsync": fsync_shares(), "told_ms": told_ms()}
    sys.stdout.write(json.dumps(told, indent=1) + "\n")
    if args.save:
        path = RESULTS / f"broker_costs-{time.strftime('%Y-%m-%d')}.json"
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""What `broker.fsync` costs: the same transactions to two brokers, turn by turn, in one run.

    python -m tests.bench.fsync --rounds 5 --json tests/bench/results/fsync-DATE.json

One broker has Kafka's default (the page cache: survives killed processes), the other one forces
every append to disk before it answers (survives a power cut). Rounds alternate, so that both see
the same machine. A transaction carries what a worker finishes in 100 ms, or one record alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rlstreams.streams.broker.config import FSYNC
from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import TRAJECTORIES

RUN = "fsync"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one transaction carries."""

    name: str
    records: int
    record_bytes: int


LOADS = (
    Load(name="one record of 4 kB", records=1, record_bytes=4_096),
    Load(name="100 records of 4 kB", records=100, record_bytes=4_096),
    Load(name="20 records of 100 kB", records=20, record_bytes=100_000),
    Load(name="2 records of 12 MB", records=2, record_bytes=12_000_000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One load, medians over the rounds."""

    load: str
    records_per_s: float
    records_per_s_fsync: float
    ratio: float  # with fsync to without, median of the rounds' ratios
    commit_ms: float
    commit_ms_fsync: float


def measure(buses: dict[bool, Bus], load: Load, rounds: int, seconds: float) -> Result:
    """Alternate between the two brokers."""
    times: dict[bool, list[list[float]]] = {False: [], True: []}
    value = os.urandom(load.record_bytes)
    with ExitStack() as stack:
        pens = {forced: stack.enter_context(bus.producer("w.0")) for forced, bus in buses.items()}
        for round_ in range(rounds + 1):
            for forced in (False, True):
                taken: list[float] = []
                until_s = time.perf_counter() + seconds
                while time.perf_counter() < until_s or not taken:
                    records = [
                        Outgoing(topic=TRAJECTORIES.name, key=str(i).encode(), value=[value])
                        for i in range(load.records)
                    ]
                    start_s = time.perf_counter()
                    pens[forced].commit(records)
                    taken.append(time.perf_counter() - start_s)
                if round_:  # the first one warms up
                    times[forced].append(taken)
    rates = {
        forced: [load.records * len(taken) / sum(taken) for taken in of]
        for forced, of in times.items()
    }
    pairs = zip(rates[True], rates[False], strict=True)
    commits = {f: statistics.median(t for taken in of for t in taken) for f, of in times.items()}
    return Result(
        load=load.name,
        records_per_s=statistics.median(rates[False]),
        records_per_s_fsync=statistics.median(rates[True]),
        ratio=statistics.median(forced / lax for forced, lax in pairs),
        commit_ms=1000 * commits[False],
        commit_ms_fsync=1000 * commits[True],
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one round")
    parser.add_argument("--dir", default="", help="folder of both brokers; empty: a temporary one")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = args.dir or stack.enter_context(tempfile.TemporaryDirectory())
        buses: dict[bool, Bus] = {}
        for forced in (False, True):
            broker = EmbeddedBroker(
                Path(folder) / f"fsync-{forced}", settings=FSYNC if forced else {}
            )
            bootstrap = broker.start().bootstrap
            stack.callback(broker.stop)
            plan = TopicPlan(rollout_workers=1, logprob_workers=1, fsync=forced)
            apply(bootstrap, RUN, plan)
            buses[forced] = KafkaBus(bootstrap, RUN)
        results = [measure(buses, load, args.rounds, args.seconds) for load in LOADS]
    for result in results:
        print(  # noqa: T201
            f"{result.load:<22} {result.records_per_s:8,.0f} records/s, with fsync "
            f"{result.records_per_s_fsync:8,.0f} (x {result.ratio:.2f}); a commit "
            f"{result.commit_ms:.1f} ms, with fsync {result.commit_ms_fsync:.1f} ms"
        )
    if args.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        told = {"machine": machine, "rounds": args.rounds, "seconds": args.seconds,
                "results": [asdict(result) for result in results]}  # fmt: skip
        Path(args.json).write_text(json.dumps(told, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()

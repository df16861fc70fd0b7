"""How long a broker is back before its clients commit again, by the longest pause of their tries.

    python tests/bench/broker_return.py [--rounds 5] [--save]

The embedded broker is killed while two writers commit one transaction after the other, and started
again. Figures are seconds from the moment that it serves to the first commit of each writer, which
began before the kill: under the client's own pause of at most 10 s, and under ours.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.record import Outgoing
from tests.bench.hardware import hardware
from tests.contract.buses import KafkaCluster

LIBRARY = {"reconnect.backoff.max.ms": "10000"}  # librdkafka's default
SIDES: dict[str, dict[str, str]] = {"library": LIBRARY, "ours": {}}
WRITERS = 2
LIMIT_S = 60.0
RESULTS = Path(__file__).parent / "results"


def write(bus: KafkaBus, name: str, ends_s: list[float], enough: threading.Event) -> None:
    """Commit until it is enough; `ends_s` gets when each commit was done."""
    with bus.producer(name) as producer:
        while not enough.is_set():
            producer.commit([Outgoing(topic="t", key=b"k", value=(b"x",), partition=0)])
            ends_s.append(time.monotonic())


def measured(options: dict[str, str], rounds: int) -> dict[str, Any]:
    """Kills of one broker, one after the other."""
    returns_s: list[float] = []
    starts_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        state = broker.start()
        KafkaCluster(state.bootstrap, "run").create("t", 1)
        bus = KafkaBus(state.bootstrap, "run", outage_s=LIMIT_S, options=options)
        enough, ends_s = threading.Event(), [list[float]() for _ in range(WRITERS)]
        writers = [
            threading.Thread(target=write, args=(bus, f"writer-{n}", own, enough))
            for n, own in enumerate(ends_s)
        ]
        for writer in writers:
            writer.start()
        try:
            for _ in range(rounds):
                time.sleep(2.0)
                killed_s = time.monotonic()
                os.kill(state.pid, signal.SIGKILL)
                time.sleep(0.2)
                counts = [len(own) for own in ends_s]
                state = broker.start()
                serves_s = time.monotonic()
                starts_s.append(round(serves_s - killed_s, 2))
                for own, count in zip(ends_s, counts, strict=True):
                    while len(own) == count:
                        assert time.monotonic() < serves_s + LIMIT_S, "no commit after the return"
                        time.sleep(0.01)
                    returns_s.append(round(max(0.0, own[count] - serves_s), 2))
        finally:
            enough.set()
            for writer in writers:
                writer.join(LIMIT_S)
            broker.stop()
    median_s = round(statistics.median(returns_s), 2)
    return {"to_commit_s": returns_s, "median_s": median_s, "worst_s": max(returns_s),
            "away_s": starts_s}  # fmt: skip


def main() -> None:
    """Both sides, shown and kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help=f"into {RESULTS.name}/")
    args = parser.parse_args()
    told: dict[str, Any] = {"script": "tests/bench/broker_return.py", "hardware": hardware()}
    for side, options in SIDES.items():
        told[side] = measured(options, args.rounds)
        sys.stdout.write(f"{side} {json.dumps(told[side])}\n")
    if args.save:
        path = RESULTS / f"broker_return-{time.strftime('%Y-%m-%d')}.json"
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

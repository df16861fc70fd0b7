"""Publish, durable, arrays: our data path as a ratio to the bare client on the same broker.

    python tests/bench/data_path.py [--quick] [--save] [--payloads SML] [--partitions N]

One process sends transactions with positions and done set, another reads committed messages to
numpy arrays; a broker of one node lies between. Payloads: S 1,024 tokens with log-probs, M 16,384,
L 8,192 with routed experts (48 layers, top 8).

The broker first serves as many small transactions as a minute of a run has, for it interprets its
code until its compiler has seen enough of it, and compiles beside the measurement otherwise.
Rounds in which the rows take turns, the order turning round every time, for the machine drifts. A
round is long against a transaction: the first is encoded before anything flows, and the last is
read when nothing does any more, which in rounds of half a second was two transactions of five. The
broker's log lies in memory where there is room (`/dev/shm`): on a disk the rounds of one row
differ by more than the rows do. A virtual machine whose host takes free memory back still halves
every row for minutes. So a ratio is taken within each round, of neighbors in time, and the median
of them is given; beside it stands where it lies when rounds are drawn again with replacement
(bootstrap, 90 %). Goals: ours / bare at least 0.6 (S), 0.9 (M) and 0.9 (L), and transactions at
most 15 % below our own records sent by an idempotent producer without them (row `no txn`).

A topic has as many partitions as two log-prob workers make it have, unless `--partitions` says
otherwise. In each transaction the broker verifies every partition once before it takes the first
batch, one after the other, so what a transaction costs grows with them: 16 are eight workers'.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from rlstreams.streams.broker.embedded import EmbeddedBroker
from tests.bench.data_path_ends import pool
from tests.bench.data_path_processes import Bench
from tests.bench.hardware import hardware

GOALS = {"S": 0.6, "M": 0.9, "L": 0.9}
MAX_COST = 0.15  # of transactions
ROWS = ("bare", "ours", "no txn")
DRAWS = 2_000

Rounds = list[dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long what is measured."""

    rounds: int
    send_s: float


FULL = Plan(rounds=7, send_s=2.5)
QUICK = Plan(rounds=3, send_s=1.5)
MEMORY = Path("/dev/shm")
ROOM_BYTES = 8_000_000_000  # a round writes up to 4 GB, and the one before is just removed


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Median over the rounds of one row by another, and where nine of ten redraws put it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Rows of the same rounds, in order; a round is drawn with both of its values."""
    ratios = np.divide(ours, theirs)
    rounds = np.random.default_rng(0).integers(0, len(ratios), (DRAWS, len(ratios)))
    low, high = np.quantile(np.median(ratios[rounds], axis=1), (0.05, 0.95))
    value = float(np.median(ratios))
    return Ratio(value=round(value, 3), low=round(float(low), 3), high=round(float(high), 3))


def measure(bench: Bench, name: str, plan: Plan) -> dict[str, Any]:
    """One payload: rounds in turns."""
    for row in ROWS:
        bench.throughput(row, name, 1.0)  # the broker's compiler and caches warm up
    found: dict[str, Rounds] = {row: [] for row in ROWS}
    for number in range(plan.rounds):
        for row in ROWS if number % 2 == 0 else ROWS[::-1]:
            found[row].append(bench.throughput(row, name, plan.send_s))
    per_s = {row: [round_["per_s"] for round_ in found[row]] for row in ROWS}
    rows = {row: _medians(found[row]) for row in ROWS}
    return {
        "bytes": pool(name)[0].num_bytes,
        "rows": rows,
        "ours_over_bare": ratio_of(per_s["ours"], per_s["bare"]),
        "ours_over_no_txn": ratio_of(per_s["ours"], per_s["no txn"]),
        "rounds_per_s": {row: [round(v, 1) for v in values] for row, values in per_s.items()},
    }


def log_folder() -> Path:
    """Where the broker's log lies: in memory if there is room, else where temporary files do."""
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ROOM_BYTES:
        return MEMORY
    return Path(tempfile.gettempdir())


def _medians(rounds: Rounds) -> dict[str, float]:
    return {key: round(statistics.median(r[key] for r in rounds), 2) for key in rounds[0]}


def table(results: Mapping[str, Any]) -> str:
    """The results as lines of text."""
    lines = [
        f"   {'row':8} {'per s':>8} {'MB/s':>6} {'CPU s/GB':>9}"
        f" {'of sender':>9} {'of reader':>9} {'txn ms':>6}"
    ]
    for name, result in results.items():
        for row, r in result["rows"].items():
            lines.append(
                f"{name:2} {row:8} {r['per_s']:8,.0f} {r['mb_per_s']:6,.0f}"
                f" {r['cpu_s_per_gb']:9.2f}"
                f" {r['sender_cpu_s_per_gb']:9.2f} {r['receiver_cpu_s_per_gb']:9.2f}"
                f" {r['transaction_ms']:6.0f}"
            )
    lines.append("")
    for name, result in results.items():
        cost = result["ours_over_no_txn"]
        lines.append(
            f"{name}: ours / bare {result['ours_over_bare']}, goal {GOALS[name]}; transactions cost"
            f" {1 - cost.value:.0%} ({1 - cost.high:.0%} to {1 - cost.low:.0%}) against idempotent"
            f" only, goal {MAX_COST:.0%}"
        )
    return "\n".join(lines)


def missed(results: Mapping[str, Any]) -> list[str]:
    """Goals that the results are below of."""
    return [
        *(f"{n}: ours / bare" for n, r in results.items() if r["ours_over_bare"].value < GOALS[n]),
        *(
            f"{n}: cost of transactions"
            for n, r in results.items()
            if 1 - r["ours_over_no_txn"].value > MAX_COST
        ),
    ]


def main() -> None:
    """Run it, print the table; exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, 2 minutes")
    parser.add_argument("--save", action="store_true", help="keep them under results/")
    parser.add_argument("--payloads", default="SML", help="which of S, M and L")
    parser.add_argument("--partitions", type=int, default=4, help="of the topic; 4")
    parser.add_argument("--log-folder", type=Path, default=log_folder(), help="of the broker")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    start_s = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # stops the broker
    with tempfile.TemporaryDirectory(dir=options.log_folder) as folder:
        broker = EmbeddedBroker(Path(folder))
        state = broker.start()
        try:
            with closing(Bench(state.bootstrap, state.pid, options.partitions)) as bench:
                bench.exercise("S")
                results = {name: measure(bench, name, plan) for name in options.payloads}
        finally:
            broker.stop()
    sys.stdout.write(
        table(results)
        + f"\n{options.partitions} partitions, {time.monotonic() - start_s:.0f} s, log in "
        f"{options.log_folder}\n"
    )
    if options.save:
        name = f"data_path-{options.partitions}-partitions-{time.strftime('%Y-%m-%d')}.json"
        path = Path(__file__).parent / "results" / name
        path.parent.mkdir(exist_ok=True)
        saved = {
            "hardware": hardware(),
            "num_partitions": options.partitions,
            "rounds": plan.rounds,
            "log_folder": str(options.log_folder),
            "results": results,
        }
        text = json.dumps(saved, indent=2, default=dataclasses.asdict)
        path.write_text(text + "\n", encoding="utf-8")
    below = missed(results)
    sys.exit(f"goals missed: {', '.join(below)}" if below else 0)


if __name__ == "__main__":
    main()

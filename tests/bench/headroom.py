"""What partitions cost that no worker of today needs: the demo with 2 and with more, by turns.

    python -m tests.bench.headroom [--folder DIR] [--json FILE] [--rounds 3] [--partitions 2 64]

Each run is the demo without kills and evaluations. Written are the seconds from its start to its
first step, those between two steps, and the processor's seconds of all its processes, broker
included; and each as a ratio to the fewest partitions. On a machine that does other work too the
last one says more.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import time
from pathlib import Path

import rlstreams
from tests.bench.hardware import hardware


def one_run(run_id: str, partitions: int, args: argparse.Namespace) -> dict[str, float]:
    """Seconds to the first step, the mean of those between two steps, and processor seconds."""
    started_s, before_s = time.monotonic(), cpu_s()
    run = rlstreams.run(
        "example:demo.toml",
        run={"id": run_id, "dir": str(args.folder / "{id}")},
        broker={"headroom": partitions},
        prompts={"evaluate_rows": 1},
        trainer={"steps": args.steps},
        demo={"kills": []},
    )
    seen_s = [time.monotonic() for _ in run]
    assert "complete" == run.outcome, run.outcome
    shutil.rmtree(args.folder / run_id)
    each_s = (seen_s[-1] - seen_s[1]) / (len(seen_s) - 2)
    first_s = seen_s[0] - started_s
    return {"first_step_s": first_s, "step_s": each_s, "cpu_s": cpu_s() - before_s}


def cpu_s() -> float:
    """Processor seconds of all processes that we started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/headroom"))
    parser.add_argument("--json", type=Path, default=Path("headroom.json"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--partitions", type=int, nargs="+", default=[2, 64])
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    runs: dict[int, list[dict[str, float]]] = {number: [] for number in args.partitions}
    for turn in range(args.rounds):
        order = args.partitions if turn % 2 else args.partitions[::-1]  # neither is always first
        for number in order:
            runs[number].append(one_run(f"p{number}-{turn}", number, args))
    medians = {
        number: {name: statistics.median(run[name] for run in of) for name in of[0]}
        for number, of in runs.items()
    }
    least = medians[min(medians)]
    ratios = {
        number: {name: round(value / least[name], 3) for name, value in found.items()}
        for number, found in medians.items()
    }
    found = {"medians": medians, "ratios": ratios, "runs": runs, "hardware": hardware()}
    args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

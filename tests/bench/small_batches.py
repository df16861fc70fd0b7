"""Made-up runs of 4 to 16 samples a step: how many of them have a cause named, after which sample.

    python -m tests.bench.small_batches [--seeds N] [--save RULES]

The runs are those of `tests/unit/streams/simulated_learning.py`, the checks three of
`streams/views/learning.py`, each asked after every step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rlstreams.streams.views.learning import nothing_to_learn, stays, too_alike
from tests.bench.hardware import hardware
from tests.unit.streams.simulated_learning import SHAPES, named_after

RESULTS = Path(__file__).parent / "results"
KINDS = ("learns", "easy", "sparse", "hard", "lost", "certain")
NUM_SAMPLES = 2400
CHECKS = (nothing_to_learn, too_alike, stays)


def measured(seeds: int) -> dict[str, Any]:
    """By kind and shape: for each check that named a cause, in how many runs, and when."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        for shape in SHAPES:
            runs = [named_after(CHECKS, kind, shape, seed, NUM_SAMPLES) for seed in range(seeds)]
            found[f"{kind}, {shape}"] = {
                name: {"runs": len(at), "median": statistics.median_low(at), "last": max(at)}
                for check in CHECKS
                if (at := [run[name] for run in runs if (name := check.__name__) in run])
            }
            sys.stdout.write(f"{kind}, {shape}: {json.dumps(found[f'{kind}, {shape}'])}\n")
            sys.stdout.flush()
    return found


def main() -> None:
    """Measure; shown and kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--save", metavar="RULES", help=f"into {RESULTS.name}/, under this name")
    args = parser.parse_args()
    found = measured(args.seeds)
    if args.save:
        path = RESULTS / f"small_batches-{time.strftime('%Y-%m-%d')}.json"
        told = json.loads(path.read_text("utf-8")) if path.exists() else {}
        told |= {
            "script": "tests/bench/small_batches.py", "hardware": hardware(),
            "seeds": args.seeds, "num_samples": NUM_SAMPLES,
        }  # fmt: skip
        told.setdefault("rules", {})[args.save] = found
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

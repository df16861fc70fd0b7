"""How often `replay bisect` names the step and `replay blame` the group that broke a small run.

    python -m tests.bench.blame [--seeds 10] [--clean 5] [--json FILE]

Runs of twelve steps in one process, of which one group's rewards are poisoned; and clean ones.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rlstreams.debug.blame.band import Band
from rlstreams.debug.blame.bisect import bisect
from rlstreams.debug.blame.blame import blame
from rlstreams.debug.blame.series import series
from rlstreams.words.spelling import NUMBERS
from tests.bench.hardware import hardware
from tests.heavy.blame.run_stand import BAD_STEP, POISONS, STEPS, small_run

FALL = 0.15  # of the held-out reward below that of the version before the poison
SPAN = range(BAD_STEP - 1, BAD_STEP + 2)


def one(seed: int, poison: str) -> dict[str, Any]:
    """What is found in one run."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        run = small_run(Path(name), seed, poison)
        made_s, log = time.monotonic() - started_s, run.opened()
        folders = [run.folder / "checkpoints"]
        points = series(log)["held_out"]
        low = max(p.value for p in points if p.step < BAD_STEP) - FALL
        cut = bisect(log, run.config, "held_out", band=Band(low=low, high=2.0), checkpoints=folders)
        bisected_s = time.monotonic() - started_s - made_s
        by_held_out = blame(
            log, run.config, SPAN, metric="held_out", at=STEPS, checkpoints=folders, spelled=NUMBERS
        )
        blamed_s = time.monotonic() - started_s - made_s - bisected_s
        by_gradient = blame(
            log,
            run.config,
            range(BAD_STEP - 1, BAD_STEP + 1),
            metric="grad_norm",
            at=BAD_STEP,
            checkpoints=folders,
            spelled=NUMBERS,
        )
        effects = by_held_out.effects
        return {
            "seed": seed,
            "poison": poison,
            "bad": run.bad,
            "held_out": {str(p.step): round(p.value, 4) for p in cut.points},
            "step": None if cut.departure is None else cut.departure.point.step,
            "blamed": [e.name for e in by_held_out.to_blame],
            "blamed_by_gradient": [e.name for e in by_gradient.to_blame],
            "effect": effects[0].effect if effects else None,
            "border": by_held_out.border,
            "experiments": by_held_out.num_experiments,
            "make_s": round(made_s, 1),
            "bisect_s": round(bisected_s, 1),
            "blame_s": round(blamed_s, 1),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--clean", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("blame.json"))
    args = parser.parse_args()
    rows = []
    kinds = [*POISONS]
    poisons = [kinds[seed % len(kinds)] for seed in range(args.seeds)]
    for seed, poison in [*enumerate(poisons), *((seed, "") for seed in range(args.clean))]:
        rows.append(one(seed, poison))
        found = {"hardware": hardware(), "rows": rows}
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

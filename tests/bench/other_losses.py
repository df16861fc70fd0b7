"""How the demo learns under losses that no other script runs: GSPO by its bounds, and SFT.

    python -m tests.bench.other_losses [--folder DIR] [--json FILE] [--seeds 2]

Each row is so many whole runs on the CPU, without kills; runs that are there are not done again.
GSPO has old samples (bound 4): to the version that sampled its ratio holds their staleness, to the
step's start (two mini-batches) what the step itself has changed. SFT learns from right answers
alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench.hardware import hardware
from tests.bench.stability import one_run

GSPO: dict[str, Any] = {"kind": "gspo", "reduce": "sequence"}
PAPER: dict[str, Any] = {"clip_low": 3e-4, "clip_high": 4e-4}
SFT: dict[str, Any] = {
    "kind": "sft",
    "advantage": "one",
    "reward_min": 1.0,
    "correction": "none",
    "proximal": "behavior",
}
ROWS: Mapping[str, dict[str, Any]] = {
    "gspo, bounds of ppo": {"max_staleness": 4, "loss": GSPO},
    "gspo, 0.03 and 0.04": {
        "max_staleness": 4,
        "loss": GSPO | {"clip_low": 0.03, "clip_high": 0.04},
    },
    "gspo, 3e-4 and 4e-4": {"max_staleness": 4, "loss": GSPO | PAPER},
    "gspo, 3e-4 and 4e-4, to the step's start, two mini-batches": {
        "max_staleness": 4,
        "minibatches": 2,
        "loss": GSPO | PAPER | {"proximal": "step_start"},
    },
    "sft on right answers": {"loss": SFT},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/other_losses"))
    parser.add_argument("--json", type=Path, default=Path("other_losses.json"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-4)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    runs = [
        one_run(f"l{number}-{seed}", {"loss": name}, seed, args, trainer)
        for seed in range(args.seeds)
        for number, (name, trainer) in enumerate(ROWS.items())
    ]
    found = {"lr": args.lr, "steps": args.steps, "runs": runs, "hardware": hardware()}
    args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

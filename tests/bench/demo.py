"""The demo's run, by seed, and its control: held-out accuracy, seconds, kills, redone hashes.

    python tests/bench/demo.py [--seeds 0 1 2] [--save]

Each is `rlstreams up infra/examples/demo.toml` with three kills on the way, as `make run` starts
it; the control has its rewards permuted within each batch. Figures are from the run's own log;
`wall_s` is of the whole command, start and end included.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlstreams.workers.config.load import load
from tests.bench.hardware import hardware
from tests.gpu.whole_run import run_it, told_by_the_log

DEMO = Path(__file__).parents[2] / "infra/examples/demo.toml"
RESULTS = Path(__file__).parent / "results"
LIMIT_S = 600.0
CONTROL = "trainer.control=permuted"


def measured(words: list[str], folder: Path) -> dict[str, Any]:
    """A run to its end, in that folder."""
    words = [f"run.dir={folder}/{{id}}", *words]
    config = load([DEMO], words)
    started_s = time.monotonic()
    status = run_it([DEMO], words, Path(config.folder), LIMIT_S)
    wall_s = round(time.monotonic() - started_s, 1)
    said = (Path(config.folder) / "up.log").read_text(encoding="utf-8")
    told = told_by_the_log(config)
    curve = [[step, round(accuracy, 4), num] for step, accuracy, num in told["accuracy"]]
    return {
        "status": status,
        "wall_s": wall_s,
        "steps": told["steps"],
        "first_step_to_last_s": round(told["seconds_of_steps"], 1),
        "held_out": curve,
        "killed": said.count("KILLED"),
        "redone": [line for line in said.splitlines() if "weight hashes equal" in line],
        "audit_ok": told["audit_ok"],
    }


def main() -> None:
    """All runs, shown and kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="instead of the demo's own")
    parser.add_argument("--save", action="store_true", help=f"into {RESULTS.name}/")
    args = parser.parse_args()
    told: dict[str, Any] = {"script": "tests/bench/demo.py", "hardware": hardware()}
    cases = {f"seed {seed}": [f"run.seed={seed}"] for seed in args.seeds}
    cases["control"] = [CONTROL]
    more = [f"trainer.steps={args.steps}"] if args.steps else []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, words) in enumerate(cases.items()):
            told[name] = measured([*words, *more, f"run.id=demo-{number}"], Path(folder))
            told[name]["load_average"] = round(os.getloadavg()[0], 1)
            sys.stdout.write(f"{name} {json.dumps(told[name])}\n")
            sys.stdout.flush()
    if args.save:
        path = RESULTS / f"demo-{time.strftime('%Y-%m-%d')}.json"
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

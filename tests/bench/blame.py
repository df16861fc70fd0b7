"""How often the evidence names the step and the group of the demo that were poisoned.

    python -m tests.bench.blame [--seeds 10] [--json FILE]

Each seed is the demo's run, in one process, up to step 29; from there on one run whose step 30 is
clean, and one for each poison. `replay bisect` looks at all steps, `replay blame` at three of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlstreams.debug.evidence.evidence import evidence
from rlstreams.words.spelling import spelling
from tests.bench.hardware import hardware
from tests.heavy.blame.run_stand import POISONS, Run, demo

BAD_STEP, LAST = 30, 32
MEASURED = ("rewards inverted", "tokens swapped", "tokens swapped behind the scorer")


def looked_into(run: Run) -> dict[str, Any]:
    """What is found in one run, and the time that it takes."""
    found: dict[str, Any] = {"bad": run.bad.strip() if run.bad != "group " else ""}
    spelled = spelling("", run.config.model.path)
    folders = [run.folder / "checkpoints"]
    with _timed(found, "bisect"):
        scan = evidence(run.opened(), run.config, range(1, 1000), spelled=spelled)
    with _timed(found, "blame"):
        steps = range(BAD_STEP - 1, BAD_STEP + 2)
        near = evidence(
            run.opened(), run.config, steps, spelled=spelled, redo=True, checkpoints=folders
        )
    found |= {
        "step": scan.first_step,
        "blamed_by_bisect": [f"group {group}" for group in scan.by_group],
        "blamed": [f"group {group}" for group in near.by_group],
        "checks": {check.name: len(check.found) for check in near.checks if check.found},
        "unchecked": sum(check.unchecked.total() for check in near.checks),
        "steps": scan.last,
        "samples": scan.num_samples,
    }
    return found


@contextmanager
def _timed(found: dict[str, Any], name: str) -> Iterator[None]:
    wall_s, cpu_s = time.monotonic(), time.process_time()
    yield
    found[f"{name}_s"] = round(time.monotonic() - wall_s, 1)
    found[f"{name}_cpu_s"] = round(time.process_time() - cpu_s, 1)


def runs(folder: Path, seed: int) -> Iterator[tuple[str, Run]]:
    """The clean run of a seed, and one of each poison."""
    begun = demo(folder / "clean", seed, trainer__checkpoint_every=BAD_STEP - 1)
    begun.go_on(BAD_STEP - 1)
    for poison in MEASURED:
        other = begun.fork(folder / poison.replace(" ", "-"))
        other.go_on(LAST, BAD_STEP, POISONS[poison])
        yield poison, other.run()
    begun.go_on(LAST)
    yield "", begun.run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", type=Path, default=Path("blame.json"))
    args = parser.parse_args()
    rows = []
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as name:
            for poison, run in runs(Path(name), seed):
                rows.append({"seed": seed, "poison": poison, **looked_into(run)})
                found = {"hardware": hardware(), "rows": rows}
                args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

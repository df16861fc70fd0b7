"""How often the evidence names the step and the group of the demo that were poisoned.

    python -m tests.bench.blame [--seeds 10] [--experiments | --opinion] [--json FILE]

Each seed is the demo's run, in one process, up to step 29; from there on one run whose step 30 is
clean, and one for each poison. `replay bisect` looks at all steps, `replay blame` at three of them.
With `--experiments` only these are made, as with a grader that is wrong by its code: in runs of
twelve steps of which one group is poisoned, and in two clean ones. With `--opinion` such runs, and
some whose grader has a hole from step 8 on, are judged by another grader, which is wrong itself
for some answers.
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

from rlstreams.debug.blame.band import Band
from rlstreams.debug.blame.bisect import bisect
from rlstreams.debug.blame.blame import blame
from rlstreams.debug.blame.series import series
from rlstreams.debug.evidence.evidence import evidence
from rlstreams.debug.evidence.opinion import opinion
from rlstreams.debug.rejudge.rejudge import grader_of
from rlstreams.words.spelling import NUMBERS, spelling
from tests.bench.hardware import hardware
from tests.heavy.blame.run_stand import BAD_STEP as SMALL_BAD_STEP
from tests.heavy.blame.run_stand import GROUPS, POISONS, STEPS, Run, Stand, demo, small_run

BAD_STEP, LAST = 30, 32
FALL = 0.15  # of the held-out reward below that of the version before the poison
BY_CODE = ("inverted and scaled", "length")
HOLE = "a hole"
ERRORS = (0.0, 0.02, 0.05, 0.1, 0.2)  # shares of answers for which the other grader is wrong
OTHER = """
import re, zlib

def other(prompt, completion, answer, metadata, errors=0.0):
    said = re.findall(r"-?[0-9]+", completion)
    right = bool(said) and said[-1] == answer
    draw = zlib.crc32(f"{prompt} {completion}".encode()) % 1000
    return float(right != (draw < 1000 * errors))
"""
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


def experiment(seed: int, poison: str) -> dict[str, Any]:
    """What experiments find in one small run."""
    with tempfile.TemporaryDirectory() as name:
        run = small_run(Path(name), seed, poison)
        log, folders = run.opened(), [run.folder / "checkpoints"]
        found: dict[str, Any] = {"seed": seed, "poison": poison, "bad": run.bad}
        points = series(log)["held_out"]
        low = max(p.value for p in points if p.step < SMALL_BAD_STEP) - FALL
        with _timed(found, "bisect"):
            band = Band(low=low, high=2.0)
            cut = bisect(log, run.config, "held_out", band=band, checkpoints=folders)
        found["step"] = None if cut.departure is None else cut.departure.point.step
        given: dict[str, Any] = {"checkpoints": folders, "spelled": NUMBERS}
        span = range(SMALL_BAD_STEP - 1, SMALL_BAD_STEP + 2)
        with _timed(found, "blame"):
            who = blame(log, run.config, span, metric="held_out", at=STEPS, **given)
        own = blame(log, run.config, span[:2], metric="grad_norm", at=SMALL_BAD_STEP, **given)
        return found | {
            "held_out": {str(p.step): round(p.value, 4) for p in cut.points},
            "blamed": [one.name for one in who.to_blame],
            "blamed_by_gradient": [one.name for one in own.to_blame],
            "experiments": who.num_experiments,
        }


def opinions(folder: Path, seed: int) -> Iterator[dict[str, Any]]:
    """What other graders find in small runs that are alike up to the step before the poison."""
    file = folder / "other.py"
    file.write_text(OTHER)
    options: dict[str, Any] = {"trainer__checkpoint_every": SMALL_BAD_STEP - 1}
    begun = Stand(folder / "begun", seed, steps=STEPS, groups=GROUPS, **options)
    begun.go_on(SMALL_BAD_STEP - 1)
    for poison in (*BY_CODE, HOLE, ""):
        stand = begun.fork(folder / (poison.replace(" ", "-") or "clean"))
        stand.go_on(STEPS, SMALL_BAD_STEP if poison else 0, POISONS.get(poison))
        run = stand.run()
        spelled = spelling("", run.config.model.path)
        for errors in ERRORS:
            row = {"seed": seed, "poison": poison, "bad": stand.bad, "errors": errors}
            given = run.config.reward, f"{file}:other", "", [f"errors={errors}"]
            with _timed(row, "opinion"), grader_of(*given) as grader:
                span = range(1, STEPS + 1)
                found = opinion(run.opened(), grader, spelled.plain, run.config.trainer, span)
                row |= {
                    "differing": len(found.differing),
                    "groups": [place.name for place in found.groups],
                    "begins": found.begins and int(found.begins.name),
                }
            row["is_right"] = (
                (row["groups"], row["begins"]) == ([], SMALL_BAD_STEP)
                if (poison == HOLE)
                else row["groups"] == ([stand.bad] if poison else [])
            )
            yield row


def measured(
    seeds: int, *, experiments: bool, other_graders: bool = False
) -> Iterator[dict[str, Any]]:
    """A row for each run."""
    for seed in range(seeds):
        if experiments:
            yield experiment(seed, BY_CODE[seed % len(BY_CODE)])
            continue
        with tempfile.TemporaryDirectory() as name:
            if other_graders:
                yield from opinions(Path(name), seed)
                continue
            for poison, run in runs(Path(name), seed):
                yield {"seed": seed, "poison": poison, **looked_into(run)}
    if experiments:
        yield from (experiment(seed, "") for seed in range(2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--experiments", action="store_true")
    parser.add_argument("--opinion", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("blame.json"))
    args = parser.parse_args()
    rows = []
    for row in measured(args.seeds, experiments=args.experiments, other_graders=args.opinion):
        rows.append(row)
        found = {"hardware": hardware(), "rows": rows}
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Rows for trackers, and a tracker that is killed while it writes: `python made_rows.py FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from rlstreams.show.metrics.picks import COLUMNS
from rlstreams.show.metrics.rows import EVALUATION, STEP, Row
from rlstreams.show.track.sinks import About
from rlstreams.show.track.tracker import Tracker

STEPS, EVERY, AHEAD = 30, 10, 10


def about(folder: Path) -> About:
    config = {"run": {"id": "demo"}, "trainer": {"steps": STEPS}}
    return About(run="demo", identity="demo-1", folder=str(folder), config=config, look="look")


def settings(folder: Path) -> dict[str, dict[str, str]]:
    """All four, none of which needs a network."""
    return {
        "tensorboard": {"folder": str(folder / "tb/{id}")},
        "mlflow": {"uri": f"file:{folder}/mlruns", "experiment": ""},
        "wandb": {"project": "p", "entity": "", "group": "", "mode": "offline"},
        "trackio": {"project": "p", "folder": str(folder / "trackio")},
    }


def rows() -> list[Row]:
    """A step each second; an evaluation comes when the next step is there already."""
    found = []
    for step in range(1, STEPS + 1):
        values = {"policy_version": step, "reward": step / 2, "loss": -1.0, "reward/format": 1.0}
        found.append(Row(kind=STEP, step=step, at_ms=1000 * step, values=values))
        if step % EVERY == 1 and step > 1:
            found.append(evaluation(step - 1))
    return [*found, evaluation(STEPS)]


def evaluation(step: int) -> Row:
    values = {"evaluation/mean_reward": step / 64, "policy_version": step}
    values["evaluation/policy_version"] = values.pop("policy_version")
    sample = dict.fromkeys(COLUMNS, "a | <b>\nx\x1b") | {"sample": f"e{step}-0/0"}
    at_ms = 1000 * step + 1500
    return Row(kind=EVALUATION, step=step, at_ms=at_ms, values=values, samples=[sample])


def main(folder: Path, until: int) -> None:
    """Write until all trackers have `until` rows, some of them more: then die in the middle."""
    tracker = Tracker(settings(folder), about(folder), print)
    for number, row in enumerate(rows()):
        tracker.write([row])
        while (least := min(tracker.taken.values())) < number - AHEAD:
            time.sleep(0.001)
        if least >= until:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

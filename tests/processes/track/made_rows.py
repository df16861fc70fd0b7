"""Rows, and a process that writes them to a tracker: `made_rows.py FOLDER TRACKER UNTIL...`.

At each row UNTIL it is killed, once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from rlstreams.show.metrics.rows import COLUMNS, EVALUATION, STEP, MetricsRow
from rlstreams.show.track.sinks import SINKS, About
from rlstreams.show.track.tracker import Timely

STEPS, EVERY = 30, 10


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


def rows() -> list[MetricsRow]:
    """A step each second; an evaluation comes when the next step is there already."""
    found = []
    for step in range(1, STEPS + 1):
        values = {"policy_version": step, "reward": step / 2, "loss": -1.0, "reward/format": 1.0}
        found.append(MetricsRow(kind=STEP, step=step, at_ms=1000 * step, values=values))
        if step % EVERY == 1 and step > 1:
            found.append(evaluation(step - 1))
    return [*found, evaluation(STEPS)]


def evaluation(step: int) -> MetricsRow:
    values = {"evaluation/mean_reward": step / 64, "policy_version": step}
    values["evaluation/policy_version"] = values.pop("policy_version")
    sample = dict.fromkeys(COLUMNS, "a | <b>\nx\x1b") | {"sample": f"e{step}-0/0"}
    at_ms = 1000 * step + 1500
    return MetricsRow(kind=EVALUATION, step=step, at_ms=at_ms, values=values, samples=[sample])


def main(folder: Path, name: str, kills: list[int]) -> None:
    """Write all rows, one at a time."""
    sink = Timely(lambda: SINKS[name](settings(folder)[name], about(folder)))
    for number, row in enumerate(rows()):
        sink.write([row])
        mark = folder / f"{name}-{number}"
        if number in kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    sink.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(word) for word in sys.argv[3:]])

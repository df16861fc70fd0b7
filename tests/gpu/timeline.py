"""When each step's samples were sampled, scored, taken and trained: of a run's log alone.

    python -m tests.gpu.timeline runs/gsm8k     # or its TOML files

All in seconds since the first step's start. `sampled`: when the first and the last of the step's
samples were; `scored`: when their windows were, and how long the last waited for its score;
`begins`, `ends`: the step. Of every window: how many samples, and which versions scored them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rlstreams.cli.named import configuration, opened_run
from rlstreams.schemas.events import Event, ScoredTrajectory, StepCompleted
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.topics import SCORED, STEPS

READ_S = 120.0
PAGE = 500  # records


def events_of(bus: Bus, topic: str) -> Iterator[Event]:
    """All that is in a topic now.

    Raises:
        TimeoutError: it was not read within `READ_S`; names the topic.
    """
    begins, ends = bus.beginnings(topic), bus.ends(topic)
    until_s = time.monotonic() + READ_S
    with bus.reader(begins) as reader:
        while any(at < ends[partition] for partition, at in reader.positions().items()):
            if time.monotonic() > until_s:
                raise TimeoutError(f"topic {topic} was not read within {READ_S:g} s")
            for record in reader.poll(PAGE, 0.2):
                yield decoded(record).event


def timeline_of(bus: Bus) -> dict[str, Any]:
    """See the module."""
    steps = [event for event in events_of(bus, STEPS.name) if isinstance(event, StepCompleted)]
    scored: dict[tuple[str, int], ScoredTrajectory] = {}
    for event in events_of(bus, SCORED.name):
        if isinstance(event, ScoredTrajectory):  # the first record of a sample wins
            scored.setdefault((event.trajectory.group_id, event.trajectory.sample), event)
    start_ms = min((step.started_at_ms for step in steps), default=0)

    def since(at_ms: float) -> float:
        return round((at_ms - start_ms) / 1000, 2)

    rows = []
    for step in steps:
        own = [scored[s.group_id, s.sample] for s in step.samples]
        last = max(own, key=lambda one: one.scored_at_ms)
        sampled = [one.trajectory.finished_at_ms for one in own]
        rows.append(
            {
                "step": step.step,
                "sampled": [since(min(sampled)), since(max(sampled))],
                "scored": [since(min(one.scored_at_ms for one in own)), since(last.scored_at_ms)],
                "score_lag_s": round(
                    (last.scored_at_ms - last.trajectory.finished_at_ms) / 1000, 2
                ),
                "begins": since(step.started_at_ms),
                "ends": since(step.finished_at_ms),
                "figures": {name: round(step.metrics.get(name, 0.0), 2) for name in FIGURES},
            }
        )
    return {"steps": rows, "windows": _windows(scored, since)}


FIGURES = (
    "train_s",
    "forward_backward_s",
    "hash_s",
    "publish_s",
    "wait_samples_s",
    "wait_scores_s",
)


def _windows(scored: Mapping[Any, ScoredTrajectory], since: Any) -> list[dict[str, Any]]:
    found: dict[tuple[str, int], list[ScoredTrajectory]] = {}
    for one in scored.values():
        found.setdefault((one.instance, one.window), []).append(one)
    return [
        {
            "at": since(max(one.scored_at_ms for one in own)),
            "worker": own[0].worker,
            "samples": own[0].window_size,
            "versions": sorted({score.policy_version for one in own for score in one.scores}),
        }
        for own in sorted(found.values(), key=lambda own: own[0].scored_at_ms)
    ]


def table(found: Mapping[str, Any]) -> str:
    """A line a step, and one of the windows."""
    lines = ["step   sampled first, last    scored first, last    lag    begins     ends   trained"]
    for row in found["steps"]:
        (first, last), (begun, done) = row["sampled"], row["scored"]
        lines.append(
            f"{row['step']:4} {first:11.1f} {last:8.1f} {begun:12.1f} {done:8.1f} "
            f"{row['score_lag_s']:6.1f} {row['begins']:9.1f} {row['ends']:8.1f} "
            f"{row['figures']['train_s']:9.1f}"
        )
    sizes = [window["samples"] for window in found["windows"]]
    lines.append(f"{len(sizes)} windows of samples {sizes}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", nargs="+", help="the run's folder, or its TOML files")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with opened_run(configuration(args.config, [])) as log:
        found = timeline_of(log.bus)
    sys.stdout.write(json.dumps(found, indent=1) + "\n" if args.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

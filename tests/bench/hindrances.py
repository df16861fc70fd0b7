"""The demo, made wrong in one way at a time: what `up` says of it, from which step on.

    python -m tests.bench.hindrances [NAME ...] [--folder DIR] [--save]

Each run is `rlstreams up` without kills. A run that is in the folder already is only read. The
result has the metrics that the checks of `streams/views/learning.py` look at, so that
`tests/unit/streams/test_learning.py` asks them again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from rlstreams.cli.named import opened_run
from rlstreams.show.report.fold import KEPT
from rlstreams.streams.views.feed import Feed, Views, ViewState
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig
from tests.bench.hardware import hardware
from tests.bench.wrong_rewards import rows
from tests.gpu.whole_run import run_it
from tests.unit.streams.recorded_learning import FIELDS, METRICS, said_of

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "infra/examples/demo.toml"
DATA = DEMO.parent / "demo"
RESULTS = Path(__file__).parent / "results"
LIMIT_S = 600.0
LR, VERIFIER, TRAIN = "trainer.optimizer.lr", "reward.verifier", "data.train"
CLIP = "trainer.loss.clip"
CASES: Mapping[str, tuple[int, Mapping[str, Any]]] = {  # steps, and what is set
    **{f"healthy{seed}": (60 if seed == 0 else 40, {"run.seed": seed}) for seed in range(3)},
    "lr100": (40, {LR: 2e-2}),
    "lr10": (30, {LR: 2e-3}),
    "lr001": (40, {LR: 2e-6}),
    "rare": (14, {VERIFIER: "rare"}),
    "trick": (25, {VERIFIER: "trick", TRAIN: "split"}),
    "brief": (25, {VERIFIER: "brief"}),
    "trunc": (6, {"rollout.max_new_tokens": 3}),
    "trunc2": (4, {"rollout.max_new_tokens": 2}),
    "four": (30, {TRAIN: "four"}),
    "hard": (4, {TRAIN: "hard"}),
    "half": (20, {TRAIN: "half"}),
    "halfdrop": (12, {TRAIN: "half", "trainer.equal_rewards": "drop"}),
    "slow": (3, {VERIFIER: "slow"}),
    "raises": (6, {VERIFIER: "raises"}),
    "slots1": (4, {"rollout.slots": 1}),
    "clip1": (6, {f"{CLIP}_low": 1e-5, f"{CLIP}_high": 1e-5, "trainer.minibatches": 4}),
    "stale": (30, {"trainer.max_staleness": 50, LR: 1e-3}),
    "temp2": (20, {"rollout.temperature": 2}),
    "temp01": (12, {"rollout.temperature": 0.05}),
}


def overrides(name: str, folder: Path) -> list[str]:
    """The settings that the run is started with; wrong rows are written into the folder."""
    steps, settings = CASES[name]
    words = [f"run.id={name}", f"run.dir={folder}/{{id}}", f"trainer.steps={steps}"]
    train = [json.loads(line) for line in (DATA / "train.jsonl").read_text("utf-8").splitlines()]
    for field, value in settings.items():
        given = value
        if field == TRAIN:
            given = folder / f"{value}.jsonl"
            given.write_text(rows(value, train), encoding="utf-8")
        elif field == VERIFIER:
            given = f"{ROOT}/tests/bench/wrong_rewards.py:{value}"
        words.append(f"{field}={given}")
    return [*words, "demo.kills=[]"]


def read(config: RunConfig) -> ViewState:
    """All views of the run, from its log."""
    views = Views(keeps=KEPT)
    with opened_run(config) as log, closing(Feed(log.bus, views)) as feed:
        feed.catch_up()
    return views.state


def recorded(state: ViewState, config: RunConfig) -> dict[str, Any]:
    """All that the checks look at, as JSON: a list for each metric, an item a step."""
    steps = state.run.steps
    names = [name for name in (*METRICS, *sorted(steps[-1].metrics)) if name in METRICS
             or name.startswith("reward/")]  # fmt: skip
    claimed = json.loads(state.run.claims[-1].config)

    def field(dotted: str) -> Any:
        found: Any = claimed
        for part in dotted.split("."):
            found = found[part]
        return found

    return {
        "config": {name: field(name) for name in FIELDS},
        "num_samples": steps[-1].num_samples,
        "reward": [round(p.reward, 4) for p in steps],
        "metrics": {
            name: [float(f"{p.metrics.get(name, 0.0):.3g}") for p in steps]
            for name in dict.fromkeys(names)
        },
        "staleness": [
            round(sum(n * t for n, t in p.staleness.items()) / sum(p.staleness.values()), 2)
            for p in steps
        ],
        "cut": [round(state.cut.get(p.step, 0.0), 3) for p in steps],
        "dropped": [p.num_dropped for p in steps],
        "dead_letters": state.dead.num,
        "held_out": [[p.policy_version, round(p.accuracy, 4), p.num_samples]
                     for p in state.evaluation.curve],
        "is_accuracy": state.evaluation.measure == "accuracy",
    }  # fmt: skip


def main() -> None:
    """The named runs, or all; shown and kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--folder", type=Path, help="of the runs; without it one that is removed")
    parser.add_argument("--save", action="store_true", help=f"into {RESULTS.name}/")
    args = parser.parse_args()
    runs: dict[str, Any] = {}
    told = {"script": "tests/bench/hindrances.py", "hardware": hardware(), "runs": runs}
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder or Path(made)
        for name in args.names or CASES:
            words = overrides(name, folder)
            config = load([DEMO], words)
            if not (folder / name / "report.html").is_file():
                run_it([DEMO], words, folder / name, LIMIT_S)
            one = recorded(read(config), config)
            runs[name] = one | {"said": said_of(one)}
            sys.stdout.write(f"{name}: {json.dumps(runs[name]['said'])}\n")
            sys.stdout.flush()
    if args.save:
        path = RESULTS / f"hindrances-{time.strftime('%Y-%m-%d')}.json"
        path.write_text(json.dumps(told) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""How the demo learns from old samples under each correction; and what each makes of one step.

    python -m tests.bench.stability [--folder DIR] [--json FILE] [--seeds 3]

Each row is so many whole runs on the CPU, without kills. In float32 sampler and trainer agree to
1e-6, so all that there is to correct is staleness. In the first two rows it is in the ratio, which
is clipped; in the others (`logprob.place = "trainer"`) in the importance weight, which is bounded
or rejected. Runs that are there are not done again. About an hour on two free cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rlstreams
from tests.bench.hardware import hardware

SAMPLED = "clip at the sampling version"
OLD: dict[str, Any] = {"proximal": "step_start"}  # the weight is of staleness
CORRECTIONS: Mapping[str, dict[str, Any]] = {
    SAMPLED: {},
    "interpolated proximal, TIS": {"proximal": "interpolated"},
    "none": OLD | {"correction": "none"},
    "TIS: truncate tokens at 2": OLD,
    "IcePop: mask tokens, 0.5 to 2": OLD | {"correction": "mask", "weight_floor": 0.5},
    "truncate sequences at 2": OLD | {"correction_level": "sequence"},
    "MIS: mask sequences, 0.5 to 2": OLD
    | {"correction": "mask", "correction_level": "sequence", "weight_floor": 0.5},
    "Geo-RS: mean of 0.99 to 1.01, TIS": OLD
    | {
        "rejection": "k1",
        "rejection_level": "sequence_mean",
        "rejection_low": 0.99,
        "rejection_high": 1.01,
    },
    "decoupled PPO, TIS, two mini-batches": OLD,
}
MINIBATCHES = {"decoupled PPO, TIS, two mini-batches": 2}
MEANS = ("clip_fraction", "kl", "ess", "rejected_fraction", "weight_mean", "grad_norm")
MAXIMA = ("ratio_max", "grad_norm")
AGAIN = ("grad_norm", "clip_fraction", "rejected_fraction", "ess", "weight_mean")


def one_run(
    run_id: str,
    label: dict[str, Any],
    seed: int,
    args: argparse.Namespace,
    trainer: dict[str, Any],
) -> dict[str, Any]:
    """Figures of one run of `args.steps`, from its folder's file if it is there.

    Args:
        label: what of its settings the figures name.
        trainer: its section, without `steps` and `optimizer`.
    """
    found = args.folder / f"{run_id}.json"
    if found.exists():
        return json.loads(found.read_text())
    place = "trainer" if trainer["loss"].get("proximal") == "step_start" else "separate"
    run = rlstreams.run(
        "example:demo.toml",
        run={"id": run_id, "seed": seed, "dir": str(args.folder / "{id}")},
        prompts={"evaluate_every": 10},
        logprob={"place": place},
        trainer={"steps": args.steps, "optimizer": {"lr": args.lr}} | trainer,
        demo={"kills": []},
    )
    steps = list(run)
    assert "complete" == run.outcome
    late = steps[len(steps) // 6 :]  # the first have no old samples yet
    figures: dict[str, Any] = label | {
        "seed": seed,
        "accuracy": [round(e.accuracy, 4) for e in run.evaluations],
        "staleness_mean": statistics.fmean(s.staleness_mean for s in late),
    }
    for metric in MEANS:
        figures[metric] = statistics.fmean(s.metrics.get(metric, 0.0) for s in late)
    for metric in MAXIMA:
        figures[f"{metric}_largest"] = max(s.metrics[metric] for s in steps)
    found.write_text(json.dumps(figures))
    return figures


def corrected(name: str, staleness: int, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """A run under one correction."""
    number = list(CORRECTIONS).index(name)
    trainer = {
        "max_staleness": staleness,
        "minibatches": MINIBATCHES.get(name, 1),
        "loss": CORRECTIONS[name],
    }
    label = {"correction": name, "max_staleness": staleness}
    return one_run(f"c{number}-s{staleness}-{seed}", label, seed, args, trainer)


def again(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A step in the middle of the stalest run, under each correction: the same weights and samples,
    another gradient."""
    from rlstreams.debug.rerun.rerun import rerun
    from rlstreams.streams.run.open_run import open_run
    from rlstreams.workers.config.load import from_json

    number = list(CORRECTIONS).index(SAMPLED)
    folder = args.folder / f"c{number}-s{max(args.staleness)}-0"
    rows = []
    with open_run(folder) as log:
        config = from_json(json.dumps(log.configuration))
        for name, loss in CORRECTIONS.items():
            settings = [f"trainer.loss.{field}={json.dumps(v)}" for field, v in loss.items()]
            settings.append(f"trainer.minibatches={MINIBATCHES.get(name, 1)}")
            found = rerun(
                log.bus,
                config,
                args.steps // 2,
                checkpoints=[folder / "checkpoints"],
                settings=settings,
            )
            assert found.is_equal
            rows.append(
                {"correction": name, "cosine": found.change.cosine}
                | {metric: found.change.metrics.get(metric, 0.0) for metric in AGAIN}
            )
    return rows


def summed_up(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each correction and bound of staleness, over the seeds."""
    rows = []
    for key in dict.fromkeys((r["max_staleness"], r["correction"]) for r in runs):
        own = [r for r in runs if (r["max_staleness"], r["correction"]) == key]
        row: dict[str, Any] = {"max_staleness": key[0], "correction": key[1]}
        row["final_accuracy"] = [r["accuracy"][-1] for r in own]
        row["lowest_of_second_half"] = [min(r["accuracy"][len(r["accuracy"]) // 2 :]) for r in own]
        for metric in ("staleness_mean", *MEANS, *(f"{m}_largest" for m in MAXIMA)):
            row[metric] = statistics.fmean(r[metric] for r in own)
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/stability"))
    parser.add_argument("--json", type=Path, default=Path("stability.json"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--staleness", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--lr", type=float, default=4e-4)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    runs = [
        corrected(name, staleness, seed, args)
        for seed in range(args.seeds)
        for staleness in args.staleness
        for name in CORRECTIONS
    ]
    found = {"lr": args.lr, "steps": args.steps, "rows": summed_up(runs), "again": again(args)}
    args.json.write_text(json.dumps(found | {"hardware": hardware(), "runs": runs}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Break nodes of a three-node cluster under a real run, many times, and write down what came of it.

    python -m tests.cluster.record --faults 20 --seed 1

Needs Docker. The result goes to tests/bench/results/cluster-DATE.json.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rlstreams.streams.audit.auditor import AuditReport
from tests.cluster.cluster import NUM_NODES, Cluster, Fault, running_cluster
from tests.cluster.run import COMMIT_S, ClusterRun
from tests.containers import kafka_image, spread, write_record


def plan(num_faults: int, seed: int, kinds: Sequence[Fault]) -> list[tuple[int, Fault]]:
    """Nodes and what happens to them; never the same node twice in a row."""
    rng = random.Random(seed)
    chosen: list[tuple[int, Fault]] = []
    for _ in range(num_faults):
        last = chosen[-1][0] if chosen else 0
        node = rng.choice([n for n in range(1, NUM_NODES + 1) if n != last])
        chosen.append((node, rng.choice(kinds)))
    return chosen


def break_nodes(cluster: Cluster, run: ClusterRun, faults: Sequence[tuple[int, Fault]]) -> object:
    """Carry out the plan; what to record of it."""
    on_s = []
    for index, (node, fault) in enumerate(faults, 1):
        with cluster.without(node, fault):
            on_s.append(run.goes_on())
        print(f"{index}/{len(faults)}: {fault} of node {node}: step {run.step}", flush=True)  # noqa: T201
    run.goes_on()
    felt = cluster.felt
    return {
        "faults": dict(Counter(f.fault for f in felt)),
        "noticed_s": spread([f.noticed_s for f in felt]),
        "two_steps_while_away_s": spread(on_s),
        "in_sync_again_s": spread([f.whole_s for f in felt]),
        "each": [{**asdict(f), "two_steps_s": s} for f, s in zip(felt, on_s, strict=True)],
    }


def result(report: AuditReport, run: ClusterRun) -> dict[str, object]:
    """What the audit says, and how often the supervisor had to help."""
    return {
        "ok": report.ok,
        "steps": report.steps,
        "issued": report.issued,
        "trained": report.trained,
        "lost": report.lost,
        "trained_twice": report.duplicates,
        "audit": report.text().splitlines(),
        "worker_restarts": run.num_restarts,
    }


def main() -> int:
    """0 if the audit is clean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=20, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="of their choice")
    parser.add_argument("--kinds", nargs="+", default=["kill"], choices=[f.value for f in Fault])
    asked = parser.parse_args()
    kinds = [Fault(kind) for kind in asked.kinds]
    begun = time.monotonic()
    image = kafka_image()
    with tempfile.TemporaryDirectory() as folder, running_cluster(image) as cluster:
        run = ClusterRun(cluster.bootstrap, Path(folder), "cluster")
        try:
            run.goes_on()
            told = break_nodes(cluster, run, plan(asked.faults, asked.seed, kinds))
            outcome = result(run.end(), run)
        finally:
            run.close()
    found = {"seed": asked.seed, "commit_s": COMMIT_S, **outcome, "nodes": told}
    write_record("cluster", image, begun, found)
    return 0 if outcome["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())

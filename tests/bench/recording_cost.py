"""What `rlstreams record --follow` takes from a live run: the demo with and without it, in turns.

    python tests/bench/recording_cost.py [--pairs 2] [--steps 40] [--json FILE]

Throughput is steps a second by the log's own clock, from the first `StepCompleted` to the last; the
recorder's CPU seconds are counted too, for two runs of one seed differ by more than a recorder
takes. Goal: at most 10 % of the throughput.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlstreams.schemas.events import StepCompleted
from rlstreams.streams.recording import Recording
from tests.bench.hardware import hardware

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "infra/examples/demo.toml")
START_S = 120.0


def rlstreams(*words: str) -> list[str]:
    return [sys.executable, "-m", "rlstreams", *words]


def measure(scratch: Path, name: str, steps: int, *, is_recorded: bool) -> dict[str, float]:
    """One run; what the log says of its speed, and what the recorder used."""
    folder, out = scratch / "runs" / name, scratch / "recordings" / name
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    changes = ["--run.id", name, "--demo.kills", "[]", "--prompts.evaluate_every", "0"]
    with (scratch / f"{name}.log").open("w") as log:
        up = subprocess.Popen(
            rlstreams("up", DEMO, "--steps", str(steps), *changes),
            cwd=scratch,
            env=environment,
            stdout=log,
            stderr=log,
        )
        if is_recorded:
            deadline_s = time.monotonic() + START_S
            while not (folder / "broker" / "broker.json").is_file() and up.poll() is None:
                assert time.monotonic() < deadline_s, f"{name} has no broker; see {scratch}"
                time.sleep(0.1)
            wait_for_topics(folder, up, deadline_s)
            before_s = children_s()
            follow = rlstreams("record", str(folder), "--follow", "--out", str(out))
            subprocess.run(follow, cwd=scratch, env=environment, check=True, stdout=log, stderr=log)
            used_s = children_s() - before_s
        status = up.wait(600)
        assert status == 0, (scratch / f"{name}.log").read_text()
        if not is_recorded:
            used_s = 0.0
            after = rlstreams("record", str(folder), "--out", str(out))
            subprocess.run(after, cwd=scratch, env=environment, check=True, stdout=log, stderr=log)
    with Recording(out) as recording:
        times = {r.event.step: r.raw.timestamp_ms for r in recording.events(StepCompleted)}
        num_mb = sum(len(raw.value) for raw in recording.records()) / 1e6
    seconds = (times[steps] - times[1]) / 1000
    return {
        "steps_per_s": round((steps - 1) / seconds, 3),
        "seconds": round(seconds, 2),
        "recorder_cpu_s": round(used_s, 2),
        "recorded_mb": round(num_mb, 1),
    }


def wait_for_topics(folder: Path, up: subprocess.Popen[bytes], deadline_s: float) -> None:
    """Until the run's configuration and its topics are there: then a recorder may begin."""
    while up.poll() is None and time.monotonic() < deadline_s:
        has_logs = (folder / "logs").is_dir() and any((folder / "logs").iterdir())
        if (folder / "config.json").is_file() and has_logs:
            return
        time.sleep(0.1)


def children_s() -> float:
    """CPU seconds of ended children; `up` still runs while the recorder's are counted."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="rlstreams-bench-"))
    machine = hardware()
    rows: dict[str, list[dict[str, float]]] = {"alone": [], "recorded": []}
    for number in range(args.pairs):
        order = ("alone", "recorded") if number % 2 == 0 else ("recorded", "alone")
        for row in order:
            name = f"{row}{number}"
            rows[row].append(measure(scratch, name, args.steps, is_recorded=row == "recorded"))
            sys.stdout.write(f"{name}: {rows[row][-1]}\n")
            sys.stdout.flush()
    speeds = {
        row: statistics.median(r["steps_per_s"] for r in found) for row, found in rows.items()
    }
    cores = os.cpu_count() or 1
    share = statistics.median(r["recorder_cpu_s"] / r["seconds"] for r in rows["recorded"]) / cores
    found = {
        "hardware": machine,
        "steps": args.steps,
        "rows": rows,
        "recorded_over_alone": round(speeds["recorded"] / speeds["alone"], 3),
        "recorder_share_of_the_machines_cpu": round(share, 4),
    }
    text = json.dumps(found, indent=1)
    sys.stdout.write(text + "\n")
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    shutil.rmtree(scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

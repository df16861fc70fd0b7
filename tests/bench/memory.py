"""Memory of every role while the trainer stands still: buffers must not grow behind it.

    python -m tests.bench.memory --stop 20 --json tests/bench/results/memory-DATE.json

Runs the demo, stops the trainer with SIGSTOP once it has made some steps, and compares the
resident memory of every process right before with that at the end of the stop, and after it went
on. Linux only: reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.e2e.command import Workspace

ROLES = ("prompts-0", "rollout-0", "logprob-0", "trainer-0")
AFTER_S = 5.0  # after the trainer went on


def pid_of(workspace: Workspace, worker: str) -> int:
    """The process that writes this worker's log.

    Raises:
        RuntimeError: none does.
    """
    for pid in workspace.processes():
        output = Path(f"/proc/{pid}/fd/1")
        if output.exists() and str(output.readlink()).endswith(f"/logs/{worker}.log"):
            return pid
    raise RuntimeError(f"no process writes the log of {worker}")


def resident_mb(pid: int) -> float:
    """`VmRSS` of a process."""
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1000


def num_prompts(workspace: Workspace) -> int:
    """Records of `prompts`, markers included: what was issued so far."""
    done = workspace.run("sh", "-c", "rlstreams topics list infra/examples/demo.toml")
    row = next(line for line in done.stdout.splitlines() if line.startswith("prompts "))
    return int(row.split()[3])


def measure(stop_s: float, steps: int) -> dict[str, object]:
    """One run; memory in MB by process."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder))
        try:
            started = workspace.start_up("--steps", "2000", "--demo.kills=[]", "--no-live")
            started.wait_for_step(steps)
            pids = {worker: pid_of(workspace, worker) for worker in ROLES}
            pids["broker"] = next(p for p, n in workspace.processes().items() if n == "java")
            before = {name: resident_mb(pid) for name, pid in pids.items()}
            os.kill(pids["trainer-0"], signal.SIGSTOP)
            time.sleep(stop_s / 2)
            issued_half = num_prompts(workspace)
            time.sleep(stop_s / 2)
            issued = num_prompts(workspace)
            during = {name: resident_mb(pid) for name, pid in pids.items()}
            os.kill(pids["trainer-0"], signal.SIGCONT)
            time.sleep(AFTER_S)
            after = {name: resident_mb(pid) for name, pid in pids.items()}
        finally:
            workspace.close()
    return {
        "stop_s": stop_s,
        "prompts_issued_in_second_half_of_stop": issued - issued_half,
        "resident_mb": {
            name: {
                "before": round(before[name], 1),
                "end_of_stop": round(during[name], 1),
                "after": round(after[name], 1),
            }
            for name in pids
        },
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stop", type=float, default=20.0, help="seconds")
    parser.add_argument("--steps", type=int, default=20, help="before the stop")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    text = json.dumps({"machine": machine, **measure(args.stop, args.steps)}, indent=2) + "\n"
    sys.stdout.write(text)
    if args.json:
        Path(args.json).write_text(text, "utf-8")


if __name__ == "__main__":
    main()

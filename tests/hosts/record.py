"""Kill and cut off hosts under a real run of several, and write down what came of it.

    python -m tests.hosts.record --rounds 2

Each round kills every host once, cuts every host off once, and kills the broker's. Needs Docker on
Linux. The result goes to tests/bench/results/hosts-DATE.json.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from tests.containers import kafka_image, spread, write_record
from tests.hosts.run import ROLES, HostsRun, running

FOREVER = 100_000  # steps: until we set another target
LAST_STEPS = 10
CUT_S = 10.0  # of a worker's host: its session times out after 3
TRAINER_CUT_S = 45.0  # of the trainer's: its transactions time out after 30
SKEW_S = 30
# A clock that is ahead, for all Python code of a host; Kafka's client keeps the true one.
AHEAD = f"""\
import time
_time, _ns = time.time, time.time_ns
time.time = lambda: _time() + {SKEW_S}
time.time_ns = lambda: _ns() + {SKEW_S} * 10**9
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Felt:
    """One fault as it went."""

    fault: str  # "kill" or "cut"
    host: str
    away_s: float
    two_steps_s: float  # from its return


def faults(rounds: int) -> Iterator[tuple[str, str]]:
    """Fault and host."""
    hosts = [name for name, of_host in ROLES.items() if of_host]
    for _ in range(rounds):
        for kind in ("kill", "cut"):
            yield from ((kind, host) for host in hosts)
        yield "kill", "broker"


def strike(run: HostsRun, fault: str, host: str) -> Felt:
    """One fault, and the run behind it."""
    begun = time.monotonic()
    if host == "broker":
        run.node.kill()
        run.node.start_again()
    elif fault == "kill":
        run.hosts[host].kill()
        run.hosts[host].start()
    else:
        run.cut_off(host, TRAINER_CUT_S if "trainer" in ROLES[host] else CUT_S)
    away_s = time.monotonic() - begun
    return Felt(
        fault=fault, host=host, away_s=round(away_s, 1), two_steps_s=round(run.goes_on(), 1)
    )


def accounted(run: HostsRun) -> dict[str, object]:
    """What a host that has only the configuration reads from the log."""
    status, said = run.ask("audit", "--json")
    assert said.lstrip().startswith("{"), said
    report = json.loads(said)
    text = run.ask("audit")[1]
    redone = re.findall(r"(\d+) of (\d+) weight hashes equal", text)
    return {
        "ok": status == 0,
        "steps": report["steps"],
        "issued": report["issued"],
        "trained": report["trained"],
        "lost": report["lost"],
        "trained_twice": report["trained_twice"],
        "redone_steps": sum(int(of_all) for _, of_all in redone),
        "redone_equal": sum(int(equal) for equal, _ in redone),
        "audit": text.splitlines(),
    }


def main() -> int:
    """0 if the audit is clean and every redone hash is equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1, help="of seven faults each")
    parser.add_argument("--skewed", default="mixed", help=f"host whose clock is {SKEW_S} s ahead")
    asked = parser.parse_args()
    begun = time.monotonic()
    image = kafka_image()
    felt: list[Felt] = []
    skewed = {asked.skewed: {"clock/sitecustomize.py": AHEAD.encode()}}
    path = {asked.skewed: {"PYTHONPATH": "/srv/clock"}}
    with running(image, FOREVER, extra=skewed, environment=path) as run:
        first_s = run.goes_on()
        for fault, host in faults(asked.rounds):
            felt.append(strike(run, fault, host))
            print(f"{fault} of {host}: {felt[-1]}, step {run.step}", flush=True)  # noqa: T201
        run.resume(run.step + LAST_STEPS)
        run.ends()
        outcome = accounted(run)
    found = {
        "hosts": "containers of one machine, a network, host name and file system each",
        "roles": {name: list(of_host) for name, of_host in ROLES.items()},
        "weights": "gloo",
        "clock_ahead": {"host": asked.skewed, "seconds": SKEW_S},
        "first_two_steps_s": round(first_s, 1),
        **outcome,
        "two_steps_after_a_fault_s": spread([f.two_steps_s for f in felt]),
        "faults": [asdict(f) for f in felt],
    }
    write_record("hosts", image, begun, found)
    return 0 if outcome["ok"] and outcome["redone_steps"] == outcome["redone_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""All roles on one GPU, by turns: a whole run of trainer, vLLM and scorer.

    python -m tests.gpu.one_card --out run.json            # 8 minutes

`rlstreams up` with `infra/examples/one-gpu.toml`; then the log is read: turns with the seconds of
each change, weights of each load against the ledger's hash, and the most memory that `nvidia-smi`
saw on the card.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlstreams.cli.arguments import opened_run
from rlstreams.schemas.events import DeviceLease
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.topics import CONTROL, STEPS
from rlstreams.streams.views.leases import HELD, RELEASED, Leases
from rlstreams.workers.config.load import load
from tests.gpu.whole_run import EXAMPLES, hardware, loaded_events, run_it, tails, told_by_the_log


class Memory(threading.Thread):
    """The most memory in use on GPU 0, MB, looked at four times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most_mb = 0
        self._over = threading.Event()

    def run(self) -> None:
        words = [
            "nvidia-smi",
            "-i",
            "0",
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
        ]
        while not self._over.wait(0.25):
            asked = subprocess.run(words, capture_output=True, text=True, check=False)
            if asked.returncode == 0:
                self.most_mb = max(self.most_mb, int(asked.stdout.split()[0]))

    def end(self) -> int:
        self._over.set()
        self.join()
        return self.most_mb


def events_of(bus: Bus, topic: str) -> list[Any]:
    """All of a topic with one partition, with positions."""
    reader = bus.reader(bus.beginnings(topic))
    (end,) = bus.ends(topic).values()
    found: list[Any] = []
    while next(iter(reader.positions().values())) < end:
        found += [decoded(raw) for raw in reader.poll(1000, 0.2)]
    reader.close()
    return found


def turns_of(bus: Bus) -> dict[str, Any]:
    """What the leases say: changes by role and state, seconds; and whether any was void."""
    leases, seconds, num_void = Leases(), defaultdict(list), 0
    num_turns: dict[str, int] = defaultdict(int)
    for record in events_of(bus, CONTROL.name):
        event = record.event
        if isinstance(event, DeviceLease):
            num_void += not leases.apply(event)
            role = event.holder.rpartition("-")[0]
            num_turns[role] += event.state == HELD
            if event.state in (HELD, RELEASED):
                seconds[f"{role} {event.state}"].append(event.seconds)
    return {
        "turns": dict(num_turns),
        "void": num_void,
        "median_change_s": {name: statistics.median(own) for name, own in seconds.items()},
        "max_change_s": {name: max(own) for name, own in seconds.items()},
        "first_change_s": {name: own[0] for name, own in seconds.items()},
    }


def wrong_loads(bus: Bus) -> list[str]:
    """Loads whose hash is not the ledger's for their version."""
    ledger = Ledger(keeps_steps=True)
    for record in events_of(bus, STEPS.name):
        ledger.apply(record.event, record.position)
    return [
        f"{event.worker} version {event.policy_version}"
        for event in loaded_events(bus)
        if event.policy_version in ledger.hashes
        and event.weight_hash != ledger.hashes[event.policy_version]
    ]


def whole_run(args: argparse.Namespace) -> dict[str, Any]:
    """Run it, and read its log."""
    files = [EXAMPLES / name for name in ("demo.toml", "one-gpu.toml")]
    words = [f"run.dir={args.folder}/{{id}}", f"trainer.steps={args.steps}"]
    words += [f"broker.jars_dir={args.jars}"] if args.jars else []
    words += [f"engine.python={args.python}"] if args.python else []
    words += [word.removeprefix("--") for word in args.overrides]
    config, memory = load(files, words), Memory()
    memory.start()
    status = run_it(files, words, Path(config.folder), args.limit_s)
    result: dict[str, Any] = {"status": status, "most_mb": memory.end()}
    told = Path(config.folder) / "up.log"
    sys.stdout.write(told.read_text(encoding="utf-8", errors="replace")[-3000:])
    if status:
        sys.stdout.write(tails(Path(config.folder)) + "\n")
    with opened_run(config) as log:
        result |= turns_of(log.bus) | {"wrong_loads": wrong_loads(log.bus)}
    return result | told_by_the_log(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 if what it holds to holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", default="runs/gpu")
    parser.add_argument("--jars", default="")
    parser.add_argument("--python", default="")
    parser.add_argument("--limit-s", type=float, default=420.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="after --: fields of the configuration")
    args = parser.parse_intermixed_args(argv)
    found = {"hardware": hardware()} | whole_run(args)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    shown = {k: v for k, v in found.items() if k not in ("audit", "reward", "pulls", "states_s")}
    sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    return found["status"] or int(bool(found["wrong_loads"] or found["void"]))


if __name__ == "__main__":
    sys.exit(main())

"""Roles of one GPU: weights handed over by CUDA IPC, and a whole run in shifts.

    python -m tests.gpu.one_card ipc --out ipc.json            # a minute: hand-over alone
    python -m tests.gpu.one_card run --out run.json            # trainer, vLLM and scorer, 8 minutes
    python -m tests.gpu.one_card run --config RUN.toml --config .../reasoner/in-shifts.toml

`ipc`: pullers on the trainer's own GPU; every pull is compared bit by bit with content that the
puller makes itself. `run`: `rlstreams up` with the demo and `infra/examples/one-gpu.toml`, or what
`--config` names; then the log is read: shifts with the seconds of each change, weights of each load
against the ledger's hash, and the most memory that `nvidia-smi` saw on the card.
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

from rlstreams.cli.named import opened_run
from rlstreams.schemas.events import DeviceLease
from rlstreams.streams.leases import HELD, RELEASED, Leases
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.topics import CONTROL, STEPS
from rlstreams.workers.config.load import load
from tests.gpu.whole_run import EXAMPLES, hardware, loaded_events, run_it, tails, told_by_the_log


def hand_over(args: argparse.Namespace) -> dict[str, Any]:
    """Pulls by processes on the sender's GPU."""
    from tests.gpu.weight_transfer import Puller, Stand, measure_pulls

    wanted = {"model": args.model, "place": args.place, "backend": "nccl", "stall_deadline": 20.0}
    stand = Stand(argparse.Namespace(**wanted))
    pullers = [Puller(stand, number, gpu=0) for number in range(1, args.pullers + 1)]
    for puller in pullers:
        puller.answer()  # it is ready
    try:
        found = measure_pulls(stand, pullers, args.repeats)
    finally:
        for puller in pullers:
            puller.process.kill()
        stand.server.close()
    ways = [line["event"] for line in stand.notes.lines]
    return found | {"num_bytes": stand.num_bytes, "fell_back": "no_cuda_ipc" in ways}


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


def shifts_of(bus: Bus) -> dict[str, Any]:
    """What the leases say: changes by role and state, seconds; and whether any was void."""
    leases, seconds, num_void = Leases(), defaultdict(list), 0
    num_shifts: dict[str, int] = defaultdict(int)
    for record in events_of(bus, CONTROL.name):
        event = record.event
        if isinstance(event, DeviceLease):
            num_void += not leases.apply(event)
            role = event.holder.rpartition("-")[0]
            num_shifts[role] += event.state == HELD
            if event.state in (HELD, RELEASED):
                seconds[f"{role} {event.state}"].append(event.seconds)
    return {
        "shifts": dict(num_shifts),
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
    files = args.config or [EXAMPLES / name for name in ("demo.toml", "one-gpu.toml")]
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
        result |= shifts_of(log.bus) | {"wrong_loads": wrong_loads(log.bus)}
    return result | told_by_the_log(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the part; 0 if what it holds to holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["ipc", "run"])
    parser.add_argument("--model", default="16gb", help="ipc: a shape of tests/gpu/model_rows.py")
    parser.add_argument("--place", default="device", help="ipc: where the snapshot lies")
    parser.add_argument("--pullers", type=int, default=1, help="ipc: servers on the card")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--config", type=Path, action="append", help="run: a file of it")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", default="runs/gpu")
    parser.add_argument("--jars", default="")
    parser.add_argument("--python", default="")
    parser.add_argument("--limit-s", type=float, default=420.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="after --: fields of the configuration")
    args = parser.parse_intermixed_args(argv)
    found = {"hardware": hardware()} | (hand_over(args) if args.part == "ipc" else whole_run(args))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    shown = {k: v for k, v in found.items() if k not in ("audit", "reward", "pulls", "states_s")}
    sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    if args.part == "ipc":
        return 0 if found["bit_equal"] and not found["fell_back"] else 1
    return found["status"] or int(bool(found["wrong_loads"] or found["void"]))


if __name__ == "__main__":
    sys.exit(main())

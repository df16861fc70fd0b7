"""A run of agents under random kills: is each call in the log once, and as if nobody had died?

    python -m tests.bench.agent_kills [--kills 30] [--steps 20] [--every 5] [--seeds 1 2] [--save]
        [--dir FOLDER]       # of the runs; else a temporary one. A run that ended there is kept,
                             # one that was broken off goes on, with --kills more
        [--lr 1e-60]         # no step changes a weight: all calls of two runs can be compared

The built-in engine on the CPU, the embedded broker. SIGKILL in turn to rollout workers (each with
its gateway), log-prob worker, trainer, prompts, broker, and processes of agents (`tests.chaos`), at
times that the seed decides; a run for each seed, and one without kills. What is checked:

- against the agents' own notes: what an agent heard is in the log, once, in the same words; at most
  one turn of a session was asked for in vain by each start of its agent that was lost;
- against an engine that samples each call once more, alone, with the weights that the call names,
  which the steps make when they are done again from the log: the same tokens;
- against the run without kills: the same, of the calls that both have under the same weights;
- by the audit: each sample in one class, nothing lost, nothing trained twice.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlstreams.__main__ import main as rlstreams
from rlstreams.cli.named import configuration, opened
from rlstreams.streams.audit.auditor import audit
from rlstreams.streams.sessions.session import Session
from rlstreams.up.supervisor.fault_hook import UpOptions
from rlstreams.up.supervisor.up import up
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig
from tests.bench.hardware import hardware
from tests.chaos.agents import CONFIG, PROGRAM, agents_of
from tests.chaos.calls import accounted, compared, notes_of, resampled
from tests.chaos.plan import BROKER, ROLES, ChaosOptions
from tests.chaos.run import chaos

DEMO = Path(__file__).parents[2] / "infra/examples/demo.toml"
CALM = "calm"  # folder of the run without kills
RECORDED = "recording"  # of a run, in its folder
COMPLETE = "the run is complete"
BEGAN = r"Apache Kafka serves \S+ from"  # a line of `up`, one for each start
KILL = r"FAULT \d+/\d+ after step \d+: SIGKILL to ([a-z]+)"
LOGPROB_NATS = 1e-4  # float32 sums, which depend on what else is in the batch


def configured(folder: Path, args: argparse.Namespace) -> RunConfig:
    """The run of this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.toml"
    text = CONFIG.format(
        demo=DEMO,
        run=folder / "run",
        program=PROGRAM,
        notes=folder / "notes.jsonl",
        workers=args.workers,
        steps=args.steps,
    )
    file.write_text(text, encoding="utf-8")
    return load([file], [f"trainer.optimizer.lr={args.lr}"] if args.lr else [])


def made(folder: Path, args: argparse.Namespace, seed: int | None = None) -> dict[str, Any]:
    """A run to its end, with the kills of a seed or without; one that was recorded before is not
    made again."""
    log = folder / "run/logs/up.log"
    if not (folder / RECORDED).is_dir():
        text = log.read_text(encoding="utf-8") if log.is_file() else ""
        run_of(folder, args, seed, len(re.findall(BEGAN, text)))
        words = ["record", "run", str(folder / "run"), "--out", str(folder / RECORDED)]
        assert rlstreams(words) == 0
    text = log.read_text(encoding="utf-8")
    report = folder / "chaos.json"  # of the last sitting, unless that was interrupted, too
    return {
        "is_complete": COMPLETE in text,
        "sittings": len(re.findall(BEGAN, text)),
        "kills": dict(sorted(Counter(re.findall(KILL, text)).items())),
        "last_report": json.loads(report.read_text("utf-8")) if report.is_file() else None,
    }


def run_of(folder: Path, args: argparse.Namespace, seed: int | None, sitting: int) -> None:
    """Run it, or go on with it."""
    config = configured(folder, args)
    up_options = UpOptions(config=config, command="up", is_resumed=sitting > 0, is_live=False)
    with agents_of(folder / "run", folder / "notes.jsonl", args.workers, seed or 0) as agents:
        if seed is None:
            up(up_options)
            return
        options = ChaosOptions(
            num_faults=args.kills,
            seed=seed + sitting,
            roles=(*ROLES, BROKER),
            every_s=args.every,
            only_kills=True,
            json_file=str(folder / "chaos.json"),
        )
        chaos(up_options, options, agents.kill)


def checked(folder: Path, calm: Sequence[Session]) -> dict[str, Any]:
    """A run with kills, as its log has it; needs no broker."""
    config = configuration([str(folder / "run")], [])
    with opened([str(folder / RECORDED)], []) as run:
        audited = audit(run.log.bus)
        sessions = run.log.sessions()
        found = accounted(run.log, sessions, notes_of(folder / "notes.jsonl"))
        with tempfile.TemporaryDirectory() as weights:
            again = resampled(run.log.bus, config, sessions, Path(weights))
    return {
        "audit": json.loads(audited.to_json()),
        "calls": found,
        "sampled_again_by_an_engine_alone": again,
        "against_the_run_without_kills": compared(sessions, calm),
    }


def problems(found: dict[str, Any]) -> list[str]:
    """What a run with kills has not kept."""
    again, counts = found["sampled_again_by_an_engine_alone"], found["audit"]
    classes = [
        counts[name] for name in ("trained", "evaluated", "dead_lettered", "lost", "expired")
    ]
    classes += [sum(counts[name].values()) for name in ("dropped", "in_flight")]
    told = [f"{name}: {num}" for name, num in found["calls"]["broken"].items() if num]
    told += [] if found["is_complete"] else ["the run is not complete"]
    told += (found["last_report"] or {"problems": []})["problems"]
    told += [f"audit: {name} {num}" for name, num in counts["breach_counts"].items()]
    if counts["issued"] != sum(classes):
        told.append(f"{counts['issued']} samples were issued, {sum(classes)} are in classes")
    told += [f"step {step} differs" for step in again["steps_done_again_that_differ"]]
    for title in ("sampled_again_by_an_engine_alone", "against_the_run_without_kills"):
        differ, nats = found[title]["differ"], found[title]["largest_logprob_difference"]
        told += [f"{title}: other tokens in call {name}" for name in differ]
        told += [f"{title}: a log-prob differs by {nats:g} nats"] * (nats > LOGPROB_NATS)
    return told


def measured(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All runs and their checks."""
    killed = {seed: made(folder / f"seed-{seed}", args, seed) for seed in args.seeds}
    calm = made(folder / CALM, args)
    with opened([str(folder / CALM / RECORDED)], []) as run:
        sessions = run.log.sessions()
    for seed, one in killed.items():
        one.update(checked(folder / f"seed-{seed}", sessions))
    told = [f"seed {seed}: {line}" for seed, one in killed.items() for line in problems(one)]
    if not calm["is_complete"]:
        told.append("the run without kills is not complete")
    words = ("kills", "steps", "every", "seeds", "workers", "lr")
    asked = {name: getattr(args, name) for name in words}
    return {"hardware": hardware(), "asked": asked, "killed": killed, "calm": calm,
            "problems": told}  # fmt: skip


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=30, help="of each run")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=float, default=5.0, help="mean seconds between two kills")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="a run for each")
    parser.add_argument("--workers", type=int, default=2, help="rollout workers")
    parser.add_argument("--lr", type=float, default=0.0, help="0: the demo's")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--out", type=Path, help="write the figures there, too")
    parser.add_argument("--save", action="store_true", help="beside the other results")
    return parser.parse_args(words)


def main() -> int:
    """Measure, print, save if asked to; 0 if everything held."""
    args = parsed()
    with tempfile.TemporaryDirectory() as temporary:
        found = measured(args.dir or Path(temporary), args)
    text = json.dumps(found, indent=1) + "\n"
    sys.stdout.write(text)
    name = f"agent_kills-{time.strftime('%Y-%m-%d')}.json"
    saved = Path(__file__).with_name("results") / name if args.save else None
    for file in filter(None, (args.out, saved)):
        file.write_text(text, encoding="utf-8")
    print("\n".join(found["problems"]) or "everything held")  # noqa: T201
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())

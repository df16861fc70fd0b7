"""The page's first hour on a GPU, line by line as it is written there, to a curve that rises.

    python -m tests.gpu.first_hour --out first_hour.json
    python -m tests.gpu.first_hour --skip-install --model MODEL --rows train.jsonl --limit-s 560 \\
        --out first_hour.json  # no hub, no index: a folder, and rows whose answers are numbers

A newcomer's block of `infra/docs/first-hour.md`. What differs from the page is what is said here:
`--skip-install`, `--model`, `--rows`, `--steps`, `--jars`; `--cpu` is a rehearsal with the demo's
model. Lines that install run in the clone, all others in `--folder`; one that passed there is not
run again, and a run that its limit ended goes on. Rows of the pretrained example:
`python -m infra.examples.pretrained.tasks --out FOLDER --only story,units`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlstreams.cli.named import configuration
from tests.gpu.reasoner import gpu_seconds
from tests.gpu.whole_run import ended, hardware, tails, told_by_the_log
from tests.readme_blocks import blocks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "infra/docs/first-hour.md"
INSTALLS = ("python3 -m venv ", "pip install ", "make setup")
VERBS = ("init", "doctor", "try", "up", "audit")
LIMIT = 124  # the status of what `ended` interrupted
LAST = 3  # points of the curve that the end is the mean of
TOLD = ("steps", "reward", "epochs", "step_ends_s", "train_s", "states_s", "mismatch_mean",
        "tokens_per_s", "accuracy", "audit_ok", "audit")  # fmt: skip


def lines_of(page: str) -> list[str]:
    """Commands of the page's one block for a shell; a line that goes on is one command.

    Raises:
        ValueError: none or several such blocks, or one in which a command is missing.
    """
    found = [block for block in blocks(page) if block.language == "bash"]
    if len(found) != 1:
        raise ValueError(f"{PAGE.name} has {len(found)} blocks of bash: one can be copied")
    commands = [line for line in found[0].text.replace("\\\n", " ").splitlines() if line.strip()]
    if missing := set(VERBS) - {verb_of(command) for command in commands}:
        raise ValueError(f"{PAGE.name} does not run rlstreams {', '.join(sorted(missing))}")
    return commands


def verb_of(command: str) -> str:
    """Of `rlstreams`; empty: another program."""
    match = re.match(r"rlstreams ([\w-]+)", command)
    return match[1] if match else ""


def replaced(command: str, pattern: str, words: str, option: str) -> str:
    """The command with other words; it must have them to replace."""
    changed, count = re.subn(pattern, lambda _: words, command, count=1)
    if not count:
        raise ValueError(f"{option}: the page's line has nothing that it replaces: {command}")
    return changed


def as_asked(command: str, args: argparse.Namespace) -> str:
    """What is run for a line of the page; empty: nothing."""
    verb = verb_of(command)
    if args.skip_install and command.startswith(INSTALLS):
        return ""
    if verb == "init":
        if args.rows:
            rows = f"--from {shlex.quote(str(args.rows.resolve()))}"
            command = replaced(command, r"--from \S+", rows, "--rows")
        if args.model:
            model = f"--model {shlex.quote(str(args.model.resolve()))}"
            command = replaced(command, r"--model \S+", model, "--model")
        if args.cpu:
            command = replaced(command, r" --gpus \d", "", "--cpu")
            command = command if args.model else replaced(command, r" --model \S+", "", "--cpu")
    if verb == "up" and args.steps:
        command = replaced(command, r"--steps \d+", f"--steps {args.steps}", "--steps")
    if verb in ("doctor", "up", "audit") and args.jars:
        jars = f"rlstreams {verb} --broker.jars_dir={shlex.quote(args.jars)}"
        command = replaced(command, f"rlstreams {verb}", jars, "--jars")
    return command


@dataclass(frozen=True, slots=True)
class Shell:
    """One shell's folder and environment, kept in files, so that a later process goes on in it.

    Args:
        folder: of the state, of `done.json` and of each command's log.
    """

    folder: Path

    @property
    def done(self) -> dict[str, dict[str, Any]]:
        """By command: its status and seconds, of all its starts together."""
        path = self.folder / "done.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return dict(found)

    def run(self, number: int, command: str, limit_s: float, more: str = "") -> int:
        """A command's status; 124: at its limit it was interrupted, as by Ctrl-C.

        Args:
            more: what a start that goes on is given behind `rlstreams VERB`.
        """
        state, before = self.folder / "state.sh", self.done
        verb, at = verb_of(command), shlex.quote(str(state))
        script = [f"set -eo pipefail; cd {shlex.quote(str(self.folder))}"]
        script += [f". {at}"] if state.exists() else []
        if verb:  # it is the process, which then hears Ctrl-C; it changes no environment
            script.append("exec " + command.replace(f"rlstreams {verb}", f"rlstreams {verb}{more}"))
        elif command.startswith(INSTALLS):
            script += [f"here=$PWD; cd {shlex.quote(str(ROOT))}", command, 'cd "$here"']
        else:
            script.append(command)
        if not verb:
            script.append(f'export -p > {at}; printf "cd %q\\n" "$PWD" >> {at}')
        started_s = time.monotonic()
        log = self.folder / f"{number:02}-{verb or 'shell'}.log"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        status = ended(
            ["bash", "-c", "\n".join(script)], log, limit_s, os.environ | {"PATH": path}, mode="a"
        )
        seconds = time.monotonic() - started_s
        told = {"status": status, "seconds": round(seconds + self.seconds(command), 1)}
        text = json.dumps(before | {command: told}, indent=1)
        (self.folder / "done.json").write_text(text + "\n", encoding="utf-8")
        return status

    def seconds(self, command: str) -> float:
        """That a command has taken so far."""
        return float(self.done.get(command, {}).get("seconds", 0.0))


def walked(args: argparse.Namespace, commands: Sequence[str], run: Path) -> bool:
    """Whether each command passed; the first that does not ends it."""
    shell, until_s = Shell(args.folder), time.monotonic() + args.limit_s
    for number, command in enumerate(commands, start=1):
        if shell.done.get(command, {}).get("status") == 0:
            continue
        more = " --resume" if verb_of(command) == "up" and (run / "broker").exists() else ""
        status = shell.run(number, command, max(1.0, until_s - time.monotonic()), more)
        said = f"status {status}" if status else "passed"
        said = "ended by --limit-s; the same call goes on" if status == LIMIT else said
        shown = command.partition("  #")[0].rstrip()
        sys.stdout.write(f"[{shell.seconds(command):6.1f} s] {shown}: {said}\n")
        sys.stdout.flush()
        if status:
            log = args.folder / f"{number:02}-{verb_of(command) or 'shell'}.log"
            sys.stdout.write(log.read_text(encoding="utf-8", errors="replace")[-3000:] + "\n")
            return False
    return True


def told_of(run: Path, least_rise: float) -> dict[str, Any]:
    """The curve over GPU-seconds, and what is asked of a run: from its log.

    The clock stands still between two starts of the trainer.
    """
    config = configuration([str(run)], [])
    told = told_by_the_log(config)
    clock = gpu_seconds(list(zip(told["epochs"], told["step_ends_s"], strict=True)), 1)
    curve = [
        {"step": version, "gpu_s": clock[version], "accuracy": [accuracy, count]}
        for version, accuracy, count in told["accuracy"]
        if version < len(clock)
    ]
    later = [point["accuracy"][0] for point in curve[1:]][-LAST:]
    rise = sum(later) / len(later) - curve[0]["accuracy"][0] if later else None
    checks = {
        "the run went to its end": told["steps"] == config.trainer.steps,
        "the audit is clean": told["audit_ok"],
        f"held-out accuracy rose by at least {least_rise:g}": bool(
            rise is not None and rise >= least_rise
        ),
    }
    return {key: told[key] for key in TOLD} | {"curve": curve, "rise": rise, "checks": checks}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--skip-install", action="store_true", help="nothing can be installed")
    parser.add_argument("--model", type=Path, help="folder, in place of the hub's model")
    parser.add_argument("--rows", type=Path, help="file, in place of the hub's data set")
    parser.add_argument("--steps", type=int, help="in place of the page's")
    parser.add_argument("--jars", default="", help="folder of the broker's jars")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal: the demo's model")
    parser.add_argument("--rise", type=float, default=0.1, help="least, of held-out accuracy")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="of this call")
    parser.add_argument("--folder", type=Path, default=Path("runs/first-hour"))
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Walk, write what came of it; 1 where a line of the page or a check did not pass."""
    args = parse(argv)
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    written = lines_of(PAGE.read_text(encoding="utf-8"))
    commands = [asked for line in written if (asked := as_asked(line, args))]
    project = next(line.split()[2] for line in written if verb_of(line) == "init")
    run = args.folder / project / "runs" / project
    has_passed = walked(args, commands, run)
    done = Shell(args.folder).done
    result: dict[str, Any] = {
        "hardware": hardware(),
        "page": PAGE.name,
        "commands": [{"command": one} | done[one] for one in commands if one in done],
        "passed": has_passed,
    }
    if (run / "broker").exists():
        result |= told_of(run, args.rise)
        checks = result["checks"]
        has_passed = has_passed and all(checks.values())
        for point in result["curve"]:
            mean, count = point["accuracy"]
            sys.stdout.write(f"step {point['step']:4} {point['gpu_s']:8.1f} GPU-s  "
                             f"{mean:.3f} of {count}\n")  # fmt: skip
        sys.stdout.write("".join(f"{name}: {is_so}\n" for name, is_so in checks.items()))
        if not has_passed:
            sys.stdout.write(tails(run) + "\n")
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(not has_passed)


if __name__ == "__main__":
    sys.exit(main())

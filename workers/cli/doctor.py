"""`rlstreams doctor CONFIG...`: what would keep a run from working, and what to do about it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from workers.cli.arguments import add_run, examples

if TYPE_CHECKING:
    from workers.config.run import RunConfig


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check machine, configuration and broker, and say what to do",
        description="Checks packages, Java, disk, model, data, verifier and broker. Starts "
        "nothing. Exit status 0 if no check fails.",
        epilog=examples(
            "rlstreams doctor",
            "rlstreams doctor run.toml --broker.bootstrap=10.0.0.5:9092",
            "rlstreams doctor runs/demo --json",
        ),
    )
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print the checks as a JSON array")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print every check; 1 if one fails."""
    import json
    from dataclasses import asdict

    from workers.cli.report import configuration
    from workers.doctor.check import Level
    from workers.doctor.diagnose import diagnose

    config = configuration(args.config, args.overrides)
    checks = diagnose(config)
    if args.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{check.level:<4}  {check.name:<{width}}  {check.found}")
            if check.advice:
                print(f"{'':{width + 8}}-> {check.advice}")
        counts = {level: sum(check.level is level for check in checks) for level in Level}
        print("\n".join(_memory(config)))
        print(", ".join(f"{count} {level}" for level, count in counts.items()))
    return int(any(check.level is Level.FAIL for check in checks))


def _memory(config: RunConfig) -> list[str]:
    """The table by role; nothing where the model cannot be read, for a check has said why."""
    from streams.errors import ConfigError
    from workers.doctor.memory import estimate, free_mb, table
    from workers.doctor.model import read_model
    from workers.hub import found_folder

    try:
        if found_folder(config.model.path) is None:
            return []
        return table(estimate(read_model(config.model.path), config), free_mb())
    except ConfigError:
        return []

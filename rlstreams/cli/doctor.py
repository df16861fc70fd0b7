"""`rlstreams doctor CONFIG...`: what would keep a run from working, and what to do about it."""

from __future__ import annotations

import argparse

from rlstreams.cli.arguments import RUN, command, configuration
from rlstreams.streams.log.errors import ConfigError


@command("doctor", RUN)
def run(args: argparse.Namespace) -> int:
    """check machine, configuration and broker, and say what to do

    Checks Java, disk, GPUs, model, data, verifier, model servers and broker. Starts nothing.
    Exit status 0 if no check fails.

    --role prompts|rollout|server|logprob|trainer  only what this role needs, on a host of its own
    --ordinal COUNT  with --role: only what its worker N needs; default: any of them
    --json       print the checks as a JSON array

    rlstreams doctor
    rlstreams doctor run.toml --broker.bootstrap=10.0.0.5:9092
    rlstreams doctor runs/demo --json
    rlstreams doctor run.toml --role rollout --ordinal 1
    """
    import json
    from dataclasses import asdict

    from rlstreams.start.doctor.check import Host, Level
    from rlstreams.start.doctor.diagnose import diagnose

    if args.ordinal is not None and not args.role:
        raise ConfigError(f"--ordinal {args.ordinal} is a worker of one role: name it with --role")
    host = Host(role=args.role, ordinal=args.ordinal)
    config = configuration(args.config, args.overrides)
    checks = diagnose(config, host)
    if args.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{check.level:<4}  {check.name:<{width}}  {check.found}")
            if check.advice:
                print(f"{'':{width + 8}}-> {check.advice}")
        counts = {level: sum(check.level is level for check in checks) for level in Level}
        print(", ".join(f"{count} {level}" for level, count in counts.items()))
    return int(any(check.level is Level.FAIL for check in checks))

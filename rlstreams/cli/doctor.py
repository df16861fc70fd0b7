"""`rlstreams doctor CONFIG...`: problems that would keep a run from working, and their cures."""

from __future__ import annotations

from argparse import Namespace

from rlstreams.cli.named import configuration, print_json
from rlstreams.cli.options import COUNT, RUN, command, one_of, option
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.roles import ROLES


@command(
    "doctor",
    "rlstreams doctor",
    "rlstreams doctor run.toml --broker.bootstrap=10.0.0.5:9092",
    "rlstreams doctor runs/demo --json",
    "rlstreams doctor run.toml --role rollout --ordinal 1",
    "rlstreams doctor --server http://127.0.0.1:8000",
    takes=RUN,
    needs_names=False,
)
@option(
    "--role",
    type=one_of(*ROLES),
    help="only what this role needs, on a host of its own",
)
@option(
    "--ordinal",
    type=COUNT,
    metavar="N",
    help="with --role: only what its worker N needs, from 0; default: any of them",
)
@option("--json", is_flag=True, help="print the checks as a JSON array")
@option("--server", metavar="URL", help="instead, what this running model server lacks", default="")
def run(args: Namespace) -> int:
    """check machine, configuration and broker, and say what to do

    Checks Java, disk, GPUs, model, data, verifier, model servers and broker. Starts nothing.
    Exit status 0 if no check fails.
    """
    if args.server:
        return _server(args)
    import json
    from dataclasses import asdict

    from rlstreams.check.doctor.check import Host, Level
    from rlstreams.check.doctor.diagnose import diagnose

    if args.ordinal is not None and not args.role:
        raise ConfigError(f"--ordinal {args.ordinal} is a worker of one role: name it with --role")
    host = Host(role=args.role or "", ordinal=args.ordinal)
    config = configuration(*args.config)
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


def _server(args: Namespace) -> int:
    import asyncio

    from rlstreams.workers.config.checks import check_urls
    from rlstreams.workers.engines.served.check import check_server, is_usable

    check_urls("--server", (args.server,))
    findings = asyncio.run(check_server(args.server))
    if args.json:
        print_json(*findings)
    for finding in () if args.json else findings:
        print(f"{finding.weight:<7} {finding.name:<19} {finding.found}")
        if finding.cure:
            print(f"{'':<28}fix: {finding.cure}")
    return 0 if is_usable(findings) else 1

"""`rlstreams audit CONFIG...`: where every sample of a run is, from its topics alone."""

from __future__ import annotations

import argparse


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "audit",
        help="account for every sample of a run, from its topics alone",
        description="Reads committed positions and topics, and says of every issued sample whether "
        "it was trained, dropped, dead-lettered, evaluated, is in flight, or is lost. "
        "Exit status 1 and the ids if the log breaks a promise.",
    )
    parser.add_argument("config", nargs="+", metavar="CONFIG", help="TOML files; later ones win")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument(
        "--bootstrap",
        default="",
        metavar="HOST:PORT",
        help="the broker to ask, instead of the configured or the run's own one",
    )
    parser.add_argument(
        "--settle",
        type=float,
        default=None,
        metavar="SECONDS",
        help="how long a breach may take to heal while transactions are open (default: 35)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if the log keeps its promises, else 1."""
    from streams.audit import SETTLE_S, audit
    from workers.attach import attached
    from workers.config_load import load

    overrides = list(args.overrides)
    if args.bootstrap:
        overrides += ["--broker.bootstrap", args.bootstrap]
    settle_s = SETTLE_S if args.settle is None else args.settle
    with attached(load(args.config, overrides)) as bus:
        report = audit(bus, settle_s=settle_s)
    print(report.to_json() if args.json else report.text())
    return 0 if report.ok else 1

"""`rlstreams broker start|stop|status`: the embedded broker of a folder."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser("broker", help="the embedded Apache Kafka broker")
    parser.add_argument("action", choices=("start", "stop", "status"))
    parser.add_argument("--dir", default="runs/broker", help="data folder (%(default)s)")
    parser.add_argument(
        "--port", type=int, default=0, help="0: the folder's last port, or a free one"
    )
    parser.add_argument("--jars-dir", default="", help="folder of the pinned jars; fetch nothing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do it; `status` and `stop` answer 1 if no broker runs there."""
    from streams.broker import EmbeddedBroker

    broker = EmbeddedBroker(Path(args.dir), args.port, args.jars_dir)
    if args.action == "start":
        state = broker.start()
        print(f"broker {state.pid} serves {state.bootstrap}; stop it with")
        print(f"  rlstreams broker stop --dir {args.dir}")
        return 0
    state_now = broker.status()
    if state_now is None:
        print(f"no broker runs in {args.dir}")
        return 1
    if args.action == "stop":
        broker.stop()
        print(f"broker {state_now.pid} stopped; its data stays in {args.dir}")
    else:
        print(f"broker {state_now.pid} serves {state_now.bootstrap} from {args.dir}")
    return 0

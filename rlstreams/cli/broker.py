"""`rlstreams broker start|stop|status`: the embedded broker of a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlstreams.cli.arguments import examples, whole

_ACTIONS = {
    "start": "start it, unless it is running; it keeps running after this command",
    "stop": "stop it; its data stays",
    "status": "print its address; exit status 1 if it is not running",
}


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser("broker", help="the embedded Apache Kafka broker")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, about in _ACTIONS.items():
        one = actions.add_parser(
            action, help=about, epilog=examples(f"rlstreams broker {action} --dir runs/demo/broker")
        )
        one.add_argument(
            "--dir", default="runs/broker", metavar="DIR", help="data folder (%(default)s)"
        )
        one.set_defaults(run=run, port=0, jars_dir="")
        if action == "start":
            _add_start(one)


def _add_start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port",
        type=whole(0, 65_535),
        metavar="N",
        help="default: the folder's last port, or a free one",
    )
    parser.add_argument(
        "--jars-dir", metavar="DIR", help="folder of the pinned jars; download nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Do it; `status` and `stop` answer 1 if no broker runs there."""
    from rlstreams.streams.broker.embedded import EmbeddedBroker

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

"""`rlstreams broker start|stop|status`: the embedded broker of a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlstreams.cli.arguments import Commands, command, options, whole

_ACTIONS = {
    "start": "start it, unless it is running; it keeps running after this command",
    "stop": "stop it; its data stays",
    "status": "print its address; exit status 1 if it is not running",
}


def add(subparsers: Commands) -> None:
    """Register the command."""
    parser = subparsers.add_parser("broker", help="the embedded Apache Kafka broker")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, about in _ACTIONS.items():
        text = f"""{about}

        rlstreams broker {action} --dir runs/demo/broker

        --dir DIR  data folder (%(default)s)
        """
        one = command(actions, action, run, text, dir_={"default": "runs/broker"})
        one.set_defaults(port=0)
        if action == "start":
            port = "--port N  default: the folder's last port, or a free one"
            options(one, port, port_={"type": whole(0, 65_535)})


def run(args: argparse.Namespace) -> int:
    """Do it; `status` and `stop` answer 1 if no broker runs there."""
    from rlstreams.streams.broker.embedded import EmbeddedBroker

    broker = EmbeddedBroker(Path(args.dir), args.port)
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

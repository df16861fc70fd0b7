"""`rlstreams broker start|stop|status`: the embedded broker of a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlstreams.cli.arguments import command, group

group("broker", "the embedded Apache Kafka broker")


@command("broker start")
def start(args: argparse.Namespace) -> int:
    """start it, unless it is running; it keeps running after this command

    --dir DIR    data folder [runs/broker]
    --port PORT  default: the folder's last port, or a free one

    rlstreams broker start --dir runs/demo/broker
    """
    from rlstreams.streams.broker.embedded import EmbeddedBroker

    state = EmbeddedBroker(Path(args.dir), args.port or 0).start()
    print(f"broker {state.pid} serves {state.bootstrap}; stop it with")
    print(f"  rlstreams broker stop --dir {args.dir}")
    return 0


@command("broker stop")
def stop(args: argparse.Namespace) -> int:
    """stop it; its data stays

    --dir DIR  data folder [runs/broker]

    rlstreams broker stop --dir runs/demo/broker
    """
    return _found(args.dir, is_stopped=True)


@command("broker status")
def status(args: argparse.Namespace) -> int:
    """print its address; exit status 1 if it is not running

    --dir DIR  data folder [runs/broker]

    rlstreams broker status --dir runs/demo/broker
    """
    return _found(args.dir, is_stopped=False)


def _found(folder: str, *, is_stopped: bool) -> int:
    """Say what runs there, and stop it if asked; 1 if no broker does."""
    from rlstreams.streams.broker.embedded import EmbeddedBroker

    broker = EmbeddedBroker(Path(folder))
    state = broker.status()
    if state is None:
        print(f"no broker runs in {folder}")
        return 1
    if is_stopped:
        broker.stop()
        print(f"broker {state.pid} stopped; its data stays in {folder}")
    else:
        print(f"broker {state.pid} serves {state.bootstrap} from {folder}")
    return 0

"""A follower that says it is alive, and does no command as it should. Knows no torch."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

from rlstreams.workers.compute.link import ALIVE, CommandResult, Link


def main(descriptor: int) -> None:
    """`idle` is never answered, nor `slow`, which gives what it says then; any other is answered as
    an error of that name."""
    link, said = Link(socket.socket(fileno=descriptor), 60.0), [ALIVE]

    def speak() -> None:
        while True:
            link.send(said[-1])
            time.sleep(0.2)

    threading.Thread(target=speak, daemon=True).start()
    while (received := link.receive()) is not None:
        if received[1] == "slow":
            said.append(received[2][0])
        elif received != ALIVE and received[1] != "idle":
            link.send(CommandResult(kind=received[1], failure="roll_cuda has none"))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""A follower: any rank of the trainer or of a scorer but rank 0. It touches no log and decides
nothing.

    python -m rlstreams.workers.compute.follower FD [FOLDER]

It runs the commands that arrive over the socket FD, one at a time, answers each, and reports once a
second that it is alive, or which function of the user's has kept it for long. The socket closes
when its trainer has ended, for whatever reason: then the follower exits. A stopped follower cannot
see that; its reaper (`Child`) ends it. With the model's FOLDER it runs on another host than its
trainer, which then sends the first message.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlstreams.workers.compute.link import (
    ALIVE,
    BEGIN,
    FREE,
    Command,
    CommandResult,
    Link,
    Meeting,
)
from rlstreams.workers.compute.mesh import Mesh, of_rank
from rlstreams.workers.sandbox.recorded import slow_call

ALIVE_EVERY_S = 1.0
SEND_LIMIT_S = 60.0


class Follower:
    """Commands in, answers out."""

    def __init__(self, link: Link, **own: object) -> None:
        """
        Args:
            own: fields of a spec that a host of its own sets, `folder` and `host`; none on the
                trainer's host.
        """
        self._link = link
        self._own = own
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._mesh: Mesh | None = None
        # A `Learner`, or one or two `MeshScorer`: torch is imported once this process has reported.
        self._objects: dict[int, Any] = {}

    def run(self) -> None:
        """Run commands until the trainer has ended; does not return."""
        if self._own:
            self._link.receive()
        for work in (self._receive, self._say_alive):
            threading.Thread(target=work, daemon=True).start()
        while True:
            self._link.send(self._answer(*self._commands.get()))

    def _answer(self, number: int, method: str, args: tuple[Any, ...]) -> CommandResult:
        """Answer of one command. After a failure other ranks may hang until this one has left."""
        from rlstreams.streams.log.errors import ConfigError
        from rlstreams.workers.trainer.learn.out_of_memory import OutOfMemoryError
        from rlstreams.workers.trainer.learn.step import NumericsError

        try:
            if method == BEGIN:
                self._begin(number, *args)
                return CommandResult()
            return CommandResult(result=of_rank(self._objects[number], method, args))
        except NumericsError as err:  # every rank raises it alike: none hangs
            return CommandResult(kind=type(err).__name__, failure=str(err))
        except OutOfMemoryError as err:
            answer = CommandResult(exhausted=(err.index, err.detail))
        except (RuntimeError, MemoryError, ConfigError) as err:
            kind = ConfigError if isinstance(err, ConfigError) else type(err)
            answer = CommandResult(kind=kind.__name__, failure=str(err))
        if number in self._objects:
            self._free()
            self._objects[number].leave()
        return answer

    def _begin(self, number: int, spec: Any, rank: int, size: int, meeting: Meeting) -> None:  # noqa: ANN401
        """Make the object of `spec`, beside those before; with the first, meet the others."""
        own = dict(self._own)
        host = str(own.pop("host", spec.host))
        if self._mesh is None:
            self._mesh = Mesh(rank=rank, size=size, device=spec.device, host=host)
        if self._mesh.devices is None:
            self._objects.clear()
            self._mesh.join(meeting)
        made = replace(spec, **own).begin(self._mesh)
        made.number = number
        self._objects[number] = made

    def _receive(self) -> None:
        while (received := self._link.receive()) is not None:
            if received[1] == FREE:
                self._free()
            else:
                self._commands.put(received)
        os._exit(0)

    def _say_alive(self) -> None:
        while True:
            try:
                self._link.send(slow_call() or ALIVE)
            except OSError:
                os._exit(0)
            time.sleep(ALIVE_EVERY_S)

    def _free(self) -> None:
        """End the collectives that this process is in, which frees ranks that wait for it."""
        from rlstreams.workers.compute import group

        group.abort()
        group.hang_up(but=self._link.peer)


def main(arguments: list[str]) -> None:
    """Run a follower on the file descriptor of `arguments`; see the module."""
    end = socket.socket(fileno=int(arguments[0]))
    own = {"folder": Path(f), "host": end.getsockname()[0]} if (f := "".join(arguments[1:])) else {}
    Follower(Link(end, SEND_LIMIT_S), **own).run()


if __name__ == "__main__":
    main(sys.argv[1:])

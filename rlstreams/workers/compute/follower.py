"""A follower: a rank, of the trainer or a scorer, that is not rank 0. It touches no log and decides
nothing.

    python -m rlstreams.workers.compute.follower FD [FOLDER]

It does what comes over the socket FD, one thing at a time, answers each, and says once a second
that it is alive. When the socket closes its trainer is gone, however that ended, and so is it; its
reaper (`Child`) ends it where it is stopped, and could not see that. With the model's FOLDER it is
on another host than its trainer, which speaks first.
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
    Answer,
    Command,
    Link,
    Meeting,
)
from rlstreams.workers.compute.mesh import Mesh, of_rank

ALIVE_EVERY_S = 1.0
SEND_LIMIT_S = 60.0


class Follower:
    """Commands in, answers out."""

    def __init__(self, link: Link, **own: object) -> None:
        """
        Args:
            own: what of a spec is this host's own, `folder` and `host`; nothing on the trainer's.
        """
        self._link = link
        self._own = own
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._mesh: Mesh | None = None
        # A `Learner`, or one `MeshScorer` or two: torch is imported once this process is heard.
        self._objects: dict[int, Any] = {}

    def run(self) -> None:
        """Until the trainer is gone."""
        if self._own:
            self._link.receive()
        for work in (self._receive, self._say_alive):
            threading.Thread(target=work, daemon=True).start()
        while True:
            self._link.send(self._answer(*self._commands.get()))

    def _answer(self, number: int, method: str, args: tuple[Any, ...]) -> Answer:
        """What came of a command. After a failure others may hang until we have left."""
        from rlstreams.streams.log.errors import ConfigError
        from rlstreams.workers.trainer.learn.out_of_memory import OutOfMemoryError
        from rlstreams.workers.trainer.learn.step import NumericsError

        try:
            if method == BEGIN:
                self._begin(number, *args)
                return Answer()
            return Answer(result=of_rank(self._objects[number], method, args))
        except NumericsError as err:  # of all ranks alike: nobody hangs
            return Answer(kind=type(err).__name__, failure=str(err))
        except OutOfMemoryError as err:
            answer = Answer(exhausted=(err.index, err.told))
        except (RuntimeError, MemoryError, ConfigError) as err:
            answer = Answer(kind=type(err).__name__, failure=str(err))
        if number in self._objects:
            self._free()
            self._objects[number].leave()
        return answer

    def _begin(self, number: int, spec: Any, rank: int, size: int, meeting: Meeting) -> None:  # noqa: ANN401
        """Become what `spec` says, beside what this rank is already; the first meets the others."""
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
                self._link.send(ALIVE)
            except OSError:
                os._exit(0)
            time.sleep(ALIVE_EVERY_S)

    def _free(self) -> None:
        """End the collectives that this process is in, here and where others wait for it."""
        from rlstreams.workers.compute import group

        group.abort()
        group.hang_up(but=self._link.peer)


def main(arguments: list[str]) -> None:
    """See the module."""
    end = socket.socket(fileno=int(arguments[0]))
    own = {"folder": Path(f), "host": end.getsockname()[0]} if (f := "".join(arguments[1:])) else {}
    Follower(Link(end, SEND_LIMIT_S), **own).run()


if __name__ == "__main__":
    main(sys.argv[1:])

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
    PASSES,
    Answer,
    Command,
    Link,
)

ALIVE_EVERY_S = 1.0
SEND_LIMIT_S = 60.0


class Follower:
    """Commands in, answers out."""

    def __init__(self, link: Link, **own: object) -> None:
        """
        Args:
            own: what of a `RankSpec` is this host's own; nothing on the trainer's.
        """
        self._link = link
        self._own = own
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        # A `RankLearner` or `RankScorer`: torch is imported once this process is heard.
        self._rank: Any = None

    def run(self) -> None:
        """Until the trainer is gone."""
        if self._own:
            self._link.receive()
        for work in (self._receive, self._say_alive):
            threading.Thread(target=work, daemon=True).start()
        while True:
            self._link.send(self._answer(*self._commands.get()))

    def _answer(self, method: str, args: tuple[Any, ...]) -> Answer:
        """What came of a command. After a failure in a pass others hang until we have left."""
        from rlstreams.streams.log.errors import ConfigError
        from rlstreams.workers.trainer.learn.out_of_memory import OutOfMemoryError

        try:
            if method == BEGIN:
                spec, meeting = args
                self._rank = replace(spec, **self._own).begin(meeting)
                return Answer()
            return Answer(result=getattr(self._rank, method)(*args))
        except OutOfMemoryError as err:
            answer = Answer(exhausted=(err.index, err.told))
        except (RuntimeError, MemoryError, ConfigError) as err:
            answer = Answer(kind=type(err).__name__, failure=str(err))
        if self._rank is not None and method in PASSES:
            self._free()
            self._rank.leave()
        return answer

    def _receive(self) -> None:
        while (received := self._link.receive()) is not None:
            if received[0] == FREE:
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

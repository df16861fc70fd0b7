"""A follower: one rank of the trainer that is not rank 0. It touches no log and decides nothing.

    python -m rlstreams.workers.trainer.parallel.follower FD

It does what comes over the socket FD, one thing at a time, answers each, and says once a second
that it is alive. When the socket closes its trainer is gone, however that ended, and so is it.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rlstreams.workers.trainer.parallel.deal import Task
from rlstreams.workers.trainer.parallel.wire import Arrays, Head, Link, tasks_in

ALIVE_EVERY_S = 1.0
SEND_LIMIT_S = 60.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Follower:
    """Commands in, answers out."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._commands: queue.SimpleQueue[tuple[Head, Arrays]] = queue.SimpleQueue()
        self._share: Any = None  # torch is imported while the trainer loads its model

    def run(self) -> None:
        """Until the trainer is gone."""
        for work in (self._receive, self._say_alive):
            threading.Thread(target=work, daemon=True).start()
        while True:
            head, arrays = self._commands.get()
            self._link.send(self._answer(head, arrays), {})

    def _answer(self, head: Head, arrays: Arrays) -> Head:
        """What came of a command. After a failure in a pass others hang until we have left."""
        from rlstreams.streams.log.errors import ConfigError
        from rlstreams.workers.trainer.learn.out_of_memory import OutOfMemoryError

        try:
            return {"done": self._execute(head, arrays)}
        except OutOfMemoryError as err:
            answer: Head = {"exhausted": [err.index, err.told]}
        except (RuntimeError, MemoryError, ConfigError) as err:
            kind = type(err).__name__
            answer = {"failed": f"{kind}: {err}", "kind": kind}
        if self._share is not None and head["do"] == "gradient":
            _free()
            self._share.leave()
        return answer

    def _execute(self, head: Head, arrays: Arrays) -> Head:
        if head["do"] == "begin":
            self._share = make_share(head)
            return {}
        return execute(self._share, head, arrays)

    def _receive(self) -> None:
        while (received := self._link.receive()) is not None:
            if received[0]["do"] == "leave":
                _free()
            else:
                self._commands.put(received)
        os._exit(0)

    def _say_alive(self) -> None:
        while True:
            try:
                self._link.send({"alive": True}, {})
            except OSError:
                os._exit(0)
            time.sleep(ALIVE_EVERY_S)


def _free() -> None:
    """End the collectives that this process is in, here and where others wait for it."""
    from rlstreams.workers.trainer.parallel import group

    group.abort()
    group.hang_up()


def make_share(head: Head) -> Any:  # noqa: ANN401  (imported late)
    """This process as a rank."""
    import msgspec

    from rlstreams.workers.config.trainer import TrainerSection
    from rlstreams.workers.model.model import configure_torch
    from rlstreams.workers.trainer.parallel.rank_learner import RankLearner, RankSpec

    section = msgspec.convert(head["section"], TrainerSection)
    configure_torch(
        head["threads"], head["device"], fused=True, in_one_order=section.redo != "tolerate"
    )
    spec = RankSpec(
        folder=Path(head["folder"]),
        section=section,
        device=head["device"],
        dtype=head["dtype"],
        rank=head["rank"],
        host=head["host"],
    )
    return RankLearner(spec, Path(head["file"]))


def _learnt(share: Any, tasks: list[Task]) -> Head:  # noqa: ANN401
    from dataclasses import asdict

    totals, squares = share.local_gradient(tasks)
    return {"totals": asdict(totals), "squares": squares}


def _looked(share: Any, tasks: list[Task]) -> Head:  # noqa: ANN401
    found = share.local_look(tasks).items()
    return {"looks": [[index, *(values.tolist() for values in look)] for index, look in found]}


def execute(share: Any, head: Head, arrays: Arrays) -> Head:  # noqa: ANN401  (imported late)
    """One command."""
    import msgspec

    from rlstreams.workers.config.loss import LossSection
    from rlstreams.workers.config.trainer import OptimizerSection

    match head["do"]:
        case "gradient":
            tasks = tasks_in(head["tasks"], arrays)
            return _looked(share, tasks) if head.get("looks") else _learnt(share, tasks)
        case "clip":
            share.local_clip(head["norm"])
        case "update":
            share.local_update(head["lr"])
        case "forget":
            share.local_forget()
        case "configure":
            share.configure(
                msgspec.convert(head["optimizer"], OptimizerSection),
                msgspec.convert(head["loss"], LossSection),
            )
        case "sums":
            return {"sums": share.local_sums()}
        case "gather":
            share.gather(head["kind"], head["key"])
        case "scatter":
            share.scatter(head["kind"], head["key"], head["dtype"], None)
        case "number":
            share.set_number(head["key"], head["value"])
        case "adopt":
            share.adopt(head["step"])
        case "rejoin":
            share.rejoin(Path(head["file"]))
        case unknown:
            raise ValueError(f"no command {unknown!r}")
    return {}


def die_with_parent() -> None:
    """Killed with the trainer even where this process is stopped, and could not see its end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """See the module."""
    die_with_parent()
    Follower(Link(socket.socket(fileno=int(arguments[0])), SEND_LIMIT_S)).run()


if __name__ == "__main__":
    main(sys.argv[1:])

"""Ranks that a fork server starts: torch is imported once for all tests of a worker, ten seconds of
CPU that a rank otherwise takes for itself.

A rank started so has no reaper. What a rank does that is killed, stopped or left alone is asked of
those that start as in the product: `ODD` ones, and all of `trainer/test_parallel_deaths.py`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rlstreams.streams.process.child import Child
from rlstreams.streams.process.fork_server import Forked
from rlstreams.workers.compute.team import _started
from rlstreams.workers.model.base import VISIBLE

ODD = "tests.heavy.trainer.odd_follower"  # knows no torch, and is what tests kill

# What a rank imports sooner or later, whichever program it is.
PRELOAD = (
    "rlstreams.streams.process.fork_server",  # first: it takes a session of its own
    "rlstreams.workers.bootstrap.preload",
    "rlstreams.workers.compute.group",
    "rlstreams.workers.trainer.training.training",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)


def _follow(
    program: str, end: socket.socket, more: Sequence[str], given: Mapping[str, str]
) -> None:
    """Runs in the rank: what `python -m PROGRAM FD ...` would do."""
    os.setsid()
    os.environ.update(given)
    sys.argv = [program, str(end.detach()), *more]
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def forked(
    program: str,
    end: socket.socket,
    more: Sequence[str] = (),
    given: Mapping[str, str] | None = None,
) -> Child:
    """A rank with its end of a link."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    words = (program, end, more, {**os.environ, **(given or {})})
    process = context.Process(target=_follow, args=words, daemon=True)
    process.start()
    return Child(Forked(process))


def started(program: str, gpu: str) -> tuple[Child, socket.socket]:
    """In the place of `team._started`."""
    if program == ODD:
        return _started(program, gpu)
    ours, theirs = socket.socketpair()
    with theirs:
        return forked(program, theirs, (), {VISIBLE: gpu} if gpu else {}), ours


class HostsChild(Child):
    """In the place of a rank server's `Child`."""

    @classmethod
    def started(cls, argv: Sequence[Any], **asked: Any) -> Child:  # type: ignore[override]
        """Its command is `python -m PROGRAM FD FOLDER`."""
        _, _, program, descriptor, *more = argv
        if program == ODD:
            return super().started(argv, **asked)
        with socket.socket(fileno=os.dup(int(descriptor))) as end:
            return forked(program, end, more, asked["environment"])

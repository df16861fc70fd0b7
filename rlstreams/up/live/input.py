"""What the live view is told: frozen view states, processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlstreams.streams.views.feed import ViewState
from rlstreams.up.live.words import KillMark, spell


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """One child process of the supervisor."""

    worker: str
    role: str
    pid: int | None
    is_alive: bool
    restarts: int = 0
    instance: str = ""  # of the process; empty while there is none
    started_s: float | None = None  # monotonic; None: there is none, and none is about to start


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveInput:
    """All that is shown."""

    run: str
    views: ViewState
    elapsed_s: float
    step_target: int = 0  # until the trainer's claim says it
    processes: Sequence[ProcessInfo] = ()
    kills: Sequence[KillMark] = ()
    message: str = ""  # the newest thing that happened, e.g. a kill
    state: str = "running"  # "starting", "running", "draining", ...
    decode: Callable[[Sequence[int]], str] = field(default=spell)

    @property
    def target(self) -> int:
        """Steps to do; 0 while nobody knows."""
        return self.views.run.step_target or self.step_target


__all__ = ["KillMark", "LiveInput", "ProcessInfo"]

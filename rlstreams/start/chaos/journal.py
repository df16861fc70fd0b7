"""The record of one chaos run: which faults were injected, when, and who woke up afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from rlstreams.start.chaos.plan import Fault
from rlstreams.streams.log.bus import Bus
from rlstreams.up.supervisor.fault_hook import FaultTargets
from rlstreams.up.supervisor.fleet import Exited

if TYPE_CHECKING:
    from rlstreams.up.supervisor.fault_hook import Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A fault that happened."""

    fault: Fault
    instance: str  # of the process; "" for the broker and for model servers
    step: int  # done by then
    at_s: float  # monotonic
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """What happened, in order."""

    planned: Sequence[Fault]
    injections: list[Injection] = field(default_factory=list)
    woken_s: dict[str, float] = field(default_factory=dict)  # by instance, monotonic
    broker_kills_s: list[float] = field(default_factory=list)  # monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """What is left of an `up` that was killed as planned, for the one that goes on."""

    journal: Journal
    left: Sequence[Fault]
    first_step: int | None = None  # None: none was killed
    exits: Sequence[Exited] = ()  # that it saw
    num_killed: int = 0  # processes, under it


# What to say at the end; see `FaultHook.conclude`.
Conclude: TypeAlias = "Callable[[Bus, Ended, int, Journal, FaultTargets], int]"

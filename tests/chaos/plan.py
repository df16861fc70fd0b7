"""Which fault strikes whom, and when: pure, all of it follows from a seed; and what came of it.

Victims are dealt like cards, so that every role is struck equally often; everything else is drawn.
Times are intervals on the wall clock. A fault whose time would come too late strikes at its share
of the steps instead, so that all of them find a run that is still going on.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rlstreams.streams.log.crash_points import CrashPoint

BROKER = "broker"
SERVER = "server"  # the role; its model server ends with it
RECORDS = "records"  # what the topics carry
AGENTS = "agents"  # processes of agents, and of runners that work for us elsewhere
ROLES = ("rollout", "logprob", "trainer", "prompts")
# Around the session timeout of the embedded broker (4 s) and the transaction timeout (30 s).
SHORT_STOP_S = (2.0, 8.0)
LONG_STOP_S = (24.0, 39.0)
LONG_SHARE = 0.15
MAX_COUNT = 40  # a crash point is passed this often, at most, before it strikes


class FaultKind(StrEnum):
    """What is done to a process."""

    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP, later SIGCONT; nobody takes its place
    ZOMBIE = "zombie"  # SIGSTOP, a successor starts, SIGCONT
    POINT = "crash point"  # SIGKILL, and the successor dies at a crash point
    DAMAGE = "damage"  # records that cannot be read are written into every topic


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault to inject."""

    number: int  # from 0
    role: str  # or another of the names above
    ordinal: int
    kind: FaultKind
    wait_s: float  # after the fault before, or after the start
    stop_s: float = 0.0  # shortest time between SIGSTOP and SIGCONT
    crash_at: str = ""  # as `rlstreams.streams.log.crash_points.arm_from` reads it

    @property
    def victim(self) -> str:
        """`{role}-{ordinal}`, or the name of what exists once."""
        return f"{self.role}-{self.ordinal}" if self.role in (*ROLES, SERVER) else self.role

    @property
    def told(self) -> str:
        """In words."""
        asleep = f"SIGSTOP to {self.victim} for {self.stop_s:.1f} s"
        return {
            FaultKind.KILL: f"SIGKILL to {self.victim}",
            FaultKind.STOP: asleep,
            FaultKind.ZOMBIE: f"{asleep}, or until its successor is at work",
            FaultKind.POINT: f"SIGKILL to {self.victim}, and to its successor at {self.crash_at}",
            FaultKind.DAMAGE: "damaged records into every topic",
        }[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """What is to be broken, and how much."""

    num_faults: int
    seed: int = 0
    roles: Sequence[str] = ()  # empty: all, and broker and model servers if they are ours
    every_s: float = 5.0  # mean time between two faults
    max_stop_s: float = LONG_STOP_S[1]
    has_points: bool = False
    only_kills: bool = False  # SIGKILL and nothing else
    json_file: str = ""  # for the report; "": none


def plan(options: ChaosOptions, counts: Mapping[str, int]) -> Sequence[Fault]:
    """The faults, in order; the same for the same arguments.

    Args:
        counts: workers by role; each of the others counts 1.
    """
    draw = random.Random(options.seed)
    victims = _deal(draw, sorted(counts))
    return [
        _fault(draw, number, next(victims), options, counts) for number in range(options.num_faults)
    ]


def injected_by_step(number: int, num_faults: int, first_step: int, step_target: int) -> int:
    """The step after which fault `number` strikes, even if its time has not come."""
    return first_step + (number + 1) * (step_target - first_step) // (num_faults + 1)


def points_of(role: str) -> Sequence[CrashPoint]:
    """The crash points that a worker of `role` passes."""
    own = {
        "prompts": ("checkpoint", "forward", "offsets"),
        "rollout": ("checkpoint",),
        "logprob": ("checkpoint",),
        "trainer": ("offsets",),
    }[role]
    return [point for point in CrashPoint if not point.startswith(own)]


def _deal(draw: random.Random, roles: Sequence[str]) -> Iterator[str]:
    while True:
        yield from draw.sample(roles, len(roles))


def _fault(
    draw: random.Random, number: int, role: str, options: ChaosOptions, counts: Mapping[str, int]
) -> Fault:
    kind = FaultKind.KILL
    if not options.only_kills:
        kind = _kind(draw, role, has_points=options.has_points)
    is_stop = kind in (FaultKind.STOP, FaultKind.ZOMBIE)
    return Fault(
        number=number,
        role=role,
        ordinal=draw.randrange(counts[role]),
        kind=kind,
        wait_s=options.every_s * draw.uniform(0.5, 1.5),
        stop_s=_stop_s(draw, options.max_stop_s) if is_stop else 0.0,
        crash_at=_crash_at(draw, role) if kind is FaultKind.POINT else "",
    )


def _kind(draw: random.Random, role: str, *, has_points: bool) -> FaultKind:
    if role == RECORDS:
        return FaultKind.DAMAGE
    # A server that is suspended keeps its port, so it has no successor; an agent has none anyway.
    if role in (SERVER, AGENTS):
        return FaultKind.KILL
    weights = {FaultKind.KILL: 5, FaultKind.STOP: 2}
    if role != BROKER:
        weights |= {FaultKind.ZOMBIE: 2, FaultKind.POINT: 3 if has_points else 0}
    return draw.choices(list(weights), list(weights.values()))[0]


def _stop_s(draw: random.Random, max_stop_s: float) -> float:
    low, high = LONG_STOP_S if draw.random() < LONG_SHARE else SHORT_STOP_S
    return min(draw.uniform(low, high), max_stop_s)


def _crash_at(draw: random.Random, role: str) -> str:
    point = draw.choice(points_of(role))
    # A checkpoint is rare: its first time must do.
    return point if point.startswith("checkpoint") else f"{point}:{draw.randint(1, MAX_COUNT)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A fault that happened."""

    fault: Fault
    instance: str  # of the process; "" for what is no worker
    step: int  # done by then


@dataclass(slots=True, kw_only=True)
class Journal:
    """What is to happen, and what happened."""

    planned: Sequence[Fault]
    seed: int = 0
    started_s: float = 0.0  # of `up`; monotonic, as all times here
    injections: list[Injection] = field(default_factory=list)
    woken_s: dict[str, float] = field(default_factory=dict)  # by instance
    left: deque[Fault] = field(init=False)  # in the order in which they strike

    def __post_init__(self) -> None:
        self.left = deque(self.planned)

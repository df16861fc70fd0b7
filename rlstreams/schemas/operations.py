"""Facts about running the system: dead letters, reports, the desired state, leases."""

from __future__ import annotations

from dataclasses import dataclass, field

CONTROL_STATES = ("running", "paused", "draining")
LEASE_STATES = ("granted", "held", "recalled", "released", "lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record or sample that could not be handled, with its bytes and where they came from."""

    group_id: str  # "" where the record could not be read that far
    sample: int  # -1 likewise
    purpose: str
    row: int
    dataset_epoch: int
    replacement: int
    reason: (
        str  # a stable code: "decode", "validation", "reward", "scoring", "prompt_too_long", ...
    )
    detail: str
    permanent: bool  # True: another attempt at the same row would fail alike
    role: str
    worker: str
    origin_topic: str
    origin_partition: int
    origin_offset: int
    key: bytes
    value: bytes
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacementRequested:
    """An operator wants a dropped group's row tried once more, whatever its dead letter said."""

    run: str
    group_id: str  # of the closed group; the one that answers names it in `replaces`
    by: str
    reason: str
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """The load that a worker puts on one model server."""

    server: str  # its address
    in_flight: int  # requests that it was given and has not answered
    limit: int  # most that it is given at once
    why: str  # what moved the limit last
    num_preemptions: int  # that this worker has seen


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """State and counters of one worker; counters only grow while `instance` stays the same."""

    worker: str
    role: str
    instance: str
    # "joining", "starting", "waiting", "pulling", "working", "draining", "stopped"
    state: str
    detail: str  # what it waits for, if it waits
    policy_version: int
    counters: dict[str, float] = field(default_factory=dict)
    at_ms: int = 0  # on the clock of its host
    host: str = ""  # name of the machine or container; empty: of a release without this field
    servers: dict[str, str] = field(default_factory=dict)  # state of each model server, by address
    loads: tuple[ServerLoad, ...] = ()  # of those that it uses
    gateway: str = ""  # where other workers reach its gateway; "": it has none for outside clients
    release: str = ""  # version and commit of its code; empty: of a release without this field


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlState:
    """The desired state of a run; the last one wins, `workers` role by role."""

    run: str
    revision: int
    state: str  # one of CONTROL_STATES
    limits: dict[str, float] = field(default_factory=dict)
    by: str = ""
    at_ms: int = 0
    reason: str = ""  # why, in a sentence, where no operator asked for the change
    # Processes that `up` keeps, by role; a role that is not named: as many as before.
    workers: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLease:
    """One change of a lease on a device that roles share; at most one process holds it."""

    run: str
    device: str  # its name in the configuration
    turn: int  # the number of a shift: counts the grants of this device, from 1
    state: str  # one of LEASE_STATES
    holder: str  # worker that this shift is granted to
    instance: str  # its process
    reason: str = ""  # why it changed hands
    seconds: float = 0.0  # what this change took; of "lost": how long the shift had lasted
    waiting: dict[str, float] = field(default_factory=dict)  # samples by role, as it was decided
    by: str = ""
    at_ms: int = 0

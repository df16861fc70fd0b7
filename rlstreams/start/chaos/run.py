"""`rlstreams chaos`: a run of `up`, struck as planned; then what the log and the journal say."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlstreams.start.chaos.damage import Vandal
from rlstreams.start.chaos.injector import FaultInjector
from rlstreams.start.chaos.plan import (
    BROKER,
    RECORDS,
    ROLES,
    SERVER,
    Fault,
    FaultSpace,
    Journal,
    plan,
    points_of,
    sweep,
)
from rlstreams.start.chaos.verdict import machine
from rlstreams.streams.log.crash_points import CrashPoint
from rlstreams.streams.log.errors import ConfigError
from rlstreams.up.supervisor.fault_hook import UpOptions
from rlstreams.up.supervisor.fleet import num_workers
from rlstreams.up.supervisor.up import up
from rlstreams.workers.config.run import RunConfig

NAMES = (*ROLES, BROKER, SERVER, RECORDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """What is to be broken, and how much."""

    num_faults: int
    seed: int = 0
    roles: Sequence[str] = ()  # empty: all, and broker and model servers if they are ours
    every_s: float = 5.0
    max_stop_s: float = 40.0
    has_points: bool = False
    sweep: Sequence[str] = ()  # instead: once each crash point that begins with one of these
    json_file: str = ""


def chaos(up_options: UpOptions, options: ChaosOptions) -> int:
    """Run it; 0 only if the run is complete, every fault happened and no promise was broken.

    Raises:
        StreamsError: as `up`; a role that cannot be struck.
    """
    config = up_options.config
    space = FaultSpace(
        counts=victims(config, options.roles),
        every_s=options.every_s,
        has_points=options.has_points,
        max_stop_s=options.max_stop_s,
    )
    journal = Journal(
        planned=_faults(options, space),
        seed=options.seed,
        started_s=time.monotonic(),
        machine=machine(),
    )
    _check_writable(options.json_file)
    hook = FaultInjector(
        journal,
        vandal=Vandal(config, options.seed),
        stall_s=config.deadlines.stall_s,
        json_file=options.json_file,
    )
    return up(up_options, hook)


def _faults(options: ChaosOptions, space: FaultSpace) -> Sequence[Fault]:
    """What is to happen.

    Raises:
        ConfigError: a beginning that no crash point of these roles has: it would prove nothing.
    """
    if not options.sweep:
        return plan(options.seed, options.num_faults, space)
    for prefix in options.sweep:
        if not sweep(options.seed, space, [prefix]):
            points = {point for role in space.counts.keys() & {*ROLES} for point in points_of(role)}
            known = ", ".join(point for point in CrashPoint if point in points)
            raise ConfigError(
                f"--each-point: no place begins with {prefix!r}; "
                + (f"those of these roles are {known}" if known else "these roles pass none")
            )
    return sweep(options.seed, space, options.sweep)


def _check_writable(json_file: str) -> None:
    """Before the run, not after it, when all figures would be lost.

    Raises:
        ConfigError: the file's folder is not there, or cannot be written.
    """
    folder = Path(json_file).absolute().parent
    if json_file and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"--json {json_file}: {folder} is no folder that can be written")


def victims(config: RunConfig, roles: Sequence[str]) -> dict[str, int]:
    """How many there are of each role that is to be struck.

    Raises:
        ConfigError: no such role, or a broker or model servers that are not ours.
    """
    counts = num_workers(config)
    others = {}
    if config.broker.bootstrap:
        others[BROKER] = (
            f"that at {config.broker.bootstrap} is not ours: leave it out, or clear "
            "broker.bootstrap for an embedded one"
        )
    else:
        counts[BROKER] = 1
    counts[RECORDS] = 1
    if config.rollout.engine == "builtin":
        others[SERVER] = "the built-in engine samples in the worker's process: strike rollout"
    elif config.engine.urls:
        others[SERVER] = "those of engine.urls are not ours: leave it out, or clear engine.urls"
    elif config.engine.servers > 1:
        others[SERVER] = (
            f"engine.servers is {config.engine.servers}, and one a worker can be struck: leave it "
            "out, or start one server a worker"
        )
    else:
        counts[SERVER] = config.rollout.workers
    for role in roles:
        if role not in NAMES:
            raise ConfigError(f"--roles names {role!r}; there are: {', '.join(NAMES)}")
        if role in others:
            raise ConfigError(f"--roles names the {role}, but {others[role]}")
    return {role: counts.get(role, 1) for role in (roles or counts)}

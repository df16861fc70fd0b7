"""A run of `up`, struck as planned; then what the log and the journal say."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.up.supervisor.fault_hook import UpOptions
from rlstreams.up.supervisor.fleet import num_workers
from rlstreams.up.supervisor.up import up
from rlstreams.workers.config.run import RunConfig
from tests.chaos.injector import FaultInjector, Vandal
from tests.chaos.plan import AGENTS, BROKER, RECORDS, ROLES, SERVER, ChaosOptions, Journal, plan

NAMES = (*ROLES, BROKER, SERVER, RECORDS)


def chaos(
    up_options: UpOptions,
    options: ChaosOptions,
    kill_agent: Callable[[int], bool] | None = None,
) -> int:
    """Run it; 0 only if the run is complete, every fault happened and no promise was broken.

    Args:
        kill_agent: see `FaultInjector`; agents are struck as often as any role.

    Raises StreamsError: as `up`; a role that cannot be struck.
    """
    config = up_options.config
    counts = victims(config, options.roles) | ({AGENTS: 1} if kill_agent else {})
    planned = plan(options, counts)
    journal = Journal(planned=planned, seed=options.seed, started_s=time.monotonic())
    _check_writable(options.json_file)
    hook = FaultInjector(
        journal,
        vandal=Vandal(config, options.seed),
        kill_agent=kill_agent,
        stall_s=config.deadlines.stall_s,
        json_file=options.json_file,
    )
    return up(up_options, hook)


def _check_writable(json_file: str) -> None:
    """Before the run, not after it, when all figures would be lost.

    Raises ConfigError: the file's folder is not there, or cannot be written.
    """
    folder = Path(json_file).absolute().parent
    if json_file and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"--json {json_file}: {folder} is no folder that can be written")


def victims(config: RunConfig, roles: Sequence[str]) -> dict[str, int]:
    """How many there are of each role that is to be struck.

    Raises ConfigError: no such role, or a broker or model servers that are not ours.
    """
    counts = {role: count for role, count in num_workers(config).items() if count}
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
    for role in roles:
        if role not in NAMES:
            raise ConfigError(f"--roles names {role!r}; there are: {', '.join(NAMES)}")
        if role in others:
            raise ConfigError(f"--roles names the {role}, but {others[role]}")
    return {role: counts.get(role, 1) for role in (roles or counts)}

"""`rlstreams control pause|resume|drain|scale RUN`: the desired state of a live run."""

from __future__ import annotations

import re
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.named import configuration, opened_run
from rlstreams.cli.options import RUN, SECONDS, CommandGroup, command, option
from rlstreams.streams.log.errors import ConfigError, DeadlineError

if TYPE_CHECKING:
    from rlstreams.streams.run.run_log import RunLog
    from rlstreams.streams.workers import Workers
    from rlstreams.workers.config.run import RunConfig

_ACTIONS = {
    "pause": ("paused", "finish what is begun, begin nothing new; weights are still pulled"),
    "resume": ("running", "go on after a pause; after a drain, before roles are started by hand"),
    "drain": ("draining", "finish what is begun and end; `up` ends with it, --resume goes on"),
}

CONTROL = CommandGroup(
    "control",
    "pause, resume or drain all roles of a live run, wherever they run; scale those of `up`",
    "Writes the desired state of a run to its topic control, which each role follows: rollout "
    "finishes its requests, logprob its window, the trainer its step; `up` starts and drains "
    "workers.",
)


def _command(action: str, about: str) -> None:
    @command(action, f"rlstreams control {action} runs/demo", of=CONTROL, takes=RUN, text=about)
    def run(args: Namespace) -> int:
        return control(action, args)


def _live(config: RunConfig) -> RunConfig:
    """The configuration of a run whose broker serves, or is started again by an `up`: any other
    would be started for a look.

    Raises:
        ConfigError: the run's own broker has stopped, so no role of it runs.
    """
    from rlstreams.streams.log.owner_lock import is_held
    from rlstreams.streams.run.run_lock import LOCK_FILE
    from rlstreams.workers.bootstrap.parts import embedded_broker

    broker = embedded_broker(config)
    has_stopped = not config.broker.bootstrap and broker.status() is None
    was_there = (broker.folder / "broker.json").is_file()  # else it never ran, as is told elsewhere
    if has_stopped and was_there and not is_held(Path(config.folder) / LOCK_FILE):
        raise ConfigError(
            f"run {config.run.id} is not live: its broker has stopped, so no role follows what is "
            "asked; `rlstreams up ... --resume` goes on with it"
        )
    return config


def control(action: str, args: Namespace) -> int:
    """Write an action's desired state to the topic `control`.

    Raises:
        ConfigError: no such run, or it is not live.
        BrokerError: its broker cannot be reached.
    """
    from rlstreams.streams.log.codec import outgoing
    from rlstreams.streams.log.topics import CONTROL as TOPIC
    from rlstreams.workers.loop.control import desired

    state, _ = _ACTIONS[action]
    config = _live(configuration(*args.config))
    with opened_run(config) as log, log.bus.producer("control") as producer:
        producer.commit([outgoing(TOPIC, desired(config.run.id, state, by="operator"))])
    print(f"run {config.run.id}: {state}")
    return 0


for _action, (_, _about) in _ACTIONS.items():
    _command(_action, _about)


_WANTED = re.compile(r"([a-z]+)=(\d+)")


@command(
    "scale",
    "rlstreams control scale runs/demo rollout=4",
    "rlstreams control scale runs/demo rollout=2 logprob=2",
    of=CONTROL,
    takes=RUN,
    text="have `up` keep N workers of a role, ROLE=N; one that leaves finishes its work first",
)
@option(
    "--within",
    type=SECONDS,
    help="how long to wait until they are there; 0: not at all",
    default=120.0,
    show_default=True,
)
def scale(args: Namespace) -> int:
    """Write the wanted numbers to `control`, and wait until the workers have come or left.

    Raises:
        ConfigError: no such run, one that is not live, or one that cannot have so many workers.
        DeadlineError: `up` has other numbers of workers after `--within`.
    """
    from rlstreams.streams.log.codec import outgoing
    from rlstreams.streams.log.topics import CONTROL as TOPIC
    from rlstreams.up.supervisor.scale import partitions_of, problem
    from rlstreams.workers.loop.control import ControlFollower, desired

    wanted = {m[1]: int(m[2]) for m in map(_WANTED.fullmatch, args.config.names) if m}
    names = [name for name in args.config.names if not _WANTED.fullmatch(name)]
    if not wanted:
        raise ConfigError("name a role and a number, rollout=4 for instance")
    config = _live(configuration(names, args.config.overrides))
    with opened_run(config) as log, log.bus.producer("control") as producer:
        partitions = partitions_of(log.bus)
        for role, number in wanted.items():
            if why := problem(config, role, number, partitions):
                raise ConfigError(why)
        state = ControlFollower(log.bus).caught_up().state
        record = outgoing(TOPIC, desired(config.run.id, state, by="operator", workers=wanted))
        producer.commit([record])
        _await(log, config, wanted, args.within)
    return 0


def _await(log: RunLog, config: RunConfig, wanted: Mapping[str, int], limit_s: float) -> None:
    """Wait until `up` has the wanted workers; those that joined by themselves are not counted."""
    from rlstreams.workers.bootstrap.seats import WorkersThere

    there = WorkersThere(log.bus)
    until_s = time.monotonic() + limit_s
    there.catch_up()
    while (found := {role: _num_own(there.workers, role) for role in wanted}) != dict(wanted):
        if time.monotonic() >= until_s:
            if not limit_s:
                break
            present = ", ".join(f"{role}={number}" for role, number in found.items())
            raise DeadlineError(
                f"run {config.run.id} has {present} after {limit_s:g} s, and asked for are "
                f"{', '.join(f'{r}={n}' for r, n in wanted.items())}: `rlstreams up` of this run "
                "starts and drains them and says why not (logs/up.log in the run's folder); "
                "without it start workers by `rlstreams worker ROLE --join BROKER --run NAME`"
            )
        there.poll(0.2)
    for role, number in found.items():
        print(f"run {config.run.id}: {role} {number}")


def _num_own(workers: Workers, role: str) -> int:
    return sum(not life.is_joined for life in workers.present(role))

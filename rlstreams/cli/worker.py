"""`rlstreams worker ROLE CONFIG...`: one role, one process."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.arguments import Commands, add_config, command, set_threads, whole

if TYPE_CHECKING:
    from rlstreams.workers.config.run import RunConfig
    from rlstreams.workers.loop.health import Health

BROKER_S = 60.0  # longest wait for a broker that is being started again
ROLES = ("prompts", "rollout", "logprob", "trainer")


def add(subparsers: Commands) -> None:
    """Register the command."""
    parser = command(
        subparsers,
        "worker",
        run,
        """
        run one worker of one role

        Works until the run is complete, or SIGTERM: then it drains. Exit status 0 done or drained,
        75 fenced by a successor, 76 another trainer is alive, 78 configuration refused, 1 anything
        else.

        --ordinal N      which worker of its role, from 0 (%(default)s)
        --takeover       the predecessor is known to be dead: a trainer does not wait for its lease
        --health-port N  answer /health and /load, as JSON, on this port; -1: nobody (%(default)s)
        --health-host H  address that they are answered on (%(default)s)

        rlstreams worker rollout run.toml --ordinal 1
        rlstreams worker trainer run.toml --broker.bootstrap=10.0.0.5:9092
        """,
        ordinal_={"type": whole(0), "default": 0},
        health_port_={"type": whole(-1, 65_535), "default": -1},
        health_host_={"default": "127.0.0.1"},
    )
    parser.add_argument("role", choices=ROLES, metavar="ROLE", help=", ".join(ROLES))
    add_config(parser)
    # Set by `up`: the id that its reports carry, the ids of its predecessors that are known to have
    # ended, a pipe that closes when `up` is gone, and where it is to die on purpose.
    parser.add_argument("--instance", default="", help=argparse.SUPPRESS)
    parser.add_argument("--reaped", default="", help=argparse.SUPPRESS)
    parser.add_argument("--crash-at", default="", help=argparse.SUPPRESS)
    parser.add_argument("--supervisor-fd", type=int, default=-1, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Work until done, drained or failed; the status says which (`workers.loop.runtime.Exit`)."""
    import uuid

    from rlstreams.workers.loop import lease, runtime
    from rlstreams.workers.loop.context import Context
    from rlstreams.workers.loop.control import ControlFollower, ControlledRole

    stop = runtime.Stop()
    stop.on_signals()
    if args.supervisor_fd >= 0:
        stop.when_closed(args.supervisor_fd)
    config = _config(args)
    set_threads(config.model.threads)
    from rlstreams.workers.bootstrap.parts import arm_crash_point, await_broker, make_role, open_bus
    from rlstreams.workers.loop.agreement import check_alone, check_ordinal
    from rlstreams.workers.loop.stall import Watchdog, turn_limit_s
    from rlstreams.workers.loop.standalone import StandaloneRole

    try:
        arm_crash_point(args.crash_at)
        is_alone = args.supervisor_fd < 0
        if is_alone:
            check_alone(config)
            check_ordinal(config, args.role, args.ordinal)
        else:
            await_broker(config, BROKER_S)
            if args.role == "logprob":
                config = config.of_replica(args.ordinal)
        with open_bus(config) as bus, _health(args) as health:
            watchdog = Watchdog(turn_limit_s(config), health.beat)
            context = Context(
                config=config,
                bus=bus,
                role=args.role,
                ordinal=args.ordinal,
                instance=args.instance or uuid.uuid4().hex,
                takeover=args.takeover,
                reaped=frozenset(filter(None, args.reaped.split(","))),
                beat=watchdog.beat,
                told=health.told,
            )
            if is_alone:  # `up` did, with the topics
                from rlstreams.streams.log.catalogue import publish_missing

                publish_missing(bus, context.worker)
            device = config.shared_device(args.role)
            control = ControlFollower(bus, None if device is None else lease.POLL_S)
            turns = None if device is None else lease.DeviceTurns(context, device, control.leases)
            if turns and not turns.await_first(lambda: bool(control.poll()) and not stop.requested):
                return runtime.Exit.DONE
            pausable = make_role(context)
            role: runtime.Role = pausable
            if is_alone and args.role != "trainer":  # the trainer's is the configuration
                role = StandaloneRole(role, context)
            runtime.run(ControlledRole(role, pausable, control, turns), stop, watchdog)
    except Exception as err:  # noqa: BLE001  (the process border: told, and turned into a status)
        runtime.explain(err)
        return runtime.exit_status(err)
    return runtime.Exit.DONE


@contextmanager
def _health(args: argparse.Namespace) -> Iterator[Health]:
    """What is told of this worker; answered meanwhile, if a port is named."""
    from rlstreams.workers.loop.health import Health

    health = Health(f"{args.role}-{args.ordinal}")
    is_asked = args.health_port >= 0
    with health.served(args.health_host, args.health_port) if is_asked else nullcontext():
        yield health


def _config(args: argparse.Namespace) -> RunConfig:
    """From TOML files, or from the one JSON file that `up` wrote."""
    from rlstreams.workers.config.load import load, read_json

    first = Path(args.config[0])
    if first.suffix == ".json":
        return read_json(first)
    return load(args.config, args.overrides)

"""`rlstreams worker ROLE CONFIG...`: one role, one process."""

from __future__ import annotations

import re
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.options import (
    CONFIG,
    COUNT,
    PORT,
    argument,
    command,
    hidden,
    one_of,
    option,
    set_threads,
)
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.roles import ROLES
from rlstreams.streams.process.priority import COMPUTES, give_way
from rlstreams.workers.loop.runtime import Role, Stop

if TYPE_CHECKING:
    from rlstreams.streams.log.bus import Bus
    from rlstreams.workers.bootstrap.joining import Joined
    from rlstreams.workers.config.operation import Device
    from rlstreams.workers.config.run import RunConfig
    from rlstreams.workers.loop.context import Context
    from rlstreams.workers.loop.health import Health
    from rlstreams.workers.loop.stall import Watchdog

JOINABLE = ("rollout", "logprob", "server")
BROKER_S = 60.0  # longest wait for a broker that is being started again


_FLOW = re.compile(r"consumes:\s+(.*?)\s*produces:\s+(.*?)\s*waits for:", re.I | re.S)


def roles() -> str:
    """Return lines on the topics that each role consumes and produces, from its docstring."""
    lines = []
    for path in sorted(Path(str(files("rlstreams.workers"))).glob("*/worker.py")):
        if (found := _FLOW.search(path.read_text(encoding="utf-8"))) is None:
            continue
        consumes, produces = (" ".join(text.split()).rstrip(".") for text in found.groups())
        lines += [f"  {path.parent.name}", *_wrapped(f"consumes {consumes}")]
        lines += _wrapped(f"produces {produces}")
    about = "roles, each a process (`rlstreams broker topics` makes the run's topics first):"
    return "\n\n" + "\n".join([about, *lines])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, 78, initial_indent=4 * " ", subsequent_indent=6 * " ", break_on_hyphens=False
    )


# Set by `up`: the instance id for its reports, the ids of predecessors known to have ended, the
# sign that its standard input closes when `up` ends, the newest epoch when `up` began, the crash
# point at which it must die, and the addresses of the run's model servers.
_HIDDEN = (
    "--instance", "--reaped", "--owner", "--claims-after", "--crash-at", "--server-urls",
)  # fmt: skip


@command(
    "worker",
    "rlstreams worker rollout run.toml --ordinal 1",
    "rlstreams worker trainer run.toml --broker.bootstrap=10.0.0.5:9092",
    "rlstreams worker rollout --join 10.0.0.5:9092 --run demo --model.path=/srv/model",
    takes=CONFIG,
    needs_names=False,
    appendix=roles,
)
@hidden(*_HIDDEN)
@argument(
    "ROLE",
    "server: a model server of rollout workers; ranks: what a trainer on another host asks for",
    type=one_of(*ROLES, "ranks"),
)
@option(
    "--ordinal",
    type=COUNT,
    metavar="N",
    help="worker N of its role, from 0; of ranks, which of trainer.hosts. Default: 0; with "
    "--join the lowest from 1000 on that is free",
)
@option(
    "--join",
    metavar="BROKER",
    help="rollout, logprob or server: join the live run of --run at this broker, HOST:PORT, with "
    "the configuration that its trainer claimed; CONFIG is left out, and what is this host's own "
    "set by --section.field VALUE",
)
@option("--run", metavar="NAME", help="the run to join")
@option(
    "--password-file",
    metavar="FILE",
    help="password of the broker that is joined: of an embedded one, broker/password in the run's "
    "folder; another login is set by --broker.options.NAME VALUE",
)
@option(
    "--takeover",
    is_flag=True,
    help="the predecessor is known to be dead: a trainer does not wait for its lease",
)
@option("--health-port", type=PORT, help="answer /health and /load, as JSON, on this port")
@option(
    "--health-host",
    metavar="HOST",
    help="address that they are answered on",
    default="127.0.0.1",
    show_default=True,
)
def run(args: Namespace) -> int:
    """run one worker of one role

    Works until the run is complete, or SIGTERM: then it drains. Exit status 0 done or drained,
    75 fenced by a successor, 76 another trainer is alive, 78 configuration refused, 1 anything
    else.
    """
    from rlstreams.workers.loop import runtime

    stop = runtime.Stop()
    stop.on_signals()
    if args.owner:
        stop.when_gone(args.owner)
    joined: Joined | None = None
    if _is_joining(args):
        from rlstreams.workers.bootstrap.joining import join

        overrides = args.config.overrides
        joined = join(args.role, args.join, args.run, overrides, password_file=args.password_file)
    config = joined.config if joined else _config(args)
    set_threads(config.model.threads)
    if computes(args.role, config):
        give_way(COMPUTES)  # before libraries start threads, which inherit it
    try:
        if args.role == "ranks":
            _serve_ranks(args, config, stop)
        else:
            _work(args, config, stop, joined)
    except Exception as err:  # noqa: BLE001  (the process border: logged, and turned into a status)
        runtime.explain(err)
        return runtime.exit_status(err)
    return runtime.Exit.DONE


def computes(role: str, config: RunConfig) -> bool:
    """Whether a worker of this role runs a model in its own process."""
    if role == "rollout":
        return not config.is_served
    return role in ("trainer", "ranks") or (role == "logprob" and config.has_scorer)


def _is_joining(args: Namespace) -> bool:
    """Whether the run is named by its broker and its id.

    Raises:
        ConfigError: broker or id is missing, or an option is given that has no place beside them.
    """
    if not args.join:
        if extra := [n for n in ("run", "password_file") if getattr(args, n)]:
            raise ConfigError(f"--{extra[0].replace('_', '-')} is for --join BROKER")
        return False
    if args.role not in JOINABLE:
        why = "needs the run's files" if args.role in ("trainer", "prompts") else "is not joined"
        raise ConfigError(f"--join: {args.role} {why}; {', '.join(JOINABLE)} join by --join")
    if not args.run:
        raise ConfigError(f"--join {args.join}: --run NAME is missing, the id of the run")
    if args.config.names:
        raise ConfigError(
            f"--join {args.join}: the configuration is the run's own, so {args.config.names[0]} "
            "has no place; set what is this host's by --section.field VALUE"
        )
    return True


def _work(args: Namespace, config: RunConfig, stop: Stop, joined: Joined | None) -> None:
    from rlstreams.workers.bootstrap.judge_server import is_judge
    from rlstreams.workers.bootstrap.parts import arm_crash_point, await_broker, make_role, open_bus
    from rlstreams.workers.bootstrap.seats import take_seat
    from rlstreams.workers.loop import lease, runtime
    from rlstreams.workers.loop.agreement import check_alone, check_ordinal
    from rlstreams.workers.loop.compared import ClaimCheck, ComparedRole
    from rlstreams.workers.loop.control import ControlFollower, ControlledRole
    from rlstreams.workers.loop.stall import Watchdog, tick_limit_s
    from rlstreams.workers.loop.standalone import StandaloneRole

    arm_crash_point(args.crash_at)
    is_alone = not args.owner
    ordinal = args.ordinal or 0
    if is_alone:
        check_alone(config)
        if joined is None:
            check_ordinal(config, args.role, ordinal)
    else:
        await_broker(config, BROKER_S)
    if args.role == "logprob":
        config = _placed(config, 0 if is_alone else ordinal)
    with open_bus(config) as bus, _health(args) as health:
        # A model server's worker never waits in a poll, and a start of its server takes long.
        watchdog = Watchdog(tick_limit_s(config), health.beat, args.role != "server")
        context = _context(args, config, bus, joined)
        context = replace(context, beat=watchdog.beat, on_report=health.report)
        if is_alone:  # `up` did, with the topics
            from rlstreams.streams.log.catalogue import publish_missing

            publish_missing(bus, context.worker)
            context.log.info("starting", run=config.run.id)  # libraries take seconds to import
        is_server, device = args.role == "server", _shared_device(context)
        control = ControlFollower(bus, None if device is None else lease.POLL_S)
        shifts: lease.RoleShifts | None = None
        if device is not None and is_server and not is_judge(context):
            shifts = lease.FollowedShifts(device, control.leases)
        elif device is not None:
            shifts = own = lease.DeviceShifts(context, device, control.leases)
            if not own.await_first(lambda: bool(control.poll()) and not stop.requested):
                return
        is_compared = args.role != "trainer"  # all others compare theirs with the trainer's claim
        if is_compared:
            ClaimCheck(context).at_start()
        if joined is not None:  # it may have been refused, and nobody has heard of it
            _import_first(config, args.role)
            ordinal = take_seat(bus, args.role, context.instance, args.ordinal)
            context = replace(context, ordinal=ordinal)
            context.log.info("joined", run=config.run.id, epoch=joined.claim.epoch)
        pausable = make_role(context)
        compared = StandaloneRole if is_alone else ComparedRole
        role: runtime.Role = compared(pausable, context) if is_compared else pausable
        _drive(context, ControlledRole(role, pausable, control, shifts), stop, watchdog)


def _drive(context: Context, role: Role, stop: Stop, watchdog: Watchdog) -> None:
    """Work until the role is done, and log why it ended."""
    from rlstreams.workers.bootstrap.peers import peers_settled
    from rlstreams.workers.loop import runtime

    with peers_settled(context) if context.role in JOINABLE else nullcontext():
        runtime.run(role, stop, watchdog)
    context.log.info("ended", reason=stop.reason or "done")


def _shared_device(context: Context) -> Device | None:
    """Return the device that the role shares: a server its users', the judge's server its own."""
    from rlstreams.workers.bootstrap.judge_server import is_judge

    if is_judge(context):
        return context.config.shared_device("judge")
    return context.config.shared_device("rollout" if context.role == "server" else context.role)


def _import_first(config: RunConfig, role: str) -> None:
    """Import the role's libraries; an ordinal taken before would announce it as working."""
    if role == "server" or (role == "logprob" and not config.has_scorer):
        return
    import os
    from importlib import import_module

    from rlstreams.workers.config.hub import model_folder

    os.environ["RLSTREAMS_PRELOAD_MODEL"] = str(model_folder(config.model.path))
    import_module("rlstreams.workers.bootstrap.preload")


def _context(args: Namespace, config: RunConfig, bus: Bus, joined: Joined | None) -> Context:
    """Return this process's context; one that joins has no ordinal yet, and follows its claim."""
    import uuid

    from rlstreams.workers.loop.agreement import files_of
    from rlstreams.workers.loop.context import NO_ORDINAL, Context

    after = int(args.claims_after) if args.claims_after else None
    return Context(
        config=config,
        bus=bus,
        role=args.role,
        ordinal=NO_ORDINAL if joined else args.ordinal or 0,
        instance=args.instance or uuid.uuid4().hex,
        server_urls=tuple(filter(None, args.server_urls.split(","))),
        takeover=args.takeover,
        reaped=frozenset(filter(None, args.reaped.split(","))),
        claims_after=joined.claim.epoch - 1 if joined else after,
        is_joined=joined is not None,
        files=files_of(config, args.role),
    )


def _placed(config: RunConfig, ordinal: int) -> RunConfig:
    """Set the device of a log-prob worker: each of several gets the GPUs behind the others'."""
    from rlstreams.workers.bootstrap.gpus import placed

    return placed(config).of_replica(ordinal)


def _serve_ranks(args: Namespace, config: RunConfig, stop: Stop) -> None:
    """Serve ranks until a request to stop: the server outlives its trainers."""
    import uuid

    from rlstreams.workers.compute.rank_server import make_rank_server

    with _health(args) as health:
        server = make_rank_server(config, args.ordinal or 0, args.instance or uuid.uuid4().hex)
        while not stop.wait(1.0):
            health.beat()
        server.close()


@contextmanager
def _health(args: Namespace) -> Iterator[Health]:
    """Yield this worker's health; a port serves it meanwhile, if one is named."""
    from rlstreams.workers.loop.health import Health

    health = Health(args.role if args.join else f"{args.role}-{args.ordinal or 0}")
    is_asked = args.health_port is not None
    with health.served(args.health_host, args.health_port) if is_asked else nullcontext():
        yield health


def _config(args: Namespace) -> RunConfig:
    """Load the configuration from TOML files, or from the one JSON file that `up` wrote."""
    from rlstreams.workers.config.here import config_here
    from rlstreams.workers.config.load import load, read_json

    names = args.config.names or [config_here()]
    if Path(names[0]).suffix == ".json":
        return read_json(Path(names[0]))
    return load(names, args.config.overrides)

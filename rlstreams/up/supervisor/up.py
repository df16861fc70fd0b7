"""Everything around the loop of `up`: broker, topics, and the run's folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path

from rlstreams.check.doctor.diagnose import preflight
from rlstreams.schemas.events import ControlState, TrainerStarted
from rlstreams.show.web.beside import check_port, trackers, web_page
from rlstreams.streams.audit.report import AuditReport
from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.broker.visits import owned
from rlstreams.streams.kafka.admin import apply, broker_version_warning
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import ConfigError, StreamsError
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topic_plan import SHARED
from rlstreams.streams.log.topics import CONTROL, STEPS
from rlstreams.streams.run.run_lock import FolderGoneError, locked_run, refuse_in_use
from rlstreams.streams.run.run_log import BusLog
from rlstreams.up.live.screen import output_to
from rlstreams.up.supervisor.broker import RETURN_S, BrokerKeeper, outlasting
from rlstreams.up.supervisor.device_scheduler import DeviceScheduler
from rlstreams.up.supervisor.fault_hook import (
    EndedRun,
    FaultHook,
    FaultTargets,
    RunOutcome,
    UpOptions,
)
from rlstreams.up.supervisor.fleet import LOGS, Fleet, num_workers
from rlstreams.up.supervisor.run import Supervisor, interrupts
from rlstreams.up.supervisor.scale import Scale
from rlstreams.up.supervisor.spawner import make_spawner
from rlstreams.up.supervisor.summary import audited, program_name, show, summarize
from rlstreams.up.supervisor.watcher import Watcher
from rlstreams.workers.bootstrap.addresses import own_urls
from rlstreams.workers.bootstrap.config_file import configured, refuse_other_run, refuse_place
from rlstreams.workers.bootstrap.parts import (
    bootstrap_of,
    client_options,
    embedded_broker,
    open_bus,
    topic_plan,
)
from rlstreams.workers.config.checks import check_address
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.load import resolved_json
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.dataset.identity import data_hashes
from rlstreams.workers.loop.agreement import (
    HELD_OUT,
    WEIGHTS,
    code_digests,
    other_files,
    other_versions,
    own_code,
    tokenizer_hash,
    user_code_hashes,
    weights_digest,
)
from rlstreams.workers.loop.claims import claimed_config
from rlstreams.workers.loop.control import DRAINING, READ_S, RUNNING, desired
from rlstreams.workers.loop.foreign import EventReader
from rlstreams.workers.trainer.family import branch_line, differing
from rlstreams.workers.trainer.witnesses import check_tail


def up(options: UpOptions, hook: FaultHook | None = None) -> int:
    """Run everything; 0 if the run is complete, or drained as asked, and the audit finds nothing.

    Args:
        hook: breaks things during the run; it may change the exit status at the end.

    Raises:
        StreamsError: the broker, a topic or the configuration cannot be used.
    """
    config = options.config
    refuse_place(config)
    refuse_other_run(config)
    refuse_in_use(Path(config.folder))
    preflight(config, show)
    check_port(options.web_port)
    with ExitStack() as stack:
        folder, is_there = stack.enter_context(_folder(config))
        _set_threads(config)
        # It imports torch while the broker starts.
        spawner = make_spawner()
        broker = stack.enter_context(_broker(config))
        apply(bootstrap_of(config), config.run.id, topic_plan(config), client_options(config))
        bus = stack.enter_context(open_bus(config, outage_s=RETURN_S))
        begun = bus.ends(CONTROL.name)
        with Watcher(bus, config, is_live=options.is_live, figures=options.figures) as watcher:
            watcher.catch_up()
            _refuse_started(bus, options, watcher.ledger)
            watcher.begin()
            _say_changes(bus, watcher, config, is_resumed=options.is_resumed)
            epoch = watcher.ledger.epoch
            # Nothing was changed before: it may have been refused.
            stack.enter_context(configured(config, lambda: watcher.ledger.epoch))
            stack.enter_context(web_page(folder, options.web_port, watcher.say))
            stack.enter_context(trackers(folder, config.track.used, watcher.say, show))
            stack.enter_context(_nothing_lost(options))
            _say_running(bus, config, begun)
            say, room_s = watcher.say, config.deadlines.stall_s
            fleet = Fleet(
                spawner, folder, num_workers(config),
                progress=watcher.progress, say=say, room_s=room_s, claims_after=epoch,
                server_urls=own_urls(config))  # fmt: skip
            stack.callback(fleet.close)
            keeper = BrokerKeeper(broker, say, room_s=room_s) if broker else None
            stack.enter_context(keeper or nullcontext())
            if hook is not None:
                hook.enter(FaultTargets(fleet=fleet, broker=keeper, watcher=watcher))
            devices = stack.enter_context(DeviceScheduler(config, fleet, watcher, bus))
            scale = Scale(config, fleet, bus, is_taken=watcher.workers.is_taken, say=say)
            with interrupts() as asked:
                outcome = Supervisor(
                    config, fleet, watcher, devices,
                    broker=keeper, asked=asked, hook=hook, is_there=is_there, scale=scale,
                    on_drain=lambda: _drain_joined(bus, watcher, config),
                ).run()  # fmt: skip
            outlasting(watcher.finish, keeper)
        is_claimed = watcher.ledger.epoch != epoch
        ended = _ended(options, watcher, fleet, outcome, is_claimed, audited(bus))
        status = summarize(ended, watcher.state, BusLog(bus, config.run.id))
        return status if hook is None else hook.conclude(bus, ended, status)


def _ended(
    options: UpOptions,
    watcher: Watcher,
    fleet: Fleet,
    outcome: RunOutcome,
    is_claimed: bool,
    audit: AuditReport | None,
) -> EndedRun:
    return EndedRun(
        options=options,
        step=watcher.step,
        outcome=outcome,
        failure=fleet.failure,
        num_killed=fleet.num_killed,
        kills=tuple(watcher.kills),
        is_claimed=is_claimed,
        audit=audit,
    )


@contextmanager
def _nothing_lost(options: UpOptions) -> Iterator[None]:
    """Add to an error that ends the block before the summary how to go on."""
    try:
        yield
    except BaseException as err:
        go_on = f"go on with `{program_name()} {options.resume}`"
        hint = f"nothing that was committed is lost: {go_on}"
        if isinstance(err, FolderGoneError):
            pass
        elif isinstance(err, StreamsError):
            err.add_note(hint)
        else:
            with suppress(OSError):  # the terminal hung up
                sys.stderr.write(f"{hint}\n")
        raise


@contextmanager
def _folder(config: RunConfig) -> Iterator[tuple[Path, Callable[[], bool]]]:
    """Yield the run's folder, which no other process uses in the block and no other user can read,
    and a function that says whether it is still there.

    Raises:
        ConfigError: it cannot be made, or another process uses it.
        FolderGoneError: what went wrong in the block did so because it is not there any more.
    """
    os.umask(0o077)  # roles inherit it: logs, checkpoints and weights are their owner's
    folder = Path(config.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ConfigError(
            f"run.dir: {folder} cannot be made ({err.strerror}): name a folder that you may write"
        ) from err
    with locked_run(folder) as is_there:
        refuse_other_run(config)
        with output_to(folder / LOGS / "up.log"):
            try:
                yield folder, is_there
            except (OSError, StreamsError) as err:
                if is_there():
                    raise
                raise FolderGoneError(folder) from err


def _set_threads(config: RunConfig) -> None:
    """Set the threads of the fork server, which imports torch once for all workers."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(config.model.threads)
    os.environ["RLSTREAMS_PRELOAD_MODEL"] = str(model_folder(config.model.path))


@contextmanager
def _broker(config: RunConfig) -> Iterator[EmbeddedBroker | None]:
    """The embedded broker, stopped at the end; None where one is named."""
    if config.broker.bootstrap:
        if warning := broker_version_warning(config.broker.bootstrap, client_options(config)):
            show(f"warning: {warning}")
        yield None
        return
    check_address("broker.host", config.broker.host)
    broker = embedded_broker(config)
    if sys.stdout.isatty():  # on a busy machine nothing else would be seen for a while
        show(f"starting Apache Kafka in {broker.folder} ...")
    with owned(broker) as state:
        show(f"Apache Kafka serves {state.bootstrap} from {broker.folder}")
        yield broker


def _refuse_started(bus: Bus, options: UpOptions, ledger: Ledger) -> None:
    if ledger.branch is not None and ledger.claim is None:
        return  # nobody has run it yet
    ends, beginnings = bus.ends(STEPS.name), bus.beginnings(STEPS.name)
    is_started = any(end > beginnings[partition] for partition, end in ends.items())
    if is_started and not options.is_resumed:
        run = options.config.run
        folder = "" if "{id}" in run.dir else " --run.dir DIR"  # two runs need two folders
        raise ConfigError(
            f"run.id {run.id!r} has steps already: continue it with "
            f"`{program_name()} {options.resume}`, "
            f"or begin another run with `--run.id NAME{folder}`"
        )


def _say_running(bus: Bus, config: RunConfig, begun: Mapping[Partition, int]) -> None:
    """Have all roles run, unless somebody has asked for something else since `begun`: `up` reads
    the log for seconds, and a pause that was answered with success is not taken back."""
    with closing(EventReader(bus, begun, CONTROL.name)) as reader:
        records = list(reader.up_to(bus.ends(CONTROL.name), READ_S))
    asked = [record.event for record in records if isinstance(record.event, ControlState)]
    state = asked[-1] if asked else desired(config.run.id, RUNNING, by="up")  # for `up` too
    with bus.producer("up") as producer:
        producer.commit([outgoing(CONTROL, state)])


def _drain_joined(bus: Bus, watcher: Watcher, config: RunConfig) -> None:
    """Have workers that joined by themselves drain, before a broker of ours stops."""
    if any(life.is_joined for role in SHARED for life in watcher.workers.present(role)):
        state = desired(config.run.id, DRAINING, by="up", reason="the run ends here")
        with suppress(StreamsError), bus.producer("up") as producer:
            producer.commit([outgoing(CONTROL, state)])


def _say_changes(bus: Bus, watcher: Watcher, config: RunConfig, *, is_resumed: bool) -> None:
    claims, branch = watcher.state.run.claims, watcher.ledger.branch
    if not claims and branch is not None:
        origin = branch_line(branch, resolved_json(config))
        watcher.say(f"{origin}; it begins at step {watcher.step + 1}")
        return
    if not claims:
        if is_resumed:
            watcher.say(f"run {config.run.id} has no steps to continue: it begins")
        return
    # As the trainer does before its claim, but a minute of starts earlier.
    check_tail(bus, watcher.ledger, config.run.id, Path(config.folder))
    claimed_config(claims[-1])  # of a newer release: refused, with the names of both
    found = changes(claims[-1].config, resolved_json(config))
    refuse_other_model(config, claims[-1])  # weights of another model.dtype are other ones
    found += [*file_changes(config, claims[-1]), *other_versions(claims[-1])]
    changed = "; ".join(f"{name}: {was} -> {is_}" for name, was, is_ in found)
    watcher.say(f"continuing at step {watcher.step + 1}; changed: {changed or 'nothing'}")


def file_changes(config: RunConfig, claim: TrainerStarted) -> list[tuple[str, str, str]]:
    """Files of user code, of judges and of held-out rows that are not those of the claim,
    with 12 digits of both hashes."""
    files = user_code_hashes(config) | data_hashes(config.data, (HELD_OUT,))
    files |= code_digests(own_code(config))
    return [(f"SHA-256 of {name}", was, is_) for name, is_, was in other_files(files, claim.hashes)]


def refuse_other_model(config: RunConfig, claim: TrainerStarted) -> None:
    """Refuse to go on with other weights or another tokenizer, which the trainer would refuse once
    it has loaded them.

    Raises:
        ConfigError: names the field and both values.
    """
    path, was = config.model.path, json.loads(claim.config)["model"]["path"]
    here = {
        "tokenizer": ("tokenizer", tokenizer_hash(path)),
        WEIGHTS: ("weights", weights_digest(path, config.model.dtype)),
    }
    for name, (what, now) in here.items():
        before = claim.hashes.get(name)
        if before and now and before != now:
            then = "it had" if path == was else f"{was} had"
            raise ConfigError(
                f"model.path: {path} has other {what} than {then} when the run began (SHA-256 "
                f"{now[:12]}, was {before[:12]}): name a folder that has those, or choose another "
                "run.id"
            )


# Another seed is another order of rows and other samples: not the run of the log.
# Data set and model are compared by content, by the trainer; partitions by the broker.
# These, and the seed, the trainer would refuse too, but after other roles had begun.
FIXED = ("run.seed", "model.dtype", "prompts.group_size", "trainer.lora")


def changes(before: str, now: str) -> list[tuple[str, object, object]]:
    """Fields that differ, by dotted name, with the old and the new value.

    Args:
        before: configuration of the last claim, JSON.
        now: the resolved configuration, JSON.

    Raises:
        ConfigError: a field that may not change did.
    """
    found = differing(before, now)
    for name, was, is_ in found:
        if any(f"{name}.".startswith(f"{fixed}.") for fixed in FIXED):
            raise ConfigError(
                f"{name} is {is_}, but the run was started with {was}: "
                "restore it, or choose another run.id"
            )
    return found

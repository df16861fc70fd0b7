"""The only place that picks concrete parts: bus, engine, scorer, channel, server, verifier."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlstreams.streams.log import crash_points
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.run.place import RunPlace
from rlstreams.workers.bootstrap.gpus import placed, shifts_of
from rlstreams.workers.bootstrap.weights import (
    run_secret,
    weight_channel,
    weight_server,
    weight_store,
)
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.run import START, RunConfig
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.runtime import Pausable

if TYPE_CHECKING:
    from rlstreams.streams.broker.embedded import EmbeddedBroker
    from rlstreams.workers.compute.score import MeshScorer
    from rlstreams.workers.engines.base import Engine, Scorer
    from rlstreams.workers.logprob.scoring import Reference
    from rlstreams.workers.model.device import BinRunner

BROKER_BACK_S = 5.0  # a supervisor has begun to start a dead broker again by then


def bootstrap_of(config: RunConfig) -> str:
    """Address of the run's broker: as configured, or as the embedded one wrote it down.

    A broker that died and is being started again is waited for.

    Raises:
        ConfigError: no broker is named and none runs under the run's folder.
        DeadlineError: its start takes too long.
    """
    if config.broker.bootstrap:
        return config.broker.bootstrap
    broker = embedded_broker(config)
    state = broker.coming(BROKER_BACK_S)
    if state is None:
        raise ConfigError(
            f"broker.bootstrap is empty and no embedded broker runs in {broker.folder}; "
            f"start one: rlstreams broker start {shlex.quote(str(broker.folder))}"
        )
    return state.bootstrap


def topic_plan(config: RunConfig) -> TopicPlan:
    """Partitions and settings of the run's topics."""
    return TopicPlan(
        rollout_workers=config.rollout.workers,
        logprob_workers=config.logprob.workers,
        partitions_per_worker=config.broker.partitions_per_worker,
        headroom=config.broker.headroom,
        replication=config.broker.replication,
        payload_ms=round(3600_000 * config.broker.payload_retention_hours),
        payload_bytes=config.broker.payload_retention_bytes,
        fsync=config.broker.fsync,
    )


OUTAGE_S = 60.0  # longest wait of a worker for an unreachable broker


def open_bus(config: RunConfig, *, outage_s: float = OUTAGE_S) -> Bus:
    """The run's bus."""
    from rlstreams.streams.kafka.bus import KafkaBus

    return KafkaBus(
        bootstrap_of(config),
        config.run.id,
        options=client_options(config),
        commit_s=config.deadlines.commit_s,
        outage_s=outage_s,
    )


def await_broker(config: RunConfig, timeout_s: float) -> None:
    """Wait until the embedded broker answers, if the run has one: its supervisor may be starting it
    again. If it does not, its next client reports what is wrong."""
    from rlstreams.streams.broker.ports import answers

    until_s = time.monotonic() + timeout_s
    while not config.broker.bootstrap and time.monotonic() < until_s:
        state = embedded_broker(config).status()
        if state is not None and answers(state.port, state.host):
            return
        time.sleep(0.1)


def client_options(config: RunConfig) -> Mapping[str, str]:
    """`broker.options`, secrets resolved: for the roles' clients and for administration alike."""
    return place_of(config).client_options


def place_of(config: RunConfig) -> RunPlace:
    """Place of the run's log, for `open_run`."""
    broker = config.broker
    return RunPlace(
        run=config.run.id,
        folder=Path(config.folder),
        bootstrap=broker.bootstrap,
        options=broker.options,
        host=broker.host,
        port=broker.port,
        jars_dir=broker.jars_dir,
        heap_mb=broker.heap_mb,
        fsync=broker.fsync,
    )


def embedded_broker(config: RunConfig) -> EmbeddedBroker:
    """The broker under the run's folder; started or not."""
    return place_of(config).broker()


def arm_crash_point(text: str) -> None:
    """Make this process die where `text` says, or else where the environment does.

    Raises:
        ConfigError: no such point or action.
    """
    if text := text or os.environ.get(crash_points.VARIABLE, ""):
        crash_points.arm_from(text)


def make_role(context: Context) -> Pausable:
    """The role that `context` names, ready to run.

    Raises:
        ConfigError: a model, data set or verifier that cannot be used.
    """
    from rlstreams.workers.model.base import EngineError
    from rlstreams.workers.model.tokenizer import TokenizerError

    try:
        return MAKERS[context.role](context)
    except (EngineError, TokenizerError) as err:
        # Another start would find the same folder: no failure to be cured by a restart.
        raise ConfigError(f"model.path: {err}") from err


def _prompts(context: Context) -> Pausable:
    from rlstreams.workers.prompts.worker import PromptsWorker

    return PromptsWorker(context)


def _rollout(context: Context) -> Pausable:
    from rlstreams.workers.bootstrap.sampling import sampler_of
    from rlstreams.workers.rollout.verifiers import verifier_of
    from rlstreams.workers.rollout.worker import make_worker

    config, log, engine = context.config, context.log, _engine(context)
    if config.agent:
        from rlstreams.workers.bootstrap.sessions import make_agents_role

        return make_agents_role(context, engine, weight_channel(context), run_secret(context))
    note = lambda what: log.warning("user_code", what=what)  # noqa: E731
    sampler = sampler_of(config, engine, verifier_of(config, note), note)
    return make_worker(context, context.bus, engine, weight_channel(context), sampler)


def _server(context: Context) -> Pausable:
    from rlstreams.workers.bootstrap.model_server import make_server_role

    return make_server_role(context)


def _engine(context: Context) -> Engine:
    config = context.config
    if config.is_served:
        from rlstreams.workers.bootstrap.served import make_served_engine

        return make_served_engine(context)
    from rlstreams.workers.bootstrap.sampling import builtin_engine
    from rlstreams.workers.model.device import claim_device

    device = claim_device("rollout.device", config.rollout.device)
    return builtin_engine(config, device, captures_experts=config.rollout.capture_experts)


def _logprob(context: Context) -> Pausable:
    from rlstreams.workers.logprob.worker import make_worker

    if context.config.logprob.place != "separate":
        return _passing(context)
    from rlstreams.workers.model.base import CPU

    shifts, config = shifts_of(context), placed(context.config)
    scorer, reference = make_scorers(config, shifts.run if shifts else None)
    if config.logprob.device != CPU:
        reasons = {"rows_padded": scorer.why_padded, "layers_not_compiled": scorer.why_eager}
        if config.logprob.shared_prefixes and not scorer.why_padded:
            reasons["prefixes_not_shared"] = scorer.why_unshared
        log = context.log
        for what, why in reasons.items():
            if why:
                log.warning(what, why=why)
    return make_worker(context, context.bus, scorer, weight_channel(context), reference)


def _passing(context: Context) -> Pausable:
    """The log-prob role that scores no policy; under a reference, where the loss asks for it."""
    from rlstreams.workers.logprob.passing import PassingScorer
    from rlstreams.workers.logprob.worker import make_worker
    from rlstreams.workers.weights.file import FileWeightChannel

    config, reference = context.config, None
    if config.has_scorer:
        shifts = shifts_of(context)
        with _scorers(placed(config), shifts.run if shifts else None) as (_, reference):
            pass
    scorer = PassingScorer(model_folder(config.model.path))
    return make_worker(context, context.bus, scorer, FileWeightChannel(), reference)


def make_scorers(
    config: RunConfig, run: BinRunner | None = None
) -> tuple[MeshScorer, Reference | None]:
    """Scorers of the log-prob role: of policies, and of the reference where the loss asks for it,
    on the same ranks.

    Args:
        run: each forward; None: at once.

    Raises:
        ConfigError: the reference has another vocabulary.
        EngineError: the model cannot be loaded.
    """
    from rlstreams.workers.compute.score import scorer_of

    folder = model_folder(config.model.path)
    with _scorers(config, run) as (options, reference):
        scorer = scorer_of(folder, replay_routes=config.trainer.routing_replay, **options)
    return scorer, reference


def close_scorers(scorer: Scorer, reference: Reference | None) -> None:
    """End the ranks of scorers that were made here, if there are any."""
    for one in (scorer, reference and reference.scorer):
        if close := getattr(one, "close", None):
            close()


@contextlib.contextmanager
def _scorers(
    config: RunConfig, run: BinRunner | None
) -> Iterator[tuple[Mapping[str, Any], Reference | None]]:
    """Arguments of the scorers of the log-prob role, and the reference, which is made already;
    on an exception the ranks end.

    Raises:
        ConfigError, EngineError: as `make_scorers`.
    """
    from rlstreams.workers.compute.team import Team
    from rlstreams.workers.model.device import claim_devices

    section = placed(config).logprob
    device, gpus = claim_devices("logprob.device", section.device, section.ranks)
    folder = model_folder(config.model.path)
    options: dict[str, Any] = {
        "backend": section.backend,
        "layout": section.layout,
        "token_budget": section.token_budget,
        "shared_prefixes": section.shared_prefixes,
        "pull_deadline_s": config.weights.pull_deadline_s,
        "threads": config.model.threads,
        "device": device,
        "dtype": config.model.dtype,
        "run": run,
    }
    # First: it may be refused, and ranks would have been started for nothing.
    compared = _reference_folder(config, folder) if config.trainer.loss.why_compared else None
    with contextlib.ExitStack() as on_error:
        if section.ranks > 1:
            options["team"] = Team(gpus, host=config.weights.host, owner="scorer")
            on_error.callback(options["team"].close)
        yield options, _reference(config, compared, options) if compared else None
        on_error.pop_all()


def _reference_folder(config: RunConfig, model: Path) -> Path:
    """Folder of the reference: `trainer.loss.kl_coef` keeps the policy close to it, or it teaches.

    Raises:
        ConfigError, EngineError, TokenizerError: as `check_tokens`.
    """
    from rlstreams.workers.logprob.reference import check_tokens

    is_start = config.logprob.reference == START
    folder = model if is_start else model_folder(config.logprob.reference)
    check_tokens(config, folder, model)
    return folder


def _reference(config: RunConfig, folder: Path, options: Mapping[str, Any]) -> Reference:
    from rlstreams.workers.compute.score import scorer_of
    from rlstreams.workers.engines.folder_channel import FolderChannel
    from rlstreams.workers.logprob.scoring import Reference

    channel = FolderChannel(folder, config.model.dtype)
    scorer = scorer_of(folder, top_k=config.trainer.loss.distill_top_k, **options)
    pulled = scorer.pull(channel.published, channel)
    return Reference(
        scorer=scorer, policy_version=pulled.policy_version, weight_hash=pulled.weight_hash
    )


def _trainer(context: Context) -> Pausable:
    from rlstreams.workers.compute.hosts import REACH_S, hosts_of
    from rlstreams.workers.compute.team import team_of
    from rlstreams.workers.model.device import claim_devices
    from rlstreams.workers.trainer.training.training import Training
    from rlstreams.workers.trainer.worker import TrainerWorker

    config, section = context.config, context.config.trainer
    shifts = shifts_of(context)
    device, gpus = claim_devices("trainer.device", section.device, section.ranks_here)
    folder = model_folder(config.model.path)
    if hosts := hosts_of(config, device, folder):
        context.log.info("waits_for_hosts", addresses=hosts.addresses, at_most_s=REACH_S)
    team = team_of(gpus, host=config.weights.host, hosts=hosts)
    training = Training(
        folder,
        section,
        config.model.threads,
        device,
        config.model.dtype,
        team=team,
    )
    if shifts:
        training.learner.run = shifts.run
    return TrainerWorker(
        context, context.bus, training, weight_server(context), weight_store(context)
    )


MAKERS = {
    "prompts": _prompts,
    "rollout": _rollout,
    "server": _server,
    "logprob": _logprob,
    "trainer": _trainer,
}

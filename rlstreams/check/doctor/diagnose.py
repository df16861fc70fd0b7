"""All checks in order: `rlstreams doctor` lists them, `up` stops at the first failure.

The checks of data, of secrets and of a worker without `up` are here, the others beside.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing

import msgspec
import numpy as np

from rlstreams.check.doctor.check import EVERYTHING, Check, Host, Level, fail, ok, probed, warn
from rlstreams.check.doctor.devices import (
    Placement,
    free_mb,
    gpu_check,
    gpu_inventory,
    memory_checks,
    placements,
)
from rlstreams.check.doctor.engines import engine_checks, installed
from rlstreams.check.doctor.machine import compiler_cache, disk, files, machine, port, threads
from rlstreams.check.doctor.model import (
    ModelFolder,
    check_decoding,
    check_layouts,
    check_reference,
    check_routers,
    model_checks,
    read_model,
)
from rlstreams.check.doctor.own_code import own_code_check
from rlstreams.streams.addresses import is_loopback
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import BrokerError, ConfigError
from rlstreams.streams.log.secrets import resolve_secret
from rlstreams.streams.log.text import counted
from rlstreams.streams.log.topics import STEPS
from rlstreams.streams.views.feed import Feed, Views
from rlstreams.streams.views.learning import hindrance
from rlstreams.streams.views.workers import living, releases_line, throughput
from rlstreams.workers.bootstrap.parts import bootstrap_of, embedded_broker, place_of
from rlstreams.workers.config.across import judging, length_warning, loss_warnings, start_warning
from rlstreams.workers.config.checks import check_address
from rlstreams.workers.config.engine import VISIBLE
from rlstreams.workers.config.hub import found_folder
from rlstreams.workers.config.layers import leaves, references
from rlstreams.workers.config.reward import ENVIRONMENT
from rlstreams.workers.config.run import BUILTIN, START, RunConfig
from rlstreams.workers.dataset.open import first_rows, open_problems, prompt_encoder
from rlstreams.workers.loop.agreement import check_alone
from rlstreams.workers.prompts.issue import text_of
from rlstreams.workers.rollout.turns import make_environment
from rlstreams.workers.rollout.verifiers import make_verifier
from rlstreams.workers.sandbox.reward import AnswerToJudge, RewardError

REPEATED = 4  # rows of a prompt, on average: copies beyond chance
# Roles that resolve the secrets of a section; every role resolves those of other sections.
_READERS: Mapping[str, tuple[str, ...]] = {
    "data": ("prompts", "trainer"),
    "engine": ("server",),
    "environment": ("rollout",),
    "reward": ("rollout",),
    "weights": ("rollout", "logprob", "trainer"),
}


def secrets_check(config: RunConfig, host: Host) -> Check:
    """Check that each secret, named as `env:NAME` or `file:PATH`, is there on this host.

    Each secret is resolved, none is shown.
    """
    lacking, found = [], []
    for field, value in leaves(msgspec.to_builtins(config)):
        for name, text in references(field, value):
            if not host.has(*_READERS.get(name.partition(".")[0], (host.role,))):
                continue
            try:
                if resolve_secret(text, name) != text:
                    found.append(name)
            except ConfigError as err:
                lacking.append(str(err))
    if lacking:
        return fail("secrets", "; ".join(lacking), "set it here, as for the start of the role")
    return ok("secrets", f"there: {', '.join(found)}" if found else "none is referred to")


def weights_check(config: RunConfig, host: Host) -> Check:
    """Check the way of weight versions from the trainer to a role that `up` did not start.

    Raises ConfigError: as the role's start does: no common secret, or no address of the trainer's.
    """
    channel, address = config.weights.channel, config.weights.host
    check_alone(config)
    if channel == "file":
        text = f"files in {config.folder}, which the hosts of trainer, rollout and logprob must all"
        return ok("weights", f'{text} mount there; else set weights.channel = "gloo" or "nccl"')
    if channel == "store":
        found = f"read from {config.store_address}, which the hosts of all roles must reach"
        return ok("weights", found)
    if is_loopback(address):
        return warn(
            "weights", f"weights.host is {address}, which only the trainer's own host reaches",
            "with roles on other hosts name the trainer's private interface, as they know it",
        )  # fmt: skip
    if host.role == "trainer":
        check_address("weights.host", address)
    return ok("weights", f"pulled from {address}, at a port that the trainer announces")


def data_checks(
    config: RunConfig, model: ModelFolder, progress: Callable[[str], None]
) -> Iterator[Check]:
    """One check for each file that is named. A large file is indexed here, once for all starts.

    Raises ConfigError: names field, file and line, and what is wrong there.
    """
    problems = open_problems(config.data, prompt_encoder(config), model.longest, progress)
    yield ok("data.train", problems.summary[0])
    if (found := len(np.unique(problems.train.prompts()))) * REPEATED <= len(problems.train):
        yield warn(
            "data.train",
            f"{len(problems.train):,} rows to train on have {found:,} different prompts: held-out "
            "rows gain less by them",
            "add rows, or remove copies",
        )
    for line in problems.summary[1:]:
        yield ok("data.held_out", line)
    if problems.held_out is None:
        yield ok("data.held_out", "not named: no evaluation")


def verifier_check(config: RunConfig, *, has_data: bool = True) -> Check:
    """Load the verifier and let it judge one row's own answer; an environment is only loaded.

    Args:
        has_data: False: on a host that need not have the data, so the verifier is only loaded too.

    Raises:
        ConfigError: it cannot be loaded, raises, hangs, or returns no number.
    """
    name, environment = config.reward.verifier, config.environment.name
    if environment:
        make_environment(config).close()
    if name == ENVIRONMENT and has_data:
        return ok("verifier", f"the environment {environment}, which can be loaded")
    if not has_data or config.judge.model:
        if name != ENVIRONMENT:
            make_verifier(judging(config)).close()
        names = f"{name} and {environment}" if environment else name
        when = "while the server of [judge] is up" if has_data else "where the data is"
        return ok("verifier", f"{names} can be loaded; tried {when}, not here")
    row = first_rows(config.data, 1)[0]
    with make_verifier(config.reward) as verifier:
        try:
            judged = verifier.judge(
                AnswerToJudge(text_of(row.prompt), row.answer, row.answer, json.loads(row.metadata))
            )
        except RewardError as err:
            raise ConfigError(
                f"reward.verifier: tried on {row.place}, with the row's `answer` as completion: "
                f"{err}"
            ) from err
    # Not wrong by itself: a verifier may want more than the bare answer.
    return ok("verifier", f"{name} gives {judged.reward:g} to the answer of {row.place}")


def diagnose(config: RunConfig, host: Host = EVERYTHING) -> list[Check]:
    """Make all checks of a run that need nothing to be started.

    Args:
        host: the workers of this host; checks that only other hosts need are left out.
    """
    bootstrap, (gpus, problem) = _embedded(config), gpu_inventory()
    model, of_folder = _model(config, host)
    weights_mb = 0.0 if model is None else model.mb_in("float32")
    places = list(placements(config, gpus, host, os.environ.get(VISIBLE)))
    checks = [
        *machine(config, host, is_broker_up=bootstrap is not None, weights_mb=weights_mb),
        gpu_check(gpus, problem, places),
        *probed("run.dir", lambda: _folder(config, host)),
        *probed("secrets", lambda: secrets_check(config, host)),
    ]
    if host.is_alone and host.role != "prompts":
        checks += probed("weights", lambda: weights_check(config, host))
    checks += of_folder
    if model is not None:
        is_up = bool(bootstrap or config.broker.bootstrap)
        checks += memory_checks(config, model, places, free_mb(), is_up=is_up)
        checks += _of_model(config, model, host)
    if host.has("rollout", "server"):
        is_here = model is not None
        checks += probed("engine", lambda: engine_checks(config, host, has_model=is_here))
    if host.has("rollout"):
        checks += probed("verifier", lambda: verifier_check(config, has_data=not host.is_alone))
    of_broker = _broker(config, host, bootstrap)
    is_up = bool(bootstrap or config.broker.bootstrap)
    if is_up and not host.is_alone and all(c.level is not Level.FAIL for c in of_broker):
        of_broker += probed("learning", lambda: _of_run(config, learning_check))
        of_broker += probed("releases", lambda: _of_run(config, releases_check))
    return [*checks, *of_broker]


def _of_run(config: RunConfig, check: Callable[[Bus], Check | None]) -> Check | None:
    from rlstreams.streams.run.open_run import NoRunError, open_run

    try:
        with open_run(place_of(config)) as log:
            return check(log.bus)
    except NoRunError:
        return None


def learning_check(bus: Bus) -> Check | None:
    """The cause that keeps a run from learning, by its steps alone; None: it made no step."""
    views = Views()
    with closing(Feed(bus, views, (STEPS,))) as feed:
        feed.catch_up()
    state = views.state
    if found := hindrance(state):
        return warn("learning", f"{found.cause}: {found.evidence}", found.cure)
    num = len(state.run.steps)
    told = f"{counted(num, 'step shows', 'steps show')} nothing that keeps the run from learning"
    return ok("learning", told) if num else None


def releases_check(bus: Bus) -> Check | None:
    """Releases of the workers that live; None: no worker lives, or none reports its release."""
    from rlstreams.workers.bootstrap.seats import WorkersThere

    with closing(WorkersThere(bus)) as there:
        there.catch_up()
        alive = living(throughput(there.workers).workers)
    if several := releases_line(alive):
        advice = "events of all are readable; start the older ones again with the newest release"
        return warn("releases", several, advice)
    release = alive[0].release if alive else ""  # of an older release than reports have it: ""
    return ok("releases", f"all workers have {release}") if release else None


def _folder(config: RunConfig, host: Host) -> None:
    """Raise ConfigError if `up` would refuse the run's folder."""
    from rlstreams.workers.bootstrap.config_file import refuse_other_run, refuse_place

    if not host.is_alone:
        refuse_place(config)
        refuse_other_run(config)


def _of_model(
    config: RunConfig,
    model: ModelFolder,
    host: Host = EVERYTHING,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Check]:
    """Checks that need the model's folder.

    Args:
        progress: of a start, which fetches what is not on this machine; None: of no start.
    """
    if host.has("prompts"):
        report = progress or (lambda _: None)
        yield from probed("data", lambda: data_checks(config, model, report))
    if host.has("logprob"):
        is_start = progress is not None
        yield from probed("reference", lambda: _reference(config, model, is_start=is_start))
    if host.has("trainer") and (warning := length_warning(config, model.longest)):
        yield warn("turns", warning, "")
    if host.has("trainer"):
        yield from probed("loss", lambda: own_code_check(config))
        yield from (warn("loss", warning, "") for warning in loss_warnings(config))
    if host.has("logprob", "trainer"):
        yield from probed("routing", lambda: _routing(config, model))
        yield from probed("layout", lambda: _layouts(config, model, host))
    if host.has("rollout") and not config.is_served:
        sampled_by = f"rollout.engine is {BUILTIN!r}"
        yield from probed("decoding", lambda: check_decoding(model, sampled_by))
    if host.has("rollout") and (warning := start_warning(config)):
        yield warn("sampling", warning, "")


def _broker(config: RunConfig, host: Host, embedded: str | None) -> list[Check]:
    from rlstreams.check.doctor.broker import broker_checks

    where = config.broker.bootstrap or embedded
    if not where and not host.is_alone:
        return [ok("broker", "none is named: `up` starts the embedded one")]
    return probed("broker", lambda: broker_checks(where or bootstrap_of(config), config))


def preflight(config: RunConfig, progress: Callable[[str], None] = lambda _: None) -> None:
    """Make the cheap checks before anything is started, and the index of a large data set.

    Args:
        progress: called with warnings, and now and then with the state of a first pass over the
        data.

    Raises:
        ConfigError: data, model, verifier or engine cannot be used; names field and value.
        BrokerError: the broker that is named does not answer, or the port of ours is in use.
    """
    for check in (files(config), *threads(), *compiler_cache()):
        problem = f"{check.found}; {check.advice}"
        if check.level is Level.FAIL:
            raise ConfigError(problem)
        if check.level is Level.WARN:
            progress(f"warning: {problem}")
    places = _say_gpus(config, progress)
    model = read_model(config.model.path)
    for memory in memory_checks(config, model, places, free_mb(), is_up=False):
        if memory.level is not Level.OK:  # an estimate as well
            progress(f"warning: {memory.name}: {memory.found}; {memory.advice}")
    room = disk(config, model.mb_in("float32"))
    if room.level is not Level.OK:  # an estimate: the run ends by itself if the disk is full
        progress(f"warning: {room.found}; {room.advice}")
    checks = list(_of_model(config, model, progress=progress))
    if config.is_served and not config.engine.urls:
        checks.append(installed(config, has_model=True))
    for check in checks:
        if check.level is Level.FAIL:
            raise ConfigError(check.found)
        if check.level is Level.WARN:
            progress(f"warning: {check.found}")
    verifier_check(config)
    if config.broker.bootstrap:
        from rlstreams.streams.kafka.reachable import refuse_silence

        refuse_silence(config.broker.bootstrap)
        return
    checked = port(config.broker.port, is_broker_up=_embedded(config) is not None)
    if checked.level is Level.FAIL:
        raise BrokerError(f"{checked.found}; {checked.advice}")


def _say_gpus(config: RunConfig, progress: Callable[[str], None]) -> Sequence[Placement]:
    """Report advice on GPUs that are not used, or not seen; return the devices of all roles.

    Raises ConfigError: a role asks for a GPU that is not there.
    """
    gpus, problem = gpu_inventory()
    places = list(placements(config, gpus, named=os.environ.get(VISIBLE)))
    check = gpu_check(gpus, problem, places)
    finding = f"GPUs: {check.found}; {check.advice}"
    if check.level is Level.FAIL:
        raise ConfigError(finding)
    if check.advice:
        progress(finding)
    return places


def _model(config: RunConfig, host: Host) -> tuple[ModelFolder | None, list[Check]]:
    try:
        if found_folder(config.model.path) is None:
            found = f"{config.model.path} is not on this machine"
            return None, [warn("model", found, "the start fetches it; then ask again")]
        model = read_model(config.model.path)
    except ConfigError as err:
        return None, [fail("model", str(err), "data and memory are checked once it loads")]
    if host.role == "prompts":  # it has no use for the rest
        return model, [next(model_checks(model, config.model.dtype))]
    return model, list(model_checks(model, config.model.dtype))


def _reference(config: RunConfig, model: ModelFolder, *, is_start: bool) -> Iterator[Check]:
    path, is_wanted = config.logprob.reference, bool(config.trainer.loss.why_compared)
    if is_wanted and not is_start and path != START and found_folder(path) is None:
        yield warn("reference", f"{path} is not on this machine", "`up` fetches it; then ask again")
    elif found := check_reference(config, model):
        yield ok("reference", found)


def _routing(config: RunConfig, model: ModelFolder) -> Check | None:
    check_routers(config, model)
    found = "recorded routes are replayed by scorer and trainer"
    return ok("routing", found) if config.trainer.routing_replay else None


def _layouts(config: RunConfig, model: ModelFolder, host: Host) -> Check | None:
    found = check_layouts(config, model, host)
    return ok("layout", found) if found else None


def _embedded(config: RunConfig) -> str | None:
    """Address of the run's own broker; None: it does not run."""
    state = embedded_broker(config).status()
    return state.bootstrap if state else None

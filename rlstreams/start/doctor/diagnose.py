"""All checks in order: `rlstreams doctor` lists them, `up` stops at the first failure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from rlstreams.start.doctor.alone import alone_checks, broker_of, secrets_check
from rlstreams.start.doctor.check import EVERYTHING, Check, Host, Level, fail, ok, probed, warn
from rlstreams.start.doctor.data import data_checks, hash_check, verifier_check
from rlstreams.start.doctor.devices import (
    VISIBLE,
    free_mb,
    gpu_checks,
    gpu_inventory,
    gpu_memory_checks,
    memory_check,
    needs,
    placements,
)
from rlstreams.start.doctor.engines import engine_checks, refuse_engine
from rlstreams.start.doctor.machine import machine, port
from rlstreams.start.doctor.model import (
    ModelFolder,
    check_layouts,
    check_reference,
    check_routers,
    model_checks,
    read_model,
)
from rlstreams.streams.log.errors import BrokerError, ConfigError, StreamsError
from rlstreams.workers.bootstrap.parts import embedded_broker
from rlstreams.workers.config.across import length_warning, start_warning
from rlstreams.workers.config.hub import found_folder
from rlstreams.workers.config.run import START, RunConfig


def diagnose(config: RunConfig, host: Host = EVERYTHING) -> list[Check]:
    """Everything about a run that can be looked at without starting anything.

    Args:
        host: what is to run here; checks that only other hosts need are left out.
    """
    bootstrap, inventory = _embedded(config), gpu_inventory()
    model, checks = _model(config, host)
    weights_mb = 0.0 if model is None else model.mb_in("float32")
    places = list(placements(config, inventory.gpus, host, os.environ.get(VISIBLE)))
    checks = [
        *machine(config, host, is_broker_up=bootstrap is not None, weights_mb=weights_mb),
        *gpu_checks(inventory, places),
        *_all("run.dir", lambda: _folder(config, host)),
        probed("secrets", lambda: secrets_check(config, host)),
        *_all("role", lambda: alone_checks(config, host)),
        *checks,
    ]
    if model is not None:
        found, is_up = needs(model, config, host), bool(bootstrap or config.broker.bootstrap)
        checks.append(memory_check(found, free_mb()))
        checks += gpu_memory_checks(config, found, places, is_up=is_up)
        checks += _of_model(config, model, host)
    if host.has("rollout"):
        is_here = model is not None
        checks += _all("engine", lambda: engine_checks(config, host, has_model=is_here))
        checks.append(
            probed("verifier", lambda: verifier_check(config, has_data=not host.is_alone))
        )
    return [*checks, *_broker(config, host, bootstrap)]


def _folder(config: RunConfig, host: Host) -> Iterator[Check]:
    """Nothing, unless `up` would refuse the run's folder."""
    from rlstreams.workers.bootstrap.config_file import refuse_other_run, refuse_place

    if not host.is_alone:
        refuse_place(config)
        refuse_other_run(config)
    yield from ()


def _of_model(config: RunConfig, model: ModelFolder, host: Host) -> Iterator[Check]:
    """What takes the model's folder to know."""
    if host.has("prompts"):
        yield from _all("data", lambda: data_checks(config, model))
    elif host.role == "trainer":
        yield probed("data", lambda: hash_check(config))
    if host.has("logprob"):
        yield from _all("reference", lambda: _reference(config, model))
    if host.has("trainer") and (warning := length_warning(config, model.longest)):
        yield warn("turns", warning, "")
    if host.has("logprob", "trainer"):
        yield from _all("routing", lambda: _routing(config, model))
        yield from _all("layout", lambda: _layouts(config, model, host))
    if host.has("rollout") and (warning := start_warning(config)):
        yield warn("sampling", warning, "")


def _broker(config: RunConfig, host: Host, embedded: str | None) -> list[Check]:
    from rlstreams.start.doctor.broker import broker_checks

    where = config.broker.bootstrap or embedded
    if not where and not host.is_alone:
        return [ok("broker", "none is named: `up` starts the embedded one")]
    return _all("broker", lambda: broker_checks(where or broker_of(config), config))


def preflight(config: RunConfig, progress: Callable[[str], None] = lambda _: None) -> None:
    """What is cheap to know before anything is started; and the index of a large data set.

    Args:
        progress: told now and then how far a first pass over the data is; and a warning.

    Raises:
        ConfigError: data, model, verifier or engine cannot be used; names field and value.
        BrokerError: the broker that is named does not answer, or the port of ours is in use.
    """
    model = read_model(config.model.path)
    for warning in (start_warning(config), length_warning(config, model.longest)):
        if warning:
            progress(f"warning: {warning}")
    for _ in data_checks(config, model, progress):
        pass
    verifier_check(config)
    check_reference(config, model)
    check_routers(config, model)
    check_layouts(config, model)
    refuse_engine(config)
    if config.broker.bootstrap:
        from rlstreams.streams.kafka.admin_ask import refuse_silence

        refuse_silence(config.broker.bootstrap)
        return
    checked = port(config.broker.port, is_broker_up=_embedded(config) is not None)
    if checked.level is Level.FAIL:
        raise BrokerError(f"{checked.found}; {checked.advice}")


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


def _reference(config: RunConfig, model: ModelFolder) -> Iterator[Check]:
    path = config.logprob.reference
    if config.trainer.loss.why_compared and path != START and found_folder(path) is None:
        yield warn("reference", f"{path} is not on this machine", "`up` fetches it; then ask again")
    elif found := check_reference(config, model):
        yield ok("reference", found)


def _routing(config: RunConfig, model: ModelFolder) -> Iterator[Check]:
    check_routers(config, model)
    if config.trainer.routing_replay:
        yield ok("routing", "recorded routes are replayed by scorer and trainer")


def _layouts(config: RunConfig, model: ModelFolder, host: Host) -> Iterator[Check]:
    if found := check_layouts(config, model, host):
        yield ok("layout", found)


def _embedded(config: RunConfig) -> str | None:
    """Where the run's own broker serves; None: it does not run."""
    state = embedded_broker(config).status()
    return state.bootstrap if state else None


def _all(name: str, found: Callable[[], Iterator[Check]]) -> list[Check]:
    """The checks up to the first error, and that as a failed one."""
    checks: list[Check] = []
    try:
        for check in found():
            checks.append(check)  # not `extend`: those before an error count
    except BrokerError as err:
        checks.append(fail(name, str(err), "start the broker, or correct broker.bootstrap"))
    except StreamsError as err:
        checks.append(fail(name, str(err), ""))
    return checks

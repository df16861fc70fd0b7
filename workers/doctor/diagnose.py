"""All checks in order: `rlstreams doctor` lists them, `up` stops at the first failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from streams.errors import BrokerError, ConfigError, StreamsError
from workers.config.across import length_warning, start_warning
from workers.config.run import START, RunConfig
from workers.doctor.check import Check, Level, fail, ok, warn
from workers.doctor.data import data_checks, verifier_check
from workers.doctor.machine import machine, port
from workers.doctor.memory import estimate, free_mb, memory_check
from workers.doctor.model import (
    ModelFolder,
    check_reference,
    check_routers,
    model_checks,
    read_model,
)
from workers.hub import found_folder


def diagnose(config: RunConfig) -> list[Check]:
    """Everything about a run that can be looked at without starting anything."""
    bootstrap = _embedded(config)
    model, checks = _model(config)
    weights_mb = 0.0 if model is None else model.weights_mb
    checks = [
        *machine(config, is_broker_up=bootstrap is not None, weights_mb=weights_mb),
        *checks,
    ]
    if model is not None:
        checks.append(memory_check(estimate(model, config), free_mb()))
        checks += _all("data", lambda: data_checks(config, model))
        checks += _all("reference", lambda: _reference(config, model))
        if warning := length_warning(config, model.longest):
            checks.append(warn("turns", warning, ""))
        checks += _all("routing", lambda: _routing(config, model))
    if warning := start_warning(config):
        checks.append(warn("sampling", warning, ""))
    checks += _all("verifier", lambda: iter([verifier_check(config)]))
    if where := config.broker.bootstrap or bootstrap:
        from workers.doctor.broker import broker_checks

        checks += _all("broker", lambda: broker_checks(where, config))
    else:
        checks.append(ok("broker", "none is named: `up` starts the embedded one"))
    return checks


def preflight(config: RunConfig, progress: Callable[[str], None] = lambda _: None) -> None:
    """What is cheap to know before anything is started; and the index of a large data set.

    Args:
        progress: told now and then how far a first pass over the data is; and a warning.

    Raises:
        ConfigError: data, model, verifier or port cannot be used; names field, file and value.
        BrokerError: the broker that is named does not answer.
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
    if config.broker.bootstrap:
        from streams.kafka.admin_ask import refuse_silence

        refuse_silence(config.broker.bootstrap)
        return
    checked = port(config.broker.port, is_broker_up=_embedded(config) is not None)
    if checked.level is Level.FAIL:
        raise ConfigError(f"{checked.found}; {checked.advice}")


def _model(config: RunConfig) -> tuple[ModelFolder | None, list[Check]]:
    try:
        if found_folder(config.model.path) is None:
            found = f"{config.model.path} is not on this machine"
            return None, [warn("model", found, "`up` and `try` fetch it; then ask again")]
        model = read_model(config.model.path)
    except ConfigError as err:
        return None, [fail("model", str(err), "data and memory are checked once it loads")]
    return model, list(model_checks(model, config.model.dtype))


def _reference(config: RunConfig, model: ModelFolder) -> Iterator[Check]:
    path = config.logprob.reference
    if config.trainer.loss.kl_coef and path != START and found_folder(path) is None:
        yield warn("reference", f"{path} is not on this machine", "`up` fetches it; then ask again")
    elif found := check_reference(config, model):
        yield ok("reference", found)


def _routing(config: RunConfig, model: ModelFolder) -> Iterator[Check]:
    check_routers(config, model)
    if config.trainer.routing_replay:
        yield ok("routing", "recorded routes are replayed by scorer and trainer")


def _embedded(config: RunConfig) -> str | None:
    """Where the run's own broker serves; None: it does not run."""
    from streams.broker.embedded import EmbeddedBroker
    from streams.run_folder import BROKER_FOLDER

    state = EmbeddedBroker(Path(config.folder) / BROKER_FOLDER).status()
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

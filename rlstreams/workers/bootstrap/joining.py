"""Joins a worker to a run of which it has no files: its configuration is that of the claim.

The trainer's claim has the resolved configuration and the hashes of what it names (decision 0046),
so the log is all that a host has to reach. Overrides set a host's own values over it, as the
model's folder; a file that is not in the log is named with its path and its hash in the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlstreams.schemas.events import PolicyPublished, TrainerStarted
from rlstreams.streams.broker.password import login
from rlstreams.streams.kafka.reachable import NobodyThereError
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import BrokerError, ConfigError, DeadlineError
from rlstreams.streams.log.secrets import resolve_secret
from rlstreams.streams.log.topics import POLICY_VERSIONS
from rlstreams.streams.run.open_run import NoRunError, open_run
from rlstreams.streams.run.place import RunPlace
from rlstreams.streams.run.run_log import RunLog
from rlstreams.workers.bootstrap.parts import place_of
from rlstreams.workers.config.engine import VISIBLE, EngineSection
from rlstreams.workers.config.hub import is_hub_name
from rlstreams.workers.config.load import over
from rlstreams.workers.config.run import BUILTIN, RunConfig
from rlstreams.workers.loop.agreement import is_user_code, user_code_hashes
from rlstreams.workers.loop.claims import config_by, newest_claim
from rlstreams.workers.loop.foreign import events_now, near_end
from rlstreams.workers.loop.host import host_name
from rlstreams.workers.weights import file

BEGIN_S = 20.0  # for a run that begins to make its topics; a wrong name is told after it
CLAIM_S = 60.0  # for the trainer to claim a run that begins
_LOOK_S = 0.5
_TAIL = 8  # offsets of `policy-versions`: the last of them may be markers
_DIGITS = 12
_LOGIN = (
    "it may want a password, and none was given: --password-file FILE, of an embedded broker "
    "broker/password in the run's folder; or --broker.options.NAME VALUE"
)
_COPY = (
    "--password-file {}: is it a copy of broker/password in the run's folder, as it is on the "
    "broker's host now?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A run that a joiner found in the log."""

    config: RunConfig  # the claim's, with what was set for this host
    claim: TrainerStarted


def join(
    role: str,
    bootstrap: str,
    run: str,
    overrides: Sequence[str] = (),
    *,
    password_file: str = "",
) -> Joined:
    """The configuration of a run, by its broker's address and its name.

    Args:
        overrides: values of this host, `broker.options` included.
        password_file: of an embedded broker, as it lies in its folder.

    Raises:
        ConfigError: no such run, or what this role needs is not on this host; names it.
        DeadlineError: no claim; the worker's keeper tries again.
        BrokerError: the broker cannot be reached, or refuses the password.
    """
    own = [*_reached(bootstrap, password_file), *overrides]
    try:
        place = place_of(over(RunConfig(), [f"run.id={run}", *own], "no configuration"))
    except ConfigError as err:
        raise ConfigError(f"--join {bootstrap} --run {run}: {err}") from err
    try:
        log = _opened(place, BEGIN_S)
    except NoRunError as err:
        if run in err.runs:
            raise
        there = ", ".join(err.runs) or "no run"
        raise ConfigError(
            f"--run {run}: {bootstrap} has {there}; a run is there once its trainer or `up` began"
        ) from err
    except NobodyThereError as err:
        raise BrokerError(
            f"--join: no broker answers at {err.problems}; give the address that the run's other "
            "hosts use. An embedded broker lives as long as its `up`, and is reached from other "
            "hosts where its broker.host is an address of its host"
        ) from err
    except BrokerError as err:
        if password_file:
            raise BrokerError(f"{err}; {_COPY.format(password_file)}") from err
        if not any(name.startswith("sasl.") for name in place.options):
            raise BrokerError(f"{err}; {_LOGIN}") from err
        raise
    with log:
        claim = _claim(log.bus, run, bootstrap, CLAIM_S)
        config = configured(claim, own)
        _refuse_weights_out_of_reach(config, claim, log.bus)
    refuse_missing(config, role, claim)
    return Joined(config=config, claim=claim)


def _opened(place: RunPlace, limit_s: float) -> RunLog:
    """The run's log, as soon as its topics are there; raises NoRunError after the limit."""
    until_s = time.monotonic() + limit_s
    while True:
        try:
            return open_run(place)
        except NoRunError:
            if time.monotonic() >= until_s:
                raise
        time.sleep(_LOOK_S)


def configured(claim: TrainerStarted, own: Sequence[str]) -> RunConfig:
    """The claim's configuration with this host's values over it, without the trainer's way to the
    broker, and without the servers and GPUs of its hosts.

    Raises:
        ConfigError: an unknown field, of a newer release than ours for instance.
    """
    origin = f"the claim of epoch {claim.epoch}"
    theirs = config_by(claim.config, claim.versions, origin)
    theirs = replace(theirs, broker=replace(theirs.broker, options={}))
    if not theirs.is_served:
        return over(theirs, own, origin)
    alone = replace(theirs.rollout, workers=1)  # it shares its servers with nobody
    here = over(replace(theirs, rollout=alone, engine=_of_this_host(theirs.engine)), own, origin)
    return replace(here, rollout=replace(here.rollout, workers=theirs.rollout.workers))


def _of_this_host(engine: EngineSection) -> EngineSection:
    usual = EngineSection()
    env = {name: value for name, value in engine.env.items() if name != VISIBLE}
    return replace(
        engine, env=env, urls=usual.urls, servers=usual.servers, host=usual.host,
        report_host=usual.report_host,
    )  # fmt: skip


def refuse_missing(config: RunConfig, role: str, claim: TrainerStarted) -> None:
    """Refuse to join if this host lacks what the role reads.

    Raises:
        ConfigError: names each, with the path and the SHA-256 that the run has.
    """
    found = [*_missing_model(config, claim)]
    if role != "server":  # its weights and its users come to it
        found += _missing_secret(config, claim)
    if role == "rollout":
        found += [*_missing_code(config, claim), *_missing_servers(config)]
    elif role == "server" and not config.is_served:
        found = [f"rollout.engine is {BUILTIN!r}, which samples in its workers"]
    if found:
        host = f"host {host_name()} cannot join run {config.run.id!r} as {role}: "
        raise ConfigError(host + "; ".join(found))


def _reached(bootstrap: str, password_file: str) -> Iterator[str]:
    yield f"broker.bootstrap={bootstrap}"
    if password_file:
        reference = f"file:{password_file}"
        resolve_secret(reference, "--password-file")
        for name, value in login(reference).items():
            yield f"broker.options.{name}={value}"


def _claim(bus: Bus, run: str, bootstrap: str, limit_s: float) -> TrainerStarted:
    until_s = time.monotonic() + limit_s
    while (claim := newest_claim(bus, "join")) is None:
        if time.monotonic() >= until_s:
            raise DeadlineError(
                f"run {run!r} at {bootstrap} has had no claim for {limit_s:g} s, so nobody knows "
                "its configuration: start its trainer, or `rlstreams up`, then join again"
            )
        time.sleep(_LOOK_S)
    return claim


def _missing_model(config: RunConfig, claim: TrainerStarted) -> Iterator[str]:
    path = config.model.path
    if is_hub_name(path) or (path and Path(path).is_dir()):
        return
    hashes = {"weights": "model", "tokenizer.json": "tokenizer"}
    listed = [f"{n} {claim.hashes[k][:_DIGITS]}" for n, k in hashes.items() if k in claim.hashes]
    yield (
        f"model.path: there is no folder {path} (SHA-256 in the run: {', '.join(listed)}): copy it "
        "to this host, and name it with --model.path=DIR"
    )


def _missing_code(config: RunConfig, claim: TrainerStarted) -> Iterator[str]:
    """Fields of user code of which the run has files and this host has none."""
    here = {name.partition(": ")[0] for name in user_code_hashes(config)}
    there: dict[str, dict[str, str]] = {}
    for name, digest in claim.hashes.items():
        field, _, path = name.partition(": ")
        if path and is_user_code(name):
            there.setdefault(field, {})[path] = digest[:_DIGITS]
    for field, files in there.items():
        if field not in here:
            listed = ", ".join(f"{path} {digest}" for path, digest in files.items())
            yield (
                f"{field}: its files are not here (SHA-256 in the run: {listed}; there it is "
                f"{_value(config, field)}): copy them to this host, and name it with "
                f"--{field}=VALUE"
            )


def _value(config: RunConfig, field: str) -> object:
    value: object = config
    for name in field.split("."):
        found = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if found is None:
            return "in a table"
        value = found
    return value


def _missing_secret(config: RunConfig, claim: TrainerStarted) -> Iterator[str]:
    weights = config.weights
    uses = f"weights come by {weights.channel}" if weights.channel != file.CHANNEL else ""
    if any(agent.remote for agent in config.agent):
        uses = uses or "it seals the keys of remote agents"
    if not uses:
        return
    cure = (
        "give this host the run's secret with --weights.secret=file:PATH (without a configured one "
        f"it is the file weights.secret in the run's folder on {claim.host or 'its host'})"
    )
    try:
        secret = resolve_secret(weights.secret, "weights.secret")
    except ConfigError as err:
        yield f"{err}: {cure}"
    else:
        if not secret:
            yield f"weights.secret is empty, and {uses}: {cure}"


def _missing_servers(config: RunConfig) -> Iterator[str]:
    if config.is_served and not config.engine.urls:
        yield (
            f"rollout.engine is {config.rollout.engine!r}, and a worker that joins brings servers "
            """of its own: name them with --engine.urls='["http://127.0.0.1:8000"]'; one is """
            "started by `rlstreams worker server --join` and --engine.port=8000"
        )


def _refuse_weights_out_of_reach(config: RunConfig, claim: TrainerStarted, bus: Bus) -> None:
    """Refuse weights that lie in a folder which this host does not see.

    Raises:
        ConfigError: names the folder.
    """
    if config.weights.channel != file.CHANNEL or not (folders := _folders(bus)):
        return
    if not any(Path(folder).is_dir() for folder in folders):
        raise ConfigError(
            f"host {host_name()} cannot join run {config.run.id!r}: weights.channel is 'file', and "
            f"there is no folder {', '.join(folders)} here, in which the trainer on host "
            f"{claim.host or '?'} leaves versions: mount it at this path, or run with "
            "weights.channel = 'gloo' or 'nccl'"
        )


def _folders(bus: Bus) -> Sequence[str]:
    """Folders of the newest version, as the trainer published it; none: nothing was published."""
    start = near_end(bus, POLICY_VERSIONS.name, _TAIL)
    found: Sequence[str] = ()
    for event in events_now(bus, start, PolicyPublished, "join", CLAIM_S):
        found = [one.address for one in event.endpoints if one.channel == file.CHANNEL]
    return found

"""Checks of a worker without `up`: a broker, a trainer in reach, secrets."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

import msgspec

from rlstreams.start.doctor.check import Check, Host, fail, ok, probed, warn
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.secrets import resolve_secret
from rlstreams.workers.bootstrap.parts import bootstrap_of
from rlstreams.workers.config.checks import check_address
from rlstreams.workers.config.layers import leaves, references
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.agreement import check_alone, is_loopback

# Which roles resolve the secrets of a section; of other sections every role does.
_READERS: Mapping[str, tuple[str, ...]] = {
    "data": ("prompts", "trainer"),
    "engine": ("rollout",),
    "environment": ("rollout",),
    "reward": ("rollout",),
    "weights": ("rollout", "logprob", "trainer"),
}


def alone_checks(config: RunConfig, host: Host) -> Iterator[Check]:
    """Nothing where `up` starts the roles."""
    if host.is_alone and host.role != "prompts":
        yield probed("weights", lambda: _weights(config, host))


def broker_of(config: RunConfig) -> str:
    """Where the broker is that a worker by itself uses.

    Raises:
        ConfigError: none is named, and none runs under the run's folder on this host.
    """
    try:
        return bootstrap_of(config)
    except ConfigError as err:
        raise ConfigError(f"{err}; or set broker.bootstrap to one that all hosts reach") from err


def secrets_check(config: RunConfig, host: Host) -> Check:
    """Whether what the configuration refers to as `env:NAME` or `file:PATH` is there on this host.

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


def _weights(config: RunConfig, host: Host) -> Check:
    """How versions get from the trainer to other hosts."""
    weights = config.weights
    if weights.channel == "file":
        return ok(
            "weights",
            f"files in {config.folder}, which the hosts of trainer, rollout and logprob must all "
            'mount there; else set weights.channel = "gloo" or "nccl"',
        )
    check_alone(config)
    if is_loopback(weights.host):
        return warn(
            "weights", f"weights.host is {weights.host}, which only the trainer's own host reaches",
            "with roles on other hosts name the trainer's private interface, as they know it",
        )  # fmt: skip
    if host.role == "trainer":
        check_address("weights.host", weights.host)
        return ok("weights", f"served on {weights.host}, an address of this host")
    try:
        socket.getaddrinfo(weights.host, None)
    except OSError as err:
        return fail(
            "weights", f"weights.host is {weights.host!r}, which this host cannot resolve: {err}",
            "name the trainer's interface by an address, or make the name known here",
        )  # fmt: skip
    return ok("weights", f"pulled from {weights.host}, at a port that the trainer announces")

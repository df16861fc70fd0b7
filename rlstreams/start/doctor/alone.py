"""What a worker needs that `up` did not start: a broker, a trainer in reach, secrets, a number."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from rlstreams.start.doctor.check import Check, fail, ok, probed, warn
from rlstreams.start.doctor.host import Host
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.bootstrap.parts import bootstrap_of
from rlstreams.workers.config.addresses import check_address
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.agreement import check_alone, check_ordinal, is_loopback


def alone_checks(config: RunConfig, host: Host) -> Iterator[Check]:
    """Nothing where `up` starts the roles."""
    if not host.is_alone:
        return
    yield probed("ordinal", lambda: _number(config, host))
    if host.role != "prompts":
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


def _number(config: RunConfig, host: Host) -> Check:
    if host.ordinal is None:
        return ok("ordinal", f"any {host.role}; an ordinal is for one process at a time")
    check_ordinal(config, host.role, host.ordinal)
    return ok("ordinal", f"{host.role}-{host.ordinal}; an ordinal is for one process at a time")


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

"""Addresses of the model servers that a run starts. `up` asks for them, and needs no web client."""

from __future__ import annotations

from collections.abc import Sequence

from rlstreams.streams.broker.ports import free_ports
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.checks import check_address
from rlstreams.workers.config.run import RunConfig


def own_urls(config: RunConfig) -> Sequence[str]:
    """Addresses of the servers that a run starts: chosen now, where no port is named.

    Raises:
        ConfigError: no such address here, or a port above 65535.
    """
    engine, number = config.engine, config.num_started
    if number:
        check_address("engine.host", engine.host)
    ports = [port_of(config, n) for n in range(number)]
    if not engine.port:
        ports = free_ports(number, engine.host)
    return [f"http://{engine.host}:{port}" for port in ports]


def port_of(config: RunConfig, number: int) -> int:
    """Port of one of the run's servers; 0: a free one is chosen.

    Raises:
        ConfigError: a port above 65535.
    """
    if not config.engine.port:
        return 0
    port = config.engine.port + number
    if port >= 1 << 16:
        raise ConfigError(
            f"engine.port is {config.engine.port}: server {number} of the run would "
            f"have port {port}, above 65535; set a lower one, or 0"
        )
    return port

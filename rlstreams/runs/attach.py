"""The log of a run that may be over: its embedded broker is started for a look, then stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlstreams.streams.broker.visits import visited
from rlstreams.streams.kafka.admin_ask import refuse_silence
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.bootstrap.parts import embedded_broker, open_bus
from rlstreams.workers.config.run import RunConfig


@contextmanager
def attached(config: RunConfig) -> Iterator[Bus]:
    """The run's bus.

    An embedded broker that is not running is started if the run has left its data, and stopped
    again by the last who looks; one that runs is left running.

    Raises:
        ConfigError: no broker is named, and none ever ran under the run's folder.
        BrokerError: the broker cannot be reached or started.
    """
    with served(config), open_bus(config) as bus:
        yield bus


@contextmanager
def served(config: RunConfig) -> Iterator[str]:
    """`host:port` of the run's broker. As `attached`, and raises the same."""
    if config.broker.bootstrap:
        refuse_silence(config.broker.bootstrap)  # at once, where the client would try for long
        yield config.broker.bootstrap
        return
    broker = embedded_broker(config)
    if not (broker.folder / "broker.json").is_file():
        raise ConfigError(
            f"run {config.run.id} has left no log under {config.folder}: it was never started "
            "here. Name the run's folder, or its broker: --broker.bootstrap=HOST:PORT"
        )
    with visited(broker) as bootstrap:
        yield bootstrap

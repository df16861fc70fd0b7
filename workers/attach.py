"""The log of a run that may be over: its embedded broker is started for a look, then stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from streams.bus import Bus
from workers.bootstrap import BROKER_FOLDER, open_bus
from workers.config import RunConfig


@contextmanager
def attached(config: RunConfig) -> Iterator[Bus]:
    """The run's bus.

    An embedded broker that is not running is started if the run has left its data, and stopped
    again at the end; one that runs is left running.

    Raises:
        ConfigError: no broker is named, and none ever ran under the run's folder.
        BrokerError: the broker cannot be reached or started.
    """
    from streams.broker import EmbeddedBroker

    folder = Path(config.folder) / BROKER_FOLDER
    with ExitStack() as stack:
        if not config.broker.bootstrap and (folder / "broker.json").is_file():
            broker = EmbeddedBroker(
                folder, config.broker.port, config.broker.jars_dir, config.broker.heap_mb
            )
            if broker.status() is None:
                broker.start()
                stack.callback(broker.stop)
        yield stack.enter_context(open_bus(config))

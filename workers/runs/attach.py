"""The log of a run that may be over: its embedded broker is started for a look, then stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from streams.bus import Bus
from streams.errors import ConfigError
from streams.run_folder import visited
from workers.bootstrap import embedded_broker, open_bus
from workers.config.run import RunConfig


@contextmanager
def attached(config: RunConfig) -> Iterator[Bus]:
    """The run's bus.

    An embedded broker that is not running is started if the run has left its data, and stopped
    again at the end; one that runs is left running.

    Raises:
        ConfigError: no broker is named, and none ever ran under the run's folder.
        BrokerError: the broker cannot be reached or started.
    """
    broker = embedded_broker(config)
    with ExitStack() as stack:
        was_ours = not config.broker.bootstrap and (broker.folder / "broker.json").is_file()
        if not was_ours and not config.broker.bootstrap:
            raise ConfigError(
                f"run {config.run.id} has left no log under {config.folder}: it was never started "
                "here. Name the run's folder, or its broker: --broker.bootstrap=HOST:PORT"
            )
        if was_ours:
            stack.enter_context(visited(broker))
        yield stack.enter_context(open_bus(config))

"""A fresh run: its folder, broker and empty topics."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rlstreams.streams.broker.visits import visited
from rlstreams.streams.kafka.admin import apply, listing
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import SCHEMAS
from rlstreams.streams.run.place import RunPlace
from rlstreams.streams.run.places import CONFIG_FILE, other_than_run
from rlstreams.streams.run.run_lock import locked_run
from rlstreams.streams.synced import write_whole
from rlstreams.workers.bootstrap.parts import (
    bootstrap_of,
    client_options,
    embedded_broker,
    open_bus,
    topic_plan,
)
from rlstreams.workers.config.load import resolved_json
from rlstreams.workers.config.run import RunConfig


@contextmanager
def fresh_run(config: RunConfig, *, schemas: Collection[str] = ()) -> Iterator[Bus]:
    """Open `fresh_topics`, and make the folder a run's at the beginning of the block."""
    with fresh_topics(config, schemas=schemas) as bus:
        configure(config)
        yield bus


def configure(config: RunConfig) -> None:
    """Write the run's configuration into its folder, which makes it this run's."""
    file = Path(config.folder) / CONFIG_FILE
    write_whole(file, f"{resolved_json(config)}\n".encode())


@contextmanager
def fresh_topics(config: RunConfig, *, schemas: Collection[str] = ()) -> Iterator[Bus]:
    """Open a run with new, empty topics; an embedded broker runs while the block is open.

    Args:
        schemas: the recording's schema texts, for roles that read its records in this run.

    Raises:
        ConfigError: the run has records already, its folder is another run's, or a process works
            in it: a live run is never written to or changed.
        BrokerError: the broker cannot be reached or started.
    """
    folder = Path(config.folder)
    refuse_others_folder(config)
    with ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked_run(folder))
        if not config.broker.bootstrap:
            # A broker that runs already may be a live run's, which is refused below.
            stack.enter_context(visited(embedded_broker(config)))
        bus = stack.enter_context(open_bus(config))
        _refuse_used(bus, config)  # before its topics are touched
        options = client_options(config)
        apply(bootstrap_of(config), config.run.id, topic_plan(config), options, schemas)
        yield bus


def refuse_others_folder(config: RunConfig) -> None:
    """Refuse a folder that is another run's: a fresh run writes its configuration there.

    Raises ConfigError: the folder is something else's; the message says what is there.
    """
    file = Path(config.folder) / CONFIG_FILE
    if other := other_than_run(file.parent):
        raise ConfigError(
            f"{other}: a fresh run needs a folder of its own; name another with --dir DIR"
        )
    if not file.exists():
        return
    there = RunPlace.of_folder(file.parent)
    if there.run != config.run.id:
        raise ConfigError(
            f"{file.parent} is the folder of run {there.run!r}: a fresh run needs a "
            "folder of its own; name another one with --dir DIR"
        )
    if there.bootstrap != config.broker.bootstrap:
        where = there.bootstrap or "an embedded broker of its own"
        raise ConfigError(
            f"{file.parent} is the folder of run {there.run!r} on {where}: name another run with "
            "--as NAME, or another folder with --dir DIR"
        )


def _refuse_used(bus: Bus, config: RunConfig) -> None:
    for topic in listing(bootstrap_of(config), config.run.id, client_options(config)):
        if topic != SCHEMAS.name and any(bus.ends(topic).values()):
            raise ConfigError(
                f"run.id {config.run.id!r} has records in {topic} already: only a run "
                "without any can be written so; name another one with --as NAME"
            )

"""Place of a run's log: a named broker, or the embedded one in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlstreams.streams.broker.config import FSYNC, HOST
from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.broker.password import client_options
from rlstreams.streams.broker.visits import visited
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.secrets import resolve_secret
from rlstreams.streams.run.places import CONFIG_FILE

BROKER_FOLDER = "broker"  # data of the embedded broker


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """The run's id, its broker or folder, and the settings by which its log is read."""

    run: str  # its id, the prefix of its topics
    folder: Path | None = None  # None: the run has none on this machine
    bootstrap: str = ""  # `host:port`, several with commas; "": the run's own embedded broker
    options: Mapping[str, str] = field(default_factory=dict)  # of every client, secrets by name
    host: str = HOST  # of the embedded broker
    port: int = 0  # likewise; 0: its last one, or a free one
    jars_dir: str = ""
    heap_mb: int = 256
    fsync: bool = False

    @classmethod
    def of_folder(cls, folder: Path) -> RunPlace:
        """Return the place by the `config.json` of a run's folder.

        Raises:
            ConfigError: a configuration that cannot be read.
        """
        file = folder / CONFIG_FILE
        try:
            config: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            broker = config["broker"]
            return cls(
                folder=folder,
                run=config["run"]["id"],
                **{name: broker[name] for name in cls.__slots__ if name in broker},
            )
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise ConfigError(f"{file} is no configuration of a run: {err!r}") from err

    @property
    def client_options(self) -> Mapping[str, str]:
        """The options, secrets resolved; with an embedded broker's password, once it started."""
        options = {
            name: resolve_secret(value, f"broker.options.{name}")
            for name, value in self.options.items()
        }
        if self.bootstrap:
            return options
        return {**client_options((self.folder or Path()) / BROKER_FOLDER), **options}

    def broker(self, *, is_for_a_look: bool = False) -> EmbeddedBroker:
        """Return the broker of the run's folder; it may be running or not.

        Args:
            is_for_a_look: start it quickly rather than for heavy work.
        """
        return EmbeddedBroker(
            (self.folder or Path()) / BROKER_FOLDER,
            self.port,
            self.jars_dir,
            self.heap_mb,
            settings=FSYNC if self.fsync else {},
            host=self.host,
            has_password=True,
            is_for_a_look=is_for_a_look,
        )

    @contextmanager
    def served(self, say: Callable[[str], None] = lambda _: None) -> Iterator[str]:
        """Yield `host:port` of the run's broker.

        An embedded broker that has stopped is started, and stopped again by its last visitor; a
        running one is left running.

        Raises:
            ConfigError: no broker is named, and none ever ran in the run's folder.
            BrokerError: the broker cannot be reached or started.
        """
        if self.bootstrap:
            from rlstreams.streams.kafka.reachable import refuse_silence

            refuse_silence(self.bootstrap)  # fails at once; the client would try for long
            yield self.bootstrap
            return
        broker = self.broker(is_for_a_look=True)
        if not (broker.folder / "broker.json").is_file():
            raise ConfigError(
                f"run {self.run} has left no log under {self.folder}: it was never started "
                "here. Name the run's folder, or its broker: --broker.bootstrap=HOST:PORT"
            )
        if broker.status() is None:
            say(f"the broker of {self.folder} has stopped: starting it for a look")
        with visited(broker) as bootstrap:
            yield bootstrap

"""The folder that `rlstreams up` leaves behind, as far as its log is concerned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.broker.visits import visited
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.secrets import resolve_secret

CONFIG_FILE = "config.json"  # the resolved configuration of the run
BROKER_FOLDER = "broker"  # data of the embedded broker


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """What is needed to read the run's log."""

    folder: Path
    run: str
    bootstrap: str  # empty: its own embedded broker
    options: Mapping[str, str]  # of every client, secrets by name
    jars_dir: str
    heap_mb: int

    @classmethod
    def load(cls, folder: Path | str) -> RunFolder:
        """Read `config.json`.

        Raises:
            ConfigError: no run's folder, or a configuration that cannot be read.
        """
        file = Path(folder) / CONFIG_FILE
        if not file.is_file():
            raise ConfigError(
                f"{folder} is neither a run's folder nor a recording: "
                f"it has neither {CONFIG_FILE} nor manifest.json"
            )
        try:
            config: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            broker = config["broker"]
            return cls(
                folder=Path(folder),
                run=config["run"]["id"],
                bootstrap=broker["bootstrap"],
                options=broker["options"],
                jars_dir=broker["jars_dir"],
                heap_mb=broker["heap_mb"],
            )
        except (ValueError, KeyError, TypeError) as err:
            raise ConfigError(f"{file} is no configuration of a run: {err!r}") from err

    @contextmanager
    def bus(self) -> Iterator[Bus]:
        """Its bus; an embedded broker that has stopped runs for as long as this is open.

        Raises:
            ConfigError: no broker is named, and none ever ran in this folder.
            BrokerError: the broker cannot be reached or started.
        """
        from rlstreams.streams.kafka.bus import KafkaBus

        options = {name: resolve_secret(value) for name, value in self.options.items()}
        if self.bootstrap:
            with KafkaBus(self.bootstrap, self.run, options=options) as bus:
                yield bus
            return
        folder = self.folder / BROKER_FOLDER
        if not (folder / "broker.json").is_file():
            raise ConfigError(f"no broker is named, and none ever ran in {folder}")
        broker = EmbeddedBroker(folder, jars_dir=self.jars_dir, heap_mb=self.heap_mb)
        with visited(broker) as bootstrap, KafkaBus(bootstrap, self.run, options=options) as bus:
            yield bus

"""The configuration of a run that is named on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlstreams.workers.config.run import RunConfig


def configuration(names: Sequence[str], overrides: Sequence[str]) -> RunConfig:
    """Of a run's folder as `up` left it, or of TOML files; of `./run.toml` if nothing is named.

    Raises:
        ConfigError: no such folder, one without `config.json`, or files that cannot be used; names
            the runs that are there.
    """
    from dataclasses import replace

    from rlstreams.runs.places import RUNS, check_place
    from rlstreams.streams.log.errors import ConfigError
    from rlstreams.workers.config.here import config_here
    from rlstreams.workers.config.load import load, read_json

    names = names or [config_here()]
    check_place(names[0], [RUNS])
    folder = Path(names[0])
    if not folder.is_dir():
        return load(names, overrides)
    if len(names) > 1 or overrides:
        raise ConfigError(f"{folder}: a run's folder has its own configuration; name it alone")
    config = read_json(folder / "config.json")
    # The folder may have been moved, or named from elsewhere, since it was written.
    return replace(config, run=replace(config.run, dir=str(folder)))

"""The configuration of a command that names none: `run.toml` of the working folder."""

from __future__ import annotations

from pathlib import Path

from rlstreams.streams.log.errors import ConfigError

CONFIG_FILE = "run.toml"


def config_here() -> str:
    """The configuration of a command that names none: the project's, in the working folder.

    Raises:
        ConfigError: there is none.
    """
    if Path(CONFIG_FILE).is_file():
        return CONFIG_FILE
    raise ConfigError(
        f"no CONFIG is named and there is no {CONFIG_FILE} in {Path.cwd()}; "
        "`rlstreams init DIR` makes a project, `rlstreams demo` needs none"
    )

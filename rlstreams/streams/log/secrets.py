"""Secrets are named in configuration and resolved on use; printed settings show only the name.

Variables that hold secrets of the run's own (its log, weights, data, servers) are withheld from
processes of user code: a reward needs no password of the broker. User code gets its own secrets by
its own options, or by a variable that the configuration does not name.
"""

from __future__ import annotations

import os
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError

_OF_THE_RUN = ("broker.", "weights.", "data.", "engine.")  # sections, as fields begin
_withheld: set[str] = set()  # names of variables, of this process


def withheld() -> frozenset[str]:
    """Return environment variables of secrets that the run resolved here for itself."""
    return frozenset(_withheld)


def resolve_secret(value: str, field: str = "") -> str:
    """Resolve `env:NAME` to the variable, `file:PATH` to the file without its last newline.

    Any other `value` is returned as it is.

    Args:
        field: field of the configuration, for messages.

    Raises:
        ConfigError: the variable is not set, or the file cannot be read.
    """
    kind, _, name = value.partition(":")
    wanted_by = f"wanted by {field} = {value!r}" if field else f"wanted by {value!r}"
    if kind == "env":
        if field.startswith(_OF_THE_RUN):
            _withheld.add(name)
        if name not in os.environ:
            raise ConfigError(f"environment variable {name} is not set ({wanted_by})")
        return os.environ[name]
    if kind == "file":
        try:
            return Path(name).read_text(encoding="utf-8").rstrip("\r\n")
        except UnicodeDecodeError as err:
            raise ConfigError(f"{name}: byte {err.start} is not UTF-8 ({wanted_by})") from err
        except OSError as err:
            raise ConfigError(f"{name}: cannot be read: {err.strerror} ({wanted_by})") from err
    return value

"""Secrets are named in configuration and resolved on use; what is printed shows only the name."""

from __future__ import annotations

import os
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError


def resolve_secret(value: str, field: str = "") -> str:
    """`env:NAME` -> the variable, `file:PATH` -> the file without its last newline, else `value`.

    Args:
        field: of the configuration, for messages.

    Raises:
        ConfigError: the variable is not set, or the file cannot be read.
    """
    kind, _, name = value.partition(":")
    wanted_by = f"wanted by {field} = {value!r}" if field else f"wanted by {value!r}"
    if kind == "env":
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

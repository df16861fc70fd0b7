"""Check that an address of the configuration can be listened on here, before anything does."""

from __future__ import annotations

import socket

from rlstreams.streams.log.errors import ConfigError


def check_address(field: str, host: str) -> None:
    """Refuse what is no address of this host, by the field's full name.

    Raises:
        ConfigError: nothing can listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except (OSError, ValueError) as err:  # a text that can be no name is a UnicodeError
        raise ConfigError(
            f"{field} is {host!r}, which is no address of this host: {err}; name one that is"
        ) from err

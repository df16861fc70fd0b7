"""Checks that the sections of a configuration share."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from rlstreams.streams.log.errors import ConfigError


def positive(section: str, **values: float) -> None:
    """Refuse a value of 0 or below, by its full name."""
    for name, value in values.items():
        if value <= 0:
            raise ConfigError(f"{section}.{name} must be above 0, got {value}")


def not_negative(section: str, **values: float) -> None:
    """Refuse a negative value, by its full name."""
    for name, value in values.items():
        if value < 0:
            raise ConfigError(f"{section}.{name} must be 0 or above, got {value}")


def device(name: str, value: str) -> None:
    """Refuse what is no device, by the field's full name."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise ConfigError(f"{name} must be `cpu`, `cuda` or `cuda:N`, got {value!r}")


def one_interface(name: str, host: str, why: str) -> None:
    """Refuse the addresses that mean every interface, by the field's full name.

    Args:
        why: one is to be named.
    """
    if host in ("", "0.0.0.0", "::"):
        raise ConfigError(f"{name} is {host!r}: {why}")


def ipv4(name: str, host: str) -> None:
    """Refuse an IPv6 address, by the field's full name."""
    if ":" in host:
        raise ConfigError(f"{name} must be an IPv4 address or a host name, got {host!r}")


def check_urls(name: str, urls: Sequence[str]) -> None:
    """Each is the address of one server.

    Raises:
        ConfigError: one is not, or is named twice.
    """
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ConfigError(f"{name} must be like http://host:port, got {url!r}")
    if len({url.rstrip("/") for url in urls}) != len(urls):
        raise ConfigError(f"{name} names a server twice: {list(urls)}")


def check_address(field: str, host: str) -> None:
    """Refuse what is no address of this host, by the field's full name, before anything listens.

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

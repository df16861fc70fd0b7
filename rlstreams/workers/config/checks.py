"""Conditions on the values of a configuration's sections, and the wording of a refusal."""

from __future__ import annotations

import functools
import re
import socket
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.nearest import meant

_EVERY_INTERFACE = ("", "0.0.0.0", "::")
_NAMED = re.compile(r"\[([a-z_][\w.]*)\]")


class Must(NamedTuple):
    """Condition on a field's value; stands in its type."""

    wanted: str
    admits: Callable[[Any], object]
    names: Sequence[str] = ()  # values of our own, of which the nearest is named
    pattern: str = ""  # of all other admitted values, a regular expression for editors


_ABOVE_0 = Must("above 0", lambda value: value > 0)
_FROM_0 = Must("0 or above", lambda value: value >= 0)
PositiveInt = Annotated[int, _ABOVE_0]
PositiveFloat = Annotated[float, _ABOVE_0]
NonNegativeInt = Annotated[int, _FROM_0]
NonNegativeFloat = Annotated[float, _FROM_0]
PositiveShare = Annotated[float, Must("in (0, 1]", lambda value: 0 < value <= 1)]
Share = Annotated[float, Must("in [0, 1]", lambda value: 0 <= value <= 1)]
ShareBelow1 = Annotated[float, Must("in [0, 1)", lambda value: 0 <= value < 1)]
Port = Annotated[int, Must("in [0, 65535]", lambda value: 0 <= value < 1 << 16)]
DeviceName = Annotated[
    str, Must("`cpu`, `cuda` or `cuda:N`", re.compile(r"cpu|cuda(:\d+)?").fullmatch)
]
AutoDeviceName = Annotated[
    str,
    Must("`auto`, `cpu`, `cuda` or `cuda:N`", re.compile(r"auto|cpu|cuda(:\d+)?").fullmatch),
]
Addresses = Annotated[
    str, Must("`HOST:PORT[,HOST:PORT]`", re.compile(r"|[^\s,]+:\d+(, *[^\s,]+:\d+)*").fullmatch)
]
Ipv4 = Annotated[str, Must("an IPv4 address or a host name", lambda host: ":" not in host)]


class Section:
    """A table of the configuration, a frozen dataclass; `section` its dotted name.

    Raises:
        ConfigError: from the constructor: a value is not what its type says it must be, or the
            first of `_problems`.
    """

    __slots__ = ()
    _section = ""

    def __init_subclass__(cls, section: str = "") -> None:
        if section:  # not of the class that `slots` makes of it
            cls._section = section

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for name, must in musts(cls):
            if not must.admits(value := getattr(self, name)):
                near = meant(str(value), must.names)
                raise ConfigError(
                    f"{self._section}.{name} must be {must.wanted}, got {value!r}{near}"
                )
        refuse_first(self._problems(), self, f"{self._section}.")

    def _problems(self) -> Iterator[str]:
        """Problems of the section's values, as `worded` completes them."""
        return iter(())


@functools.cache
def musts(cls: type[Any]) -> Sequence[tuple[str, Must]]:
    """Name and condition of each field of a dataclass that has one."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return [
        (field.name, must)
        for field in fields(cls)
        for must in getattr(hints[field.name], "__metadata__", ())
    ]


def refuse_first(problems: Iterator[str], config: object, prefix: str = "") -> None:
    """
    Raises:
        ConfigError: the first problem, worded.
    """
    if problem := next(problems, ""):
        raise ConfigError(worded(problem, config, prefix))


def worded(problem: str, config: object, prefix: str) -> str:
    """A sentence in which each `[name]` of a field becomes `prefix.name is VALUE`."""

    def named(found: re.Match[str]) -> str:
        try:
            return f"{prefix}{found[1]} is {_shown(attrgetter(found[1])(config))}"
        except AttributeError:  # of a value, in which anything may stand
            return found[0]

    return _NAMED.sub(named, problem)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return repr(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def every_interface(field: str, host: str, why: str) -> Iterator[str]:
    """A problem, if an address means every interface.

    Args:
        why: the reason to name one of them.
    """
    if host in _EVERY_INTERFACE:
        yield f"[{field}]: {why}"


def check_urls(name: str, urls: Sequence[str]) -> None:
    """Check that each is the address of one server.

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
    """Refuse an address that is none of this host, by the field's full name, before a part listens.

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

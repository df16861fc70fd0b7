"""Whether what the configuration refers to as `env:NAME` or `file:PATH` is there on this host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from rlstreams.start.doctor.check import Check, fail, ok
from rlstreams.start.doctor.host import Host
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.secrets import resolve_secret
from rlstreams.workers.config.layers import references
from rlstreams.workers.config.run import RunConfig

# Who resolves them; what is not listed, every role.
_READERS: Mapping[str, tuple[str, ...]] = {
    "data": ("prompts", "trainer"),
    "engine": ("rollout",),
    "environment": ("rollout",),
    "reward": ("rollout",),
    "weights": ("rollout", "logprob", "trainer"),
}


def secrets_check(config: RunConfig, host: Host) -> Check:
    """Each is resolved, none is shown."""
    lacking, found = [], []
    for name, text in _all(config):
        if not host.has(*_READERS.get(name.partition(".")[0], (host.role,))):
            continue
        try:
            if resolve_secret(text, name) != text:
                found.append(name)
        except ConfigError as err:
            lacking.append(str(err))
    if lacking:
        return fail("secrets", "; ".join(lacking), "set it here, as for the start of the role")
    return ok("secrets", f"there: {', '.join(found)}" if found else "none is referred to")


def _all(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Every field that may be a reference."""
    for name, value in _fields(msgspec.to_builtins(config), ""):
        yield from references(name, value)


def _fields(tree: Mapping[str, object], above: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value

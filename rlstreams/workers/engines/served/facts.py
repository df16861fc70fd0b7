"""Facts of a running server, and the versions that were run with rlstreams.

A server is asked by the adapter of its kind. vLLM and SGLang both describe their routes in
`/openapi.json`, so a feature that a version lacks shows as a missing route: 0.25.1 has no
`/weight_info`, 0.5.17 no `/begin_weight_update`. A version older than all that were run is refused;
any other is tried, and must have every route.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

from rlstreams.workers.engines.served.http import ServerError, ServerGoneError, ServerHttp

_LOOKED_AT = (
    "what a start and a run look at: its routes and ranks, the checksum of each version in it, "
    "and before each step whether its log-probs and the scorer's agree (guard)"
)


class RouterError(ServerError):
    """It is a router in front of servers; `cure` says what to name instead."""

    def __init__(self, url: str, servers: Sequence[str]) -> None:
        listed = ", ".join(servers) or "none yet"
        super().__init__(
            f"server {url} is a router (its /workers lists {listed}), which passes a pull on to "
            "one of its servers or to none: the others would sample with weights of no version"
        )
        named = ", ".join(f'"{server}"' for server in servers) or '"http://host:port", ...'
        self.cure = f"set engine.urls = [{named}]: a worker chooses among them itself"


class Kind(StrEnum):
    """Kind of a server, with the versions that were run with rlstreams: the first ran on GPUs, and
    is the one to install."""

    tested: tuple[str, ...]

    def __new__(cls, name: str, *tested: str) -> Self:
        """A member, as an enumeration makes it."""
        made = str.__new__(cls, name)
        made._value_, made.tested = name, tested
        return made

    VLLM = "vllm", "0.25.1", "0.32.0"
    SGLANG = "sglang", "0.5.17"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """A server's description of itself."""

    kind: Kind
    version: str
    model: str
    max_tokens: int  # longest sequence, prompt included
    routes: frozenset[str]
    settings: Mapping[str, Any]  # start arguments, as far as it names them
    # Whether an answer gives the version of each token, so that a request may go on while weights
    # change; else each pull cuts all running requests.
    reports_versions: bool = False
    keeps_records: bool = False  # our plugin records log-probs and versions of each request

    @property
    def name(self) -> str:
        """Name and version, as `vllm/0.32.0`."""
        return f"{self.kind}/{self.version}"


class Needed(NamedTuple):
    """Routes that a server must have."""

    name: str
    routes: tuple[str, ...]
    cost: str  # of their absence
    cure: str


def to_install(kind: Kind) -> str:
    """Requirement for pip: the version that ran on GPUs."""
    return f"{kind}=={kind.tested[0]}"


def untested(kind: Kind, version: str) -> str:
    """Note on a version that was not run with rlstreams; "": it was."""
    if version.partition("+")[0] in kind.tested:
        return ""
    return (
        f"not run with rlstreams ({', '.join(kind.tested)} were), and is tried; {_LOOKED_AT}. "
        f"Should one fail: install {to_install(kind)}"
    )


def too_old(kind: Kind, version: str) -> str:
    """Reason to refuse a version, unless `engine.allow_untested` is set; "": none."""
    oldest = min(kind.tested, key=_numbers)
    if not is_older(version, _numbers(oldest)):
        return ""
    return (
        f"older than {oldest}, the oldest that rlstreams was run with: install "
        f"{to_install(kind)}, or set engine.allow_untested = true to try it"
    )


def is_older(version: str, than: tuple[int, ...]) -> bool:
    """Whether a version is before `than`, as `0.25.1` before (0, 26); an unreadable one is not."""
    return bool(numbers := _numbers(version)) and numbers < than


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


async def refuse_router(http: ServerHttp, deadline_s: float) -> None:
    """Return if no router of vLLM or SGLang answers at `http`.

    vLLM's passes all that it does not know on to one server after the other, its description too:
    but for this route it looks as a server does.

    Raises:
        RouterError: one does.
        ServerGoneError: nothing answers.
    """
    try:
        found = await http.get("/workers", deadline_s)
    except ServerGoneError:
        raise
    except ServerError:
        return  # a server has no such route
    if isinstance(found, dict) and isinstance(listed := found.get("workers"), list):
        urls = (one.get("url") for one in listed if isinstance(one, dict))
        raise RouterError(http.url, sorted(str(url) for url in urls if url))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Processes that hold a part of the model.

    Tensor and expert parallel ranks report the shard that they hold, and receive weights. The map
    between layouts cannot distinguish replicas in one server, nor stages of a pipeline.
    """

    total: int
    replicas: int = 1
    stages: int = 1  # for a vLLM only its plugin or its settings report it


@contextmanager
def fields_at(url: str, path: str) -> Iterator[None]:
    """Makes a field that is missing in what the server answered at `path` a `ServerError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as err:
        raise ServerError(f"server {url}: {path} lacks a field: {err!r}") from err

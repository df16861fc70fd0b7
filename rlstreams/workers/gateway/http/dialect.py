"""The port `Dialect`: from a request's body to calls, from answers to a body or a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlstreams.workers.gateway.http.wire import Body
from rlstreams.workers.gateway.port import CallAnswer, CallRefusedError, CallRequest

_JSON = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request that was read."""

    calls: tuple[CallRequest, ...]  # siblings; one, but for `n` of chat completions
    is_stream: bool
    body: Body


class Dialect(Protocol):
    """An API that clients speak."""

    keepalive: bytes  # sent by a stream while it waits

    def asked(self, data: bytes, headers: Mapping[str, str]) -> ParsedRequest:
        """Read a request; raises CallRefusedError, 400."""

    def answer(
        self, asked: ParsedRequest, answers: Sequence[CallAnswer], model: str
    ) -> dict[str, Any]:
        """The body of an answer."""

    def events(
        self, asked: ParsedRequest, answers: Sequence[CallAnswer], model: str
    ) -> Iterator[bytes]:
        """The answer as a stream: it is committed, so no event is ever taken back."""

    def error(self, refused: CallRefusedError) -> dict[str, Any]:
        """The body of a refusal."""

    def failed(self, refused: CallRefusedError) -> bytes:
        """A refusal in a stream that has begun."""


def event(value: Mapping[str, Any], name: str = "") -> bytes:
    """A server-sent event."""
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {as_json(value)}\n\n".encode()


def as_json(value: object) -> str:
    """JSON in ASCII: half of a surrogate pair that a model wrote is no UTF-8."""
    return _JSON.encode(value)

"""Fields of a request's body, read with errors that name field and value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlstreams.workers.gateway.port import CallRefusedError

IS_TRAINED = "x-rlstreams-is-trained"
_IDEMPOTENCY_KEY = "idempotency-key"


def bad(field: str, why: str, code: str = "invalid_value") -> CallRefusedError:
    """The refusal of a request that no other try would make better."""
    return CallRefusedError(400, code, f"{field} {why}", param=field)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number there")


class Body:
    """A JSON object as it came; null is the same as not there."""

    def __init__(self, data: bytes, *, takes_nan: bool = False) -> None:
        """
        Args:
            takes_nan: NaN and Infinity are read, which are no JSON: their field is to be named.

        Raises:
            CallRefusedError: 400; it is no JSON object.
        """
        self.data = data
        try:
            values = json.loads(data, parse_constant=None if takes_nan else _no_number)
        except (ValueError, RecursionError) as err:
            raise bad("body", f"is no JSON: {err}", "invalid_json") from err
        if not isinstance(values, dict):
            raise bad("body", f"must be a JSON object, got {type(values).__name__}")
        self.values: dict[str, Any] = {k: v for k, v in values.items() if v is not None}

    def text(self, name: str, default: str = "") -> str:
        """A text."""
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise bad(name, f"must be text, got {value!r:.60}")
        return value

    def flag(self, name: str) -> bool:
        """True or false; false if it is not there."""
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise bad(name, f"must be true or false, got {value!r:.60}")
        return value

    def integer(self, name: str, least: int, most: int | None = None) -> int | None:
        """A whole number within bounds; None: it is not there."""
        value = self.values.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise bad(name, f"must be a whole number, got {value!r:.60}")
        if value < least or (most is not None and value > most):
            to = "or more" if most is None else f"to {most}"
            raise bad(name, f"must be {least} {to}, got {value}")
        return value

    def objects(self, name: str) -> Sequence[Mapping[str, Any]]:
        """A list of objects; empty if it is not there."""
        value = self.values.get(name, [])
        if not isinstance(value, list):
            raise bad(name, f"must be a list, got {value!r:.60}")
        for number, item in enumerate(value):
            if not isinstance(item, dict):
                raise bad(f"{name}[{number}]", f"must be an object, got {item!r:.60}")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object; empty if it is not there."""
        value = self.values.get(name, {})
        if not isinstance(value, dict):
            raise bad(name, f"must be an object, got {value!r:.60}")
        return value

    def stops(self, name: str) -> tuple[str, ...]:
        """A text or a list of texts that end an answer; empty ones end nothing."""
        value = self.values.get(name, [])
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise bad(name, f"must be text or a list of texts, got {value!r:.60}")
        return tuple(text for text in texts if text)

    def requested(self, names: Sequence[str]) -> dict[str, Any]:
        """Parameters of `names` that the request has, and an overruled choice of tools: that some
        must be called, or one at most."""
        wanted = [*names, "tool_choice"] if self.wants_some_tool else [*names]
        wanted += ["parallel_tool_calls"] * (self.values.get("parallel_tool_calls") is False)
        return {name: self.values[name] for name in wanted if name in self.values}

    @property
    def wants_some_tool(self) -> bool:
        """Whether an answer must call a tool, whichever. It is served, as a temperature is: whether
        to call one stays the policy's choice. One tool by name is no such choice."""
        choice = self.values.get("tool_choice")
        return (choice.get("type") if isinstance(choice, dict) else choice) in ("required", "any")


def said_by(headers: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a `CallRequest` that its headers say, alike in every dialect.

    Raises:
        CallRefusedError: 400; a header has a value that it cannot have.
    """
    return {
        "retry": _retry_of(headers),
        "idempotency_key": headers.get(_IDEMPOTENCY_KEY, ""),
        "is_trained": _is_trained_of(headers),
    }


def _retry_of(headers: Mapping[str, str]) -> int | None:
    """Number of a client's try of a request, from 0; None: it does not count them."""
    count = headers.get("x-stainless-retry-count", "")
    return int(count) if count.isdecimal() and count.isascii() else None


def _is_trained_of(headers: Mapping[str, str]) -> bool:
    """Whether its client wants a call to be learnt from.

    Raises:
        CallRefusedError: 400; the header is neither true nor false.
    """
    said = headers.get(IS_TRAINED, "true")
    if said.lower() not in ("true", "false"):
        raise bad(IS_TRAINED, f"must be true or false, got {said!r:.60}")
    return said.lower() == "true"

"""Requests to a server and its answers, in fields that all kinds of server share.

Pure. An adapter turns a `GenerateRequest` into its server's JSON, and that server's JSON into an
`Answer`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlstreams.workers.engines.served.capacity import Gauges

_REASONS = ("abort", "length", "stop")


class AnswerError(ValueError):
    """A field of an answer is impossible; names field, value and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request, ready for any server."""

    request_id: str  # fixed length: SGLang aborts by prefix
    token_ids: Sequence[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int  # 0: off
    seed: int
    stop_token_ids: Sequence[int]
    experts_start: int | None  # rows of routed experts from this position on; None: not asked for
    salt: str  # cached prefixes are shared only among requests of one salt: one version of weights


@dataclass(frozen=True, slots=True)
class Span:
    """Output tokens [start, end) were sampled under the version with this label."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A server's answer to one request."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | npt.NDArray[np.float32]  # nats; one per token
    finish_reason: str  # "stop", "length", "abort"
    spans: Sequence[Span] | None = None  # None: this server reports none
    label: str | None = None  # of the version at the end; None: this server names none
    num_preemptions: int = 0  # times that its keys and values were computed anew
    experts: npt.NDArray[Any] | None = None  # [rows, layers, top_k], or flat


def field(value: object, name: str, kind: type | tuple[type, ...]) -> Any:  # noqa: ANN401
    """`value[name]` of a JSON object, with its type checked.

    Raises:
        AnswerError: it is missing or of another type.
    """
    if not isinstance(value, dict):
        raise AnswerError(f"the answer is {type(value).__name__}, not an object")
    found = value.get(name)
    if not isinstance(found, kind):
        wanted = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
        shown = "missing" if name not in value else f"{found!r:.80}"
        raise AnswerError(f"field {name} should be {wanted}, is {shown}")
    return found


def spans_of(found: object) -> list[Span] | None:
    """`[{version, start, end}]` of both kinds of server; None if it is null."""
    if found is None:
        return None
    if not isinstance(found, list):
        raise AnswerError(f"field weight_versions should be a list, is {found!r:.80}")
    return [
        Span(field(s, "version", str), field(s, "start", int), field(s, "end", int)) for s in found
    ]


def reason_of(value: object, name: str) -> str:
    """`value[name]`, the reason that an answer ended; an unknown one is an AnswerError."""
    reason = str(field(value, name, str))
    if reason not in _REASONS:
        raise AnswerError(f"field finish_reason should be one of {_REASONS}, is {reason!r}")
    return reason


def decoded(found: object, name: str) -> bytes:
    """The bytes behind base64; other text is an AnswerError."""
    try:
        return base64.b64decode(str(found), validate=True)
    except ValueError as err:
        raise AnswerError(f"field {name} is no base64: {err}") from err


def array(content: bytes, name: str, dtype: str) -> npt.NDArray[Any]:
    """Numbers of `content`; a fraction of one is an AnswerError."""
    try:
        return np.frombuffer(content, dtype)
    except ValueError as err:
        raise AnswerError(f"{name} has {len(content)} bytes: {err}") from err


def gauges_of(text: str, names: tuple[str, str, str, str]) -> Gauges:
    """A server's load, from metrics in Prometheus' text format.

    A metric has a line for each set of labels, and so for each engine: counts are summed, and the
    largest share of the cache is taken.

    Args:
        names: as `Adapter.gauge_names`.

    Raises:
        AnswerError: a metric is missing, or no number.
    """
    found: dict[str, list[float]] = {name: [] for name in names if name}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in found:
            try:
                value = float(line[len(name) :].rpartition("}")[2].split()[0])  # a time may follow
            except (ValueError, IndexError):
                value = math.nan
            if not math.isfinite(value):
                raise AnswerError(f"{name} should be a number, is {line!r:.120}")
            found[name].append(value)
    if missing := [name for name, values in found.items() if not values]:
        raise AnswerError(f"there is no {', '.join(missing)}")
    running, waiting, share, preempted = names
    return Gauges(
        num_running=int(sum(found[running])),
        num_waiting=int(sum(found[waiting])),
        cache_share=max(found[share]),
        num_preemptions=int(sum(found[preempted])) if preempted else None,
    )

"""Parser of record choices: `3:7`, `2026-11-21T10:00`, `trajectories-0@100:200`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlstreams.streams.recording.selection import Range, Selection

_OFFSETS = re.compile(r"([a-z-]+?)(?:-(\d+)|\[(\d+)\])@(\d*):(\d*)")
FIELDS = ("topics", "since", "until", "steps", "versions", "groups", "rows", "offsets")


def add_selection(parser: argparse.ArgumentParser) -> None:
    """The options that choose records, the same for recording and for replaying."""
    group = parser.add_argument_group("which records (all conditions must hold)")
    group.add_argument("--topics", default="", metavar="A,B", help="only these topics")
    group.add_argument(
        "--since", default="", metavar="TIME", help="ISO time (UTC), or milliseconds"
    )
    group.add_argument("--until", default="", metavar="TIME", help="the same; inclusive")
    group.add_argument("--steps", default="", metavar="A:B", help="steps, and all their groups")
    group.add_argument("--versions", default="", metavar="A:B", help="policy versions that sampled")
    group.add_argument("--groups", default="", metavar="N,N", help="prompt groups, e.g. 17,e10-3")
    group.add_argument("--rows", default="", metavar="N,N", help="prompts: rows of the data set")
    group.add_argument(
        "--offsets",
        action="append",
        default=[],
        metavar="TOPIC-P@A:B",
        help="offsets of a partition; repeatable, other partitions are left out",
    )


def words_of(args: argparse.Namespace, fields: Sequence[str] = FIELDS) -> dict[str, str]:
    """The selection as it was typed, for the manifest; empty: everything."""
    found = {name: getattr(args, name) for name in fields}
    return {
        name: ",".join(value) if isinstance(value, list) else str(value)
        for name, value in found.items()
        if value
    }


def selection_of(args: argparse.Namespace) -> Selection:
    """What was typed; `steps` are to be completed with their groups by the caller.

    Raises:
        ConfigError: something that is no range, time or topic; names the option.
    """
    from rlstreams.streams.log.errors import ConfigError
    from rlstreams.streams.log.record import Partition
    from rlstreams.streams.log.topics import TOPICS
    from rlstreams.streams.recording.selection import Selection

    known = {topic.name for topic in TOPICS}
    topics = frozenset(_list(args.topics))
    if topics - known:
        raise ConfigError(
            f"--topics: {', '.join(sorted(topics - known))} is unknown; "
            f"known: {', '.join(sorted(known))}"
        )
    offsets: dict[Partition, Range] = {}
    for word in args.offsets:
        match = _OFFSETS.fullmatch(word)
        if match is None or match[1] not in known:
            raise ConfigError(f"--offsets must be TOPIC-PARTITION@FIRST:LAST, got {word!r}")
        first, last = (int(text) if text else None for text in match.group(4, 5))
        offsets[Partition(match[1], int(match[2] or match[3]))] = _range(first, last)
    return Selection(
        topics=topics,
        time_ms=times(args.since, args.until),
        offsets=offsets,
        steps=range_of(args.steps, "--steps"),
        versions=range_of(args.versions, "--versions"),
        groups=frozenset(_list(args.groups)) or None,
        rows=frozenset(_numbers(args.rows, "--rows")) or None,
    )


def range_of(text: str, option: str, number: Callable[[str], float] = int) -> Range | None:
    """`3:7`, `3:`, `:7` or `3`; None if nothing was typed.

    Raises:
        ConfigError: anything else.
    """
    from rlstreams.streams.log.errors import ConfigError

    if not text:
        return None
    first, colon, last = text.partition(":")
    try:
        low = number(first) if first else None
        high = number(last) if last else (None if colon else low)
    except ValueError:
        raise ConfigError(f"{option} must be A:B, A: or :B, got {text!r}") from None
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{option}: {text} is empty, because {first} is above {last}")
    return _range(low, high)


def times(since: str, until: str) -> Range | None:
    """From two times; None if neither was typed.

    Raises:
        ConfigError: no time.
    """
    if not since and not until:
        return None
    return _range(
        time_ms(since, "--since") if since else None, time_ms(until, "--until") if until else None
    )


def time_ms(text: str, option: str) -> int:
    """Milliseconds since 1970 of an ISO time (UTC where it names no zone), or of that number.

    Raises:
        ConfigError: neither.
    """
    from rlstreams.streams.log.errors import ConfigError

    if text.isdecimal():
        return int(text)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{option} must be a time like 2026-11-21T10:30:00, or milliseconds, got {text!r}"
        ) from None
    return round((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)


def _range(first: float | None, last: float | None) -> Range:
    from rlstreams.streams.recording.selection import Range

    ends = {"first": first, "last": last}
    return Range(**{name: end for name, end in ends.items() if end is not None})


def _list(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str, option: str) -> list[int]:
    from rlstreams.streams.log.errors import ConfigError

    try:
        return [int(word) for word in _list(text)]
    except ValueError:
        raise ConfigError(f"{option} must be numbers with commas, got {text!r}") from None

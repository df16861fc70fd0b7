"""Options that choose records, the same for recording and for replaying: `--steps 3:7`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rlstreams.cli.arguments import options

if TYPE_CHECKING:
    from rlstreams.streams.recording.selection import Range, Selection

FIELDS = ("topics", "steps", "groups")


def add_selection(parser: argparse.ArgumentParser) -> None:
    """The options."""
    options(
        parser.add_argument_group("which records (all conditions must hold)"),
        """
        --topics A,B   only these topics
        --steps A:B    steps, and all their groups
        --groups N,N   prompt groups, e.g. 17,e10-3
        """,
    )


def words_of(args: argparse.Namespace) -> dict[str, str]:
    """The selection as it was typed, for the manifest; empty: everything."""
    return {name: str(getattr(args, name)) for name in FIELDS if getattr(args, name)}


def selection_of(args: argparse.Namespace) -> Selection:
    """What was typed; `steps` are to be completed with their groups by the caller.

    Raises:
        ConfigError: something that is no range or topic; names the option.
    """
    from rlstreams.streams.log.errors import ConfigError
    from rlstreams.streams.log.topics import TOPICS
    from rlstreams.streams.recording.selection import Selection

    known, topics = {topic.name for topic in TOPICS}, frozenset(_list(args.topics))
    if topics - known:
        raise ConfigError(
            f"--topics: {', '.join(sorted(topics - known))} is unknown; "
            f"known: {', '.join(sorted(known))}"
        )
    return Selection(
        topics=topics,
        steps=range_of(args.steps, "--steps"),
        groups=frozenset(_list(args.groups)) or None,
    )


def range_of(text: str, option: str) -> Range | None:
    """`3:7`, `3:`, `:7` or `3`; None if nothing was typed.

    Raises:
        ConfigError: anything else.
    """
    from rlstreams.streams.log.errors import ConfigError
    from rlstreams.streams.recording.selection import Range

    if not text:
        return None
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else None
        high = int(last) if last else (None if colon else low)
    except ValueError:
        raise ConfigError(f"{option} must be A:B, A: or :B, got {text!r}") from None
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{option}: {text} is empty, because {first} is above {last}")
    ends = {"first": low, "last": high}
    return Range(**{name: end for name, end in ends.items() if end is not None})


def _list(text: str) -> list[str]:
    return [word for word in text.split(",") if word]

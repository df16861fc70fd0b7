"""The dead letters of a run, read from its topics up to their present end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlstreams.schemas.events import DeadLetter
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.views.feed import Feed
from rlstreams.streams.views.letters import LETTER_TOPICS, LettersView


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLetters:
    """The fold at the end of its topics."""

    view: LettersView
    num_unreadable: int  # records in those topics that are no event


def read_letters(
    bus: Bus, deadline_s: float, keep_bytes: Callable[[DeadLetter], bool] = lambda _: False
) -> ReadLetters:
    """Read until where the topics end now.

    Raises:
        DeadlineError: the broker delivered nothing for `deadline_s`.
    """
    view = LettersView(keep_bytes)
    feed = Feed(bus, view, LETTER_TOPICS)
    try:
        feed.catch_up(deadline_s)
    finally:
        feed.close()
    return ReadLetters(view=view, num_unreadable=feed.num_unreadable)

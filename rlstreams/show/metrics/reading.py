"""Reads a log into rows of figures: once, or until the run is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rlstreams.show.metrics.rows import MetricRows, Row
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import BrokerError, DeadlineError
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS, STEPS, TRAJECTORIES
from rlstreams.streams.views.feed import Feed

TOPICS = (STEPS, PROMPTS, TRAJECTORIES, DEAD_LETTERS)
POLL_S = 0.5
READ_DEADLINE_S = 60.0
LAST_S = 10.0  # the same once it is stopped: who stops it waits


class Sink(Protocol):
    """Where rows go."""

    def write(self, rows: Sequence[Row]) -> None:
        """Take rows; those of a step come once."""

    def close(self) -> None:
        """Finish what was begun."""


def read_rows(
    bus: Bus,
    sink: Sink,
    view: MetricRows,
    *,
    follow: bool,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Give the sink all rows of a fresh view, oldest first; with `follow` also those to come.

    Consumes: `steps`, `prompts`, `trajectories`, `dead-letters`, as a reader that commits nothing.
    Produces: nothing in the log. Waits for: records; with `follow` until the run has reached its
    target and is evaluated, `stopped()` is true, or its broker, once read to the end, is gone; what
    lies in the log when it is stopped is read. Unblocked by: the roles.

    Returns:
        How many rows there were.

    Raises:
        DeadlineError: nothing came of what lies in the log, at first or once it is stopped.
        BrokerError: the broker went before everything in it was read.
    """
    feed = Feed(bus, view, TOPICS)
    num_rows = 0

    def give(*, is_caught_up: bool, is_last: bool = False) -> None:
        nonlocal num_rows
        rows = view.take(is_caught_up=is_caught_up, is_last=is_last)
        if rows:
            sink.write(rows)
        num_rows += len(rows)

    try:
        feed.catch_up(READ_DEADLINE_S)
        is_last = not follow
        give(is_caught_up=True, is_last=is_last)
        while not (is_last or view.is_over):
            if is_last := stopped():
                feed.catch_up(LAST_S)
                break
            try:
                while feed.poll(POLL_S):
                    give(is_caught_up=False)
                is_caught_up = not feed.behind(feed.ends())
            except (BrokerError, DeadlineError):
                break  # `up` has stopped its broker: the run is drained
            give(is_caught_up=is_caught_up)
        if is_last or view.is_over:
            give(is_caught_up=True, is_last=True)
    finally:
        feed.close()
    return num_rows

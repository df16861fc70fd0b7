"""What two reports per partition prove of the records between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlstreams.streams.kafka.stretch import Stretches
from rlstreams.streams.log.parts import PART_BYTES
from rlstreams.streams.log.record import Outgoing


class Message:
    """A delivered message, as the client reports it."""

    def __init__(self, offset: int | None) -> None:
        self._offset = offset

    def offset(self) -> int | None:
        return self._offset


class Client:
    """Keeps what it is told to report, in order."""

    def __init__(self) -> None:
        self.reports: list[Callable[[Any, Message], None]] = []

    def produce(self, *_message: object, on_delivery: Any = None, **_settings: object) -> None:
        if on_delivery is not None:
            self.reports.append(on_delivery)


def sent(*sizes: int) -> tuple[Client, Stretches]:
    client = Client()
    stretches = Stretches(client.produce, client.produce, "run.", lambda _: 0)
    stretches.send(Outgoing(topic="t", key=b"k", value=[bytes(size)]) for size in sizes)
    return client, stretches


def report(client: Client, *offsets: int | None) -> None:
    for told, offset in zip(client.reports, offsets, strict=True):
        told(None, Message(offset))


LARGE = 2 * PART_BYTES


@pytest.mark.parametrize(
    ("sizes", "offsets", "is_whole"),
    [
        ((1, 1, 1), (7, 9), True),
        ((1, 1, 1), (7, 8), False),
        ((1, 1, 1), (None, 9), False),
        ((1, 1, 1), (7, None), False),
        ((1,), (None,), False),
        ((LARGE,), (3, 4), True),
        # Others wrote between our parts: the distance alone would make up for what is missing.
        ((1, LARGE), (None, 10, 15), False),
        ((LARGE, 1), (None, 6, 11), False),
        ((LARGE, 1), (5, None, 11), False),
    ],
)
def test_a_message_without_a_place_is_missing(
    sizes: tuple[int, ...], offsets: tuple[int | None, ...], is_whole: bool
) -> None:
    """Whichever of those with a report it is."""
    client, stretches = sent(*sizes)
    report(client, *offsets)
    assert stretches.is_whole == is_whole

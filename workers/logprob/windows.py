"""Windows prescribed by a replay: which trajectories are scored together, and in which order.

What is scored together decides the padding and the shape of a forward, and with them the last bit
of a log-prob (measured: alone instead of among 63 others, 62 of 64 sequences differ, by up to
1.5e-5). A live worker takes what has arrived when the window closes, and records its window in each
`ScoredTrajectory`. A replay passes it on in the header `rlstreams-window` =
`{name}/{place}/{size}`, and such records are scored in exactly that window.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from rlstreams.schemas.events import Trajectory
from rlstreams.streams.log.record import WINDOW_HEADER, RawRecord, Record

_HEADER = re.compile(r"([^/]+)/([0-9]{1,9})/([0-9]{1,9})")


class Prescribed(NamedTuple):
    """What the header says."""

    name: str
    place: int
    size: int


def header_of(name: str, place: int, size: int) -> dict[str, bytes]:
    """The header that prescribes a window."""
    return {WINDOW_HEADER: f"{name}/{place}/{size}".encode()}


def prescribed(raw: RawRecord) -> Prescribed | None:
    """The window that a record was sent for; None if it was sent for none."""
    found = _HEADER.fullmatch(raw.headers.get(WINDOW_HEADER, b"").decode("ascii", "replace"))
    if found is None or int(found[2]) >= int(found[3]):
        return None
    return Prescribed(found[1], int(found[2]), int(found[3]))


def is_prescribed(record: Record[Trajectory]) -> bool:
    """Whether a record was sent for a window."""
    return prescribed(record.raw) is not None


def next_window(pending: Sequence[Record[Trajectory]]) -> list[Record[Trajectory]] | None:
    """The window of the first record that has one, in its order; None while it is not whole."""
    named = [(found, r) for r in pending if (found := prescribed(r.raw)) is not None]
    if not named:
        return None
    name, size = named[0][0].name, named[0][0].size
    window = {found.place: record for found, record in named if found.name == name}
    return [window[place] for place in range(size)] if len(window) == size else None

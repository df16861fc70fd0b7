"""The keyboard of a replay: pause, one record, one step, faster, slower, elsewhere, stop."""

from __future__ import annotations

import math
from collections.abc import Callable

from rlstreams.debug.replay.player import Pace
from rlstreams.debug.replay.seek import Seeker
from rlstreams.streams.log.errors import StreamsError

HELP = (
    "space pause  n next record  s next step  + faster  - slower  q stop\n"
    "< 10 s back  > 10 s on  [ a step back  ] a step on  "
    "g go to step:7, version:5, +30, -30 or a time"
)
LEAP_S = 10
_ENTER, _ESCAPE, _ERASE = "\r\n", "\x1b", "\x7f\b"


def press(pace: Pace, key: str) -> None:
    """What a key does to the pace; any other does nothing."""
    if key == " ":
        pace.is_paused = not pace.is_paused
        pace.num_single, pace.to_next_step = 0, False
    elif key == "n":
        pace.is_paused = True
        pace.num_single += 1
    elif key == "s":
        pace.is_paused = True
        pace.to_next_step = True
    elif key == "+":
        pace.speed = pace.speed * 2
    elif key == "-":
        pace.speed = 1.0 if math.isinf(pace.speed) else pace.speed / 2
    elif key == "q":
        pace.is_ended = True


class Keys:
    """Keys that also seek. `said` is for the screen: what is typed, or why it cannot be.

    Args:
        pace: of the player.
        seeker: knows the moments.
        now_ms: recorded time of the last record that was played.
    """

    def __init__(self, pace: Pace, seeker: Seeker, now_ms: Callable[[], int]) -> None:
        self.said = ""
        self._pace = pace
        self._seeker = seeker
        self._now_ms = now_ms
        self._typed: str | None = None  # None: nothing is being typed

    def press(self, key: str) -> None:
        """One key; while a moment is typed, a character of it."""
        if self._typed is not None:
            self._type(key)
            return
        self.said = ""
        leaps = {"<": f"-{LEAP_S}", ">": f"+{LEAP_S}"}
        if key == "g":
            self._typed, self.said = "", "go to: "
        elif key in leaps:
            self._go(lambda now_ms: self._seeker.to(leaps[key], now_ms))
        elif key in ("[", "]"):
            self._go(lambda now_ms: self._seeker.step(1 if key == "]" else -1, now_ms))
        else:
            press(self._pace, key)

    def _type(self, key: str) -> None:
        assert self._typed is not None
        if key in _ENTER:
            text, self._typed, self.said = self._typed.strip(), None, ""
            if text:
                self._go(lambda now_ms: self._seeker.to(text, now_ms))
            return
        if key == _ESCAPE:
            self._typed, self.said = None, ""
            return
        self._typed = self._typed[:-1] if key in _ERASE else self._typed + key
        self.said = f"go to: {self._typed}"

    def _go(self, find: Callable[[int], int]) -> None:
        asked_ms = self._pace.go_to_ms  # not there yet: two leaps are twice as far
        try:
            self._pace.go_to_ms = find(self._now_ms() if asked_ms is None else asked_ms)
        except StreamsError as err:
            self.said = str(err)

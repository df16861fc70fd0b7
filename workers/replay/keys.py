"""The keyboard of a replay: pause, one record, one step, faster, slower, stop."""

from __future__ import annotations

import math

from workers.replay.player import Pace

HELP = "space pause  n next record  s next step  + faster  - slower  q stop"


def press(pace: Pace, key: str) -> None:
    """What a key does; any other does nothing."""
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

"""Demonstration kills: when they are due, and which worker a key press selects. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rlstreams.workers.config.operation import Kill


class KillPlan:
    """The kills of `[demo]`, each due once, when its share of the steps is reached.

    What lies before the step that a resumed run starts from is past.
    """

    def __init__(self, kills: Sequence[Kill], step: int, step_target: int) -> None:
        self._kills = sorted(
            (kill for kill in kills if not step or kill.at * step_target > step),
            key=lambda kill: kill.at,
        )

    def due(self, step: int, step_target: int) -> Kill | None:
        """The oldest kill that is due; it stays so until `done`."""
        if not self._kills or not step_target or step < self._kills[0].at * step_target:
            return None
        return self._kills[0]

    def done(self, kill: Kill) -> None:
        """It happened."""
        self._kills.remove(kill)


class KillMenu:
    """`k` asks, a digit answers, anything else changes its mind."""

    def __init__(self, workers: Sequence[str]) -> None:
        self._workers = workers[:9]
        self._is_open = False

    def press(self, key: str) -> tuple[str, str]:
        """What to say, and the worker to kill; either may be empty."""
        if not self._is_open:
            self._is_open = key == "k"
            choices = "  ".join(f"{i} {name}" for i, name in enumerate(self._workers, 1))
            return (f"kill which one?  {choices}", "") if self._is_open else ("", "")
        self._is_open = False
        if key.isdecimal() and 1 <= int(key) <= len(self._workers):
            return "", self._workers[int(key) - 1]
        return "nothing is killed", ""

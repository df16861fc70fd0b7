"""The loop's end: what ended a role is what its process says."""

from __future__ import annotations

import pytest

from rlstreams.streams.log.errors import DeadlineError, FencedError
from rlstreams.workers.loop.runtime import Exit, Stop, exit_status, explain, run


class Falling:
    """A role whose turn and whose `close` may fail."""

    done = False

    def __init__(self, turn: Exception | None = None) -> None:
        self._turn = turn

    def turn(self) -> None:
        if self._turn is not None:
            raise self._turn
        self.done = True

    def drain(self) -> None:
        """Nothing is begun."""

    def close(self) -> None:
        raise DeadlineError("the engine did not end within 40 s")


def test_what_goes_wrong_on_closing_does_not_hide_why_it_closed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Or a fenced worker would be restarted as one that failed, and its last line would mislead."""
    with pytest.raises(FencedError) as caught:
        run(Falling(FencedError("by a successor")), Stop())
    assert exit_status(caught.value) is Exit.FENCED
    explain(caught.value)
    assert capsys.readouterr().err.splitlines() == [
        "FencedError: by a successor",
        "then, while it closed: DeadlineError: the engine did not end within 40 s",
    ]


def test_a_clean_end_that_cannot_close_is_a_failure() -> None:
    """Nothing else went wrong, so that is what is told."""
    with pytest.raises(DeadlineError, match="40 s"):
        run(Falling(), Stop())

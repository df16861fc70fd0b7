"""The loop's end: what ended a role is what its process says."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from rlstreams.cli import worker
from rlstreams.streams.log.errors import DeadlineError, FencedError
from rlstreams.workers.loop.runtime import Exit, Stop, exit_status, explain, run
from rlstreams.workers.loop.stall import Watchdog
from tests.unit.roles.stand import Stand


class Falling:
    """A role whose tick and whose `close` may fail."""

    done = False

    def __init__(self, tick: Exception | None = None) -> None:
        self._tick = tick

    def tick(self) -> None:
        if self._tick is not None:
            raise self._tick
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


class Ended(Falling):
    """A role that closes well."""

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(("reason", "said"), [("", "done"), ("SIGTERM", "SIGTERM")])
def test_a_worker_says_why_it_ended(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    said: str,
) -> None:
    """In a terminal of its own nothing else tells a complete run from a drained worker."""
    monkeypatch.setattr(logging.getLogger("rlstreams"), "handlers", [])  # of an earlier stderr
    stop = Stop()
    if reason:
        stop.request(reason)
    worker._drive(Stand(tmp_path).context("prompts"), Ended(), stop, Watchdog(0.0))
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert ("ended", "prompts-0", said) == (found["event"], found["worker"], found["reason"])

"""Outputs that the broker refuses for ever: each becomes a dead letter, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rlstreams.schemas.events import DeadLetter
from rlstreams.streams.log.errors import BrokerError
from rlstreams.streams.log.topics import DEAD_LETTERS, TRAJECTORIES
from rlstreams.workers.loop.stage import Finished
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog
from tests.unit.workers.test_stage import (
    HeldStage,
    issue,
    make_log,
    make_loop,
    outputs,
    read,
    ticks,
)

LARGEST = 5000  # bytes


class LargeStage(HeldStage):
    """Answers to groups 1 and 2 are larger than their topic takes."""

    def finished(self) -> Sequence[Finished]:
        done = super().finished()
        for one in done:
            (output,) = one.outputs
            if output.key in {b"1", b"2"}:
                one.outputs = (replace(output, value=[bytes(LARGEST + 1)]),)
        return done


def begun(*names: str) -> tuple[MemoryLog, LargeStage]:
    log, stage = make_log(), LargeStage()
    log.configure(f"run.{TRAJECTORIES.name}", {"max.message.bytes": str(LARGEST)})
    issue(log, *names)
    return log, stage


def test_what_shares_their_transaction_is_committed_and_each_has_a_letter() -> None:
    log, stage = begun("0/0", "1/0", "2/0", "3/0")
    loop = make_loop(log, stage)
    ticks(loop)
    stage.released = ["0/0", "1/0", "2/0", "3/0"]
    ticks(loop, 12)
    assert ["0/0", "3/0"] == outputs(log)
    letters = read(MemoryBus(log, "run"), DEAD_LETTERS.name)
    told = f"{LARGEST + 1} bytes, max.message.bytes is {LARGEST}"
    assert [("1", "transaction", told), ("2", "transaction", told)] == [
        (e.group_id, e.reason, e.detail) for e in letters if isinstance(e, DeadLetter)
    ]
    again = LargeStage()
    ticks(make_loop(log, again))
    assert {} == again.begun


def test_a_letter_that_is_refused_too_ends_the_process() -> None:
    """It would be written again and again."""
    log, stage = begun("1/0")
    log.configure(f"run.{DEAD_LETTERS.name}", {"max.message.bytes": "1"})
    loop = make_loop(log, stage)
    ticks(loop)
    stage.released = ["1/0"]
    with pytest.raises(BrokerError, match=r"not even a dead letter for .*prompts.* can be written"):
        ticks(loop, 12)

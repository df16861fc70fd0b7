"""A trainer that slept before its loop, while a successor claimed the run, ends as fenced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import BrokerError, FencedError, OffsetGoneError
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import POLICY_VERSIONS, SCORED, STEPS
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.runtime import Exit, exit_status
from tests.heavy.trainer.trainer_stand import (
    finish,
    make_config,
    make_log,
    make_trainer,
    read,
    scored,
    send,
)
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog


class Asleep(MemoryBus):
    """Its process stands still in a question about a topic, until `meanwhile` is over.

    Args:
        question: `beginnings` or `ends`.
    """

    def __init__(
        self, log: MemoryLog, question: str, topic: str, meanwhile: Callable[[], None]
    ) -> None:
        super().__init__(log, "demo")
        self._question, self._topic = question, topic
        self._meanwhile: Callable[[], None] | None = meanwhile

    def _sleep(self, question: str, topic: str) -> None:
        if (question, topic) == (self._question, self._topic) and self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            meanwhile()

    def beginnings(self, topic: str) -> Mapping[Partition, int]:
        self._sleep("beginnings", topic)
        return super().beginnings(topic)

    def ends(self, topic: str) -> Mapping[Partition, int]:
        self._sleep("ends", topic)
        return super().ends(topic)


def ledger(log: MemoryLog) -> object:
    return read(log, STEPS.name), read(log, POLICY_VERSIONS.name)


def fenced(log: MemoryLog, config: RunConfig, bus: Asleep) -> FencedError:
    with pytest.raises(FencedError) as told:
        make_trainer(log, config, "one", takeover=True, bus=bus)
    assert Exit.FENCED == exit_status(told.value)
    return told.value


@pytest.mark.parametrize(
    "met",
    [
        OffsetGoneError("scored-trajectories[0]@0 is gone"),
        TimeoutError("no answer"),
        BrokerError("looking up demo.scored-trajectories: _TIMED_OUT"),
        OSError(28, "No space left on device"),
    ],
    ids=lambda met: type(met).__name__,
)
def test_whatever_it_meets_behind_its_claim_it_was_fenced(tmp_path: Path, met: Exception) -> None:
    """Records have expired, a question's time is over; without a successor, that is the reason."""
    log, config = make_log(), make_config(tmp_path, trainer__steps=1)
    send(log, *(scored(0, sample, 0) for sample in range(2)))

    def alone() -> None:
        raise met

    with pytest.raises(type(met)) as told:
        make_trainer(log, config, takeover=True, bus=Asleep(log, "ends", SCORED.name, alone))
    assert told.value is met
    assert not getattr(met, "__notes__", [])
    before: list[object] = []

    def succeeded() -> None:
        finish(log, config)
        before.append(ledger(log))
        raise met

    error = fenced(log, config, Asleep(log, "ends", SCORED.name, succeeded))
    assert error.__cause__ is met
    assert before == [ledger(log)]


def test_a_log_that_its_successor_began(tmp_path: Path) -> None:
    """Behind its fence and before its claim: no ledger, and versions that only follow one."""
    log, config = make_log(), make_config(tmp_path, trainer__steps=1)
    send(log, *(scored(0, sample, 0) for sample in range(2)))
    bus = Asleep(log, "ends", POLICY_VERSIONS.name, lambda: finish(log, config))
    error = fenced(log, config, bus)
    assert "epoch 1 (instance two" in str(error)
    assert "holds no claim" in str(error.__cause__)

"""Steps done again from the log: what is told, what stops, and what goes on under a new number."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rlstreams.debug.rerun.rebuilt import steps_again
from rlstreams.schemas.events import PolicyPublished, RedoDrifted, StepsRedone
from rlstreams.streams.ledger import StepFact
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import POLICY_VERSIONS, SCORED, STEPS
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.runtime import Exit, exit_status
from rlstreams.workers.trainer.claim import read_ledger
from rlstreams.workers.trainer.intake.fetch import RecordGoneError
from rlstreams.workers.trainer.redo.redo import (
    RedoError,
    StepRecords,
    differences,
    records_of,
    redo_steps,
)
from rlstreams.workers.trainer.redo.retention import RetentionError
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.trainer.worker import TrainerWorker
from tests.heavy.trainer.trainer_stand import (
    OtherHardware,
    bury,
    make_config,
    make_log,
    make_trainer,
    read,
    run_steps,
    scored,
    send,
    steps,
    tick_until,
    train,
)
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog


def killed_after(num: int, log: MemoryLog, config: RunConfig) -> None:
    """A trainer that makes steps up to `num`, without a checkpoint."""
    trainer = make_trainer(log, config, takeover=True)
    train(log, trainer, num)
    bury(trainer)


def successor(log: MemoryLog, config: RunConfig, **changes: object) -> TrainerWorker:
    trainer = make_trainer(log, config, "two", takeover=True, **changes)  # type: ignore[arg-type]
    tick_until(trainer, lambda: trainer._reporter.policy_version >= len(steps(log)))
    return trainer


def told(log: MemoryLog, kind: type) -> list:  # type: ignore[type-arg]
    return [event for event in read(log, STEPS.name) if isinstance(event, kind)]


def test_exact_names_the_first_unequal_step_and_what_changed(tmp_path: Path) -> None:
    """It stops with both hashes and the difference, and another start would not help."""
    log, config = make_log(), make_config(tmp_path, trainer__redo="exact")
    killed_after(2, log, config)
    trainer = make_trainer(log, config, "two", takeover=True, hardware=OtherHardware)
    with pytest.raises(RedoError) as stop:
        tick_until(trainer, lambda: False)
    trainer.close()
    recorded = steps(log)[0].weight_hash
    assert f"redo of step 1 gave weights {trainer._training.weight_hash}" in str(stop.value)
    assert f"the ledger says {recorded}: since then cpu_capability was" in str(stop.value)
    assert "and is abacus" in str(stop.value)
    assert Exit.CONFIG == exit_status(stop.value)
    (event,) = told(log, StepsRedone)
    assert (1, 1, 0) == (event.first_step, event.last_step, event.num_equal)


def test_tolerate_goes_on_under_a_new_number(tmp_path: Path) -> None:
    """The drift is recorded once, and its weights are what every later start finds again."""
    log, config = make_log(), make_config(tmp_path, trainer__redo="tolerate")
    killed_after(2, log, config)
    second = successor(log, config, hardware=OtherHardware)
    send(log, *(scored(2, sample, 3) for sample in range(2)))
    run_steps(log, second, 3)
    bury(second)
    (drift,) = told(log, RedoDrifted)
    first, last = steps(log)[1:]
    assert (2, 3, first.weight_hash) == (drift.step, drift.policy_version, drift.expected_hash)
    assert (4, drift.actual_hash) == (last.policy_version, last.previous_hash)
    successor(log, config, hardware=OtherHardware).close()
    assert [drift] == told(log, RedoDrifted)
    redone = told(log, StepsRedone)
    assert [(1, 2, 0), (3, 3, 1)] == [(e.first_step, e.last_step, e.num_equal) for e in redone]
    assert [(2, "two"), (3, "two")] == [(e.epoch, e.instance) for e in redone]
    assert all(event.seconds > 0 for event in redone)
    published = [e for e in read(log, POLICY_VERSIONS.name) if isinstance(e, PolicyPublished)]
    hashes = {(e.policy_version, e.weight_hash) for e in published}
    assert len({version for version, _ in hashes}) == len(hashes)


def test_a_drift_that_was_not_followed_by_a_step_is_found_again(tmp_path: Path) -> None:
    """Even without its checkpoint: the same hardware comes to the same weights, so none is new."""
    log, config = make_log(), make_config(tmp_path, trainer__redo="tolerate")
    killed_after(2, log, config)
    bury(successor(log, config, hardware=OtherHardware))
    for file in (tmp_path / "checkpoints").rglob("*.safetensors"):
        file.unlink()
    exact = make_config(tmp_path, trainer__redo="exact")
    successor(log, exact, hardware=OtherHardware).close()
    assert 1 == len(told(log, RedoDrifted))
    # One of the two: the step before the drift was made by the hardware before it.
    assert (1, 2, 1) == (
        (event := told(log, StepsRedone)[-1]).first_step,
        event.last_step,
        event.num_equal,
    )


def test_a_run_is_computed_again_without_a_claim(tmp_path: Path) -> None:
    """The recorded hashes come out, from version 0 and from a checkpoint, and no event."""
    log, config = make_log(), make_config(tmp_path, trainer__checkpoint_every=2)
    trainer = make_trainer(log, config)
    train(log, trainer, 3)
    tick_until(trainer, lambda: trainer.done)
    trainer.close()
    bus, before = MemoryBus(log, "demo"), read(log, STEPS.name)
    recorded = [step.weight_hash for step in steps(log)]
    again = list(steps_again(bus, config))
    assert recorded == [step.again.weight_hash for step, _ in again]
    assert [(True, [])] * 3 == [(step.is_equal, differences) for step, differences in again]
    ((last, _),) = steps_again(bus, config, first=3, checkpoints=[tmp_path / "checkpoints"])
    assert (3, recorded[2]) == (last.fact.step, last.again.weight_hash)
    ((second, _),) = steps_again(bus, config, first=2, last=2)  # the first on the way
    assert (2, recorded[1]) == (second.fact.step, second.again.weight_hash)
    log.trim(Partition(f"demo.{SCORED.name}", 0), 4)  # of two steps
    with pytest.raises(RetentionError, match=r"step 1 .*\[0\]@0, the first record kept is 4"):
        next(steps_again(bus, config))
    assert before == read(log, STEPS.name)


@pytest.mark.parametrize("goes_on", [True, False])
def test_the_next_step_is_read_while_one_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """Records that cannot be read are an error once their step is due, and none if it never is."""
    log, config = make_log(), make_config(tmp_path)
    killed_after(2, log, config)
    bus, begun, were_read = MemoryBus(log, "demo"), list[Future[Any]](), list[int]()

    def reads(bus: Bus, fact: StepFact, while_waiting: Callable[[int], None]) -> StepRecords:
        were_read.append(fact.step)
        if fact.step == 2:
            raise RecordGoneError("no step 2")
        return records_of(bus, fact, while_waiting)

    def begins(*_: object) -> Future[Any]:
        begun.append(Future())
        return begun[-1]

    trained = next(steps_again(bus, config, last=1))[0].again
    monkeypatch.setattr("rlstreams.workers.trainer.redo.redo.records_of", reads)
    training = Training(Path(config.model.path), config.trainer, threads=1)
    again = redo_steps(
        *(bus, read_ledger(bus, "test"), training, 1, 2),
        compute=begins,
        on_step=lambda _: goes_on,
    )
    assert begun == [next(again)]
    assert not begun[0].done()
    assert [1, 2] == were_read
    assert again.send(trained) is None  # step 1 is done
    with pytest.raises(RecordGoneError if goes_on else StopIteration):
        next(again)
    assert [1, 2] == were_read


def test_differences_are_named() -> None:
    before = {"torch": "2.1", "threads": "1", "machine": "x86_64"}
    now = {"torch": "2.2", "threads": "1", "python": "3"}
    assert differences(before, before) == ""
    assert differences(before, now) == (
        "machine was x86_64 and is not recorded; python was not recorded and is 3; "
        "torch was 2.1 and is 2.2"
    )

"""A trainer with a weight store: every version is in it and in the log, also across restarts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlstreams.schemas.events import PolicyStored
from rlstreams.streams.log.topics import POLICY_VERSIONS
from rlstreams.workers.weights.layout import weight_hash
from rlstreams.workers.weights.store import writer as module
from rlstreams.workers.weights.store.at_hand import AtHand
from tests.heavy.trainer.trainer_stand import (
    bury,
    make_config,
    make_log,
    make_trainer,
    read,
    run_steps,
    scored,
    send,
    tick_until,
)
from tests.memory.log import MemoryLog


def stored(log: MemoryLog) -> list[PolicyStored]:
    return [one for one in read(log, POLICY_VERSIONS.name) if isinstance(one, PolicyStored)]


def test_every_version_can_be_had_when_the_run_is_over(tmp_path: Path) -> None:
    """Killed behind step 2, and ended behind step 3: of each version the ledger's hash."""
    store = tmp_path / "elsewhere"
    config = make_config(tmp_path / "run", store__url=store, store__anchor_every=2)
    log = make_log()
    first = make_trainer(log, config)
    for step in (1, 2):
        tick_until(first, lambda n=step: len(stored(log)) == n)
        send(log, scored(step, 0, step - 1), scored(step, 1, step - 1))
        run_steps(log, first, step)
    tick_until(first, lambda: len(stored(log)) == 3)
    bury(first)
    second = make_trainer(log, config, "two", takeover=True)
    send(log, scored(3, 0, 2), scored(3, 1, 2))
    tick_until(second, lambda: second.done)
    ledger = second._ledger
    second.close()
    told = [(one.policy_version, len(one.files), one.missing) for one in stored(log)]
    assert told == [(0, 1, ()), (1, 1, ()), (2, 2, ()), (2, 0, ()), (3, 1, ())]
    assert all(one.weight_hash == ledger.hashes[one.policy_version] for one in stored(log))
    shutil.rmtree(tmp_path / "run" / "weights")
    at_hand = AtHand("demo", ledger.hashes, [store])
    assert at_hand.versions == {0, 1, 2, 3}
    found = {version: weight_hash(at_hand.weights_at(version)) for version in (3, 1, 0, 2)}
    assert found == {version: ledger.hashes[version] for version in found}


def test_a_store_that_cannot_be_written_stops_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's own report says that the store is behind, and why; the steps are made."""
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    (tmp_path / "store").write_text("no folder")
    config = make_config(
        tmp_path / "run", store__url=tmp_path / "store", trainer__steps=1,
        weights__pull_deadline_s=0.1,
    )  # fmt: skip
    log = make_log()
    trainer = make_trainer(log, config)
    tick_until(
        trainer, lambda: "the store is behind: policy version 0: " in trainer._writer._trouble
    )
    assert str(tmp_path / "store") in trainer._reporter._state[1]
    send(log, scored(1, 0, 0), scored(1, 1, 0))
    tick_until(trainer, lambda: trainer.done)
    assert trainer._step == 1
    trainer.close()
    assert stored(log) == []

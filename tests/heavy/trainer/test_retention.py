"""What redo needs is in the log, or the trainer does not start; and it saves before it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstreams.schemas.events import GroupsDropped, PartitionPosition
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Partition, Position, RawRecord
from rlstreams.streams.log.topics import PROMPTS, SCORED, STEPS
from rlstreams.workers.loop.runtime import Exit, exit_status
from rlstreams.workers.trainer.redo.retention import (
    RedoSpan,
    RetentionError,
    check_open,
)
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore
from tests import factories
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
    train,
)

P0 = Partition(SCORED.name, 0)


def raw(offset: int, size: int, *, partition: int = 0, timestamp_ms: int = 0) -> RawRecord:
    return RawRecord(
        position=Position(SCORED.name, partition, offset),
        offsets=(offset,),
        key=b"",
        value=bytes(size),
        timestamp_ms=timestamp_ms,
    )


@pytest.mark.parametrize(
    ("settings", "end", "now_ms", "expected"),
    [
        ({}, 10**9, 10**12, ""),
        ({"retention.ms": "-1", "retention.bytes": "-1"}, 10**9, 10**12, ""),
        ({"retention.ms": "100000"}, 20, 50_999, ""),
        ({"retention.ms": "100000"}, 20, 51_000, r"scored-trajectories[0]@10 is 50 s old of 100 s"),
        ({"retention.bytes": "1000"}, 14, 0, ""),
        (
            {"retention.bytes": "1000"}, 15, 0,
            "about 500 bytes lie above scored-trajectories[0]@10 of 1000",
        ),
    ],
)  # fmt: skip
def test_half_of_the_retention_is_the_bound(
    settings: dict[str, str], end: int, now_ms: int, expected: str
) -> None:
    """By age and by bytes, of the oldest record and a mean size, until a checkpoint is written."""
    span = RedoSpan(settings)
    span.add([raw(12, 150, timestamp_ms=10**12), raw(10, 50, timestamp_ms=1000)])
    assert expected == span.why_save({P0: end}, now_ms)
    span.clear()
    assert "" == span.why_save({P0: end}, now_ms)
    span.add([raw(end + 1, 100, timestamp_ms=now_ms)])
    assert "" == span.why_save({P0: end + 1}, now_ms)


@given(
    st.dictionaries(st.sampled_from([0, 1]), st.integers(0, 100), min_size=1),
    st.integers(0, 1000),
    st.integers(1, 500),
)
def test_it_never_comes_late(ages_s: dict[int, int], now_s: int, retention_s: int) -> None:
    """No reason means that every record has more than half of its time left."""
    span = RedoSpan({"retention.ms": str(retention_s * 1000)})
    for partition, age_s in ages_s.items():
        span.add([raw(0, 1, partition=partition, timestamp_ms=(now_s - age_s) * 1000)])
    reason = span.why_save({}, now_s * 1000)
    assert bool(reason) == (2 * max(ages_s.values()) >= retention_s)


def test_samples_that_wait_for_a_step_must_be_there() -> None:
    """They are in flight by the ledger; without their records they are lost."""
    recorded = [PartitionPosition(topic=SCORED.name, partition=0, offset=5)]
    check_open(recorded, {P0: 5}, 3)
    expected = r"after step 3 all from scored-trajectories\[0\]@5 on .* first record kept is 6"
    with pytest.raises(RetentionError, match=expected):
        check_open(recorded, {P0: 6}, 3)


def test_a_trainer_refuses_to_redo_from_a_log_that_lost_its_beginning(tmp_path: Path) -> None:
    """It says which step, and the supervisor does not start it again."""
    log, config = make_log(), make_config(tmp_path)
    first = make_trainer(log, config)
    train(log, first, 1)
    bury(first)
    log.trim(Partition(f"demo.{SCORED.name}", 0), 1)
    second = make_trainer(log, config, "two", takeover=True)
    expected = (
        r"step 1 .* needs scored-trajectories\[0\]@0, the first record kept is 1; .*version 0"
    )
    with pytest.raises(RetentionError, match=expected) as stop:
        tick_until(second, lambda: False)
    assert Exit.CONFIG == exit_status(stop.value)
    second.close()


def test_a_checkpoint_comes_early_when_records_grow_old(tmp_path: Path) -> None:
    """Long before `checkpoint_every`, and while nothing is there to train on."""
    log, config = make_log(), make_config(tmp_path, trainer__checkpoint_every=100)
    log.configure(f"demo.{SCORED.name}", {"retention.ms": "200"})
    trainer = make_trainer(log, config)
    send(log, *(scored(0, sample, 0) for sample in range(2)))
    tick_until(trainer, lambda: trainer._recovery.saved_step == 1)
    trainer.close()
    log.trim(Partition(f"demo.{SCORED.name}", 0), 2)
    found = CheckpointStore(tmp_path / "checkpoints").newest(lambda _: "")
    assert (1, ()) == (found.manifest.step, found.passed_over)
    second = make_trainer(log, config, "two", takeover=True)
    tick_until(second, lambda: second._reporter.policy_version == 1)
    second.close()


def test_a_run_goes_on_without_the_groups_that_expired(tmp_path: Path) -> None:
    """A pause longer than retention: refused with the way out, then each open group is closed."""
    log, config = make_log(), make_config(tmp_path)
    prompts = [factories.prompt(group_id=str(n), row=n, replacement=0) for n in range(3)]
    send(log, *(outgoing(PROMPTS, prompt) for prompt in prompts))
    first = make_trainer(log, config)
    send(log, *(scored(0, sample, 0) for sample in range(2)), scored(1, 0, 0))
    run_steps(log, first, 1)
    first.drain()
    tick_until(first, lambda: first.done)
    first.close()
    log.trim(Partition(f"demo.{SCORED.name}", 0), 3)
    with pytest.raises(RetentionError, match=r"--trainer\.on_expired=drop"):
        make_trainer(log, config, "two", takeover=True)

    dropping = make_config(tmp_path, trainer__on_expired="drop")
    third = make_trainer(log, dropping, "three", takeover=True)
    (dropped,) = [event for event in read(log, STEPS.name) if isinstance(event, GroupsDropped)]
    assert [("1", "expired", 1), ("2", "expired", 2)] == [
        (group.group_id, group.reason, group.row) for group in dropped.groups
    ]
    assert (3, ()) == (dropped.closed.watermark, dropped.closed.above)
    bury(third)

    fourth = make_trainer(log, config, "four", takeover=True)  # what was told is not refused again
    send(log, scored(1, 1, 0), *(scored(3, sample, 1) for sample in range(2)))
    run_steps(log, fourth, 2)
    fourth.close()

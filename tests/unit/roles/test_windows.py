"""Windows of the log-prob role: told in each score, and prescribed in a replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.schemas.events import ScoredTrajectory
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Outgoing, Position, RawRecord, Record
from rlstreams.streams.log.topics import SCORED, TRAJECTORIES
from rlstreams.workers.logprob import windows as module
from rlstreams.workers.logprob.windows import Waiting, header_of, next_window, prescribed
from rlstreams.workers.logprob.worker import make_worker
from rlstreams.workers.weights.file import FileWeightChannel
from tests import factories
from tests.fake_engine import FakeScorer
from tests.unit.roles.stand import Stand, turn_until


def sample(number: int, version: int = 1) -> Outgoing:
    segment = factories.policy_segment(3, version, token_ids=factories.int32s(3))
    segments = (factories.prompt_segment(), segment)
    return outgoing(
        TRAJECTORIES, factories.trajectory(sample=number, group_size=16, segments=segments)
    )


def in_window(record: Outgoing, name: str, place: int, size: int, partition: int) -> Outgoing:
    headers = {**record.headers, **header_of(name, place, size)}
    return replace(record, headers=headers, partition=partition)


def test_prescribed_windows_are_scored_together_in_their_order(tmp_path: Path) -> None:
    """Also when their records come late, mixed and through other partitions."""
    stand = Stand(tmp_path, logprob__window_s=0.001)
    stand.publish(1)
    role = make_worker(stand.context("logprob"), stand.bus(), FakeScorer(), FileWeightChannel())
    first = [in_window(sample(n), "w", place, 3, n % 2) for n, place in ((4, 2), (5, 0))]
    stand.send(*first, in_window(sample(7), "v", 1, 2, 0))
    for _ in range(50):
        role.turn()
    assert [] == stand.read(SCORED.name, ScoredTrajectory)

    stand.send(in_window(sample(6), "w", 1, 3, 1), in_window(sample(8), "v", 0, 2, 1))
    turn_until(role, lambda: len(stand.read(SCORED.name, ScoredTrajectory)) == 5)
    role.close()

    told = stand.read(SCORED.name, ScoredTrajectory)
    found = {(e.window, e.window_place, e.window_size): e.trajectory.sample for e in told}
    windows = sorted({window for window, _, _ in found})
    assert [[5, 6, 4], [8, 7]] == [
        [number for (window, _, _), number in sorted(found.items()) if window == wanted]
        for wanted in windows
    ]


def test_a_window_that_never_gets_whole_holds_nobody_up_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign header, or a sibling that was set aside; then all are scored as they are."""
    monkeypatch.setattr(module, "ANNOUNCEMENT_DEADLINE_S", 3600.0)
    stand = Stand(tmp_path, logprob__window_s=0.001)
    stand.publish(1)
    role = make_worker(stand.context("logprob"), stand.bus(), FakeScorer(), FileWeightChannel())
    others = [replace(sample(number), partition=0) for number in (5, 6)]
    stand.send(in_window(sample(4), "w", 0, 3, 0), *others)
    for _ in range(50):
        role.turn()
    assert [] == stand.read(SCORED.name, ScoredTrajectory)
    monkeypatch.setattr(module, "ANNOUNCEMENT_DEADLINE_S", 0.0)
    turn_until(role, lambda: len(stand.read(SCORED.name, ScoredTrajectory)) == 3)
    role.close()


@pytest.mark.parametrize(
    "text", [b"", b"w", b"w/1", b"w/3/3", b"w/-1/3", b"\xff/0/1/2", b"w/0/" + b"9" * 5000]
)
def test_other_headers_prescribe_nothing(text: bytes) -> None:
    """A foreign writer's header holds nobody up."""
    raw = RawRecord(
        position=Position("trajectories", 0, 0),
        offsets=(0,),
        key=b"",
        value=b"",
        headers={"rlstreams-window": text},
    )
    assert prescribed(raw) is None
    record = Record(event=factories.trajectory(), raw=raw)
    assert next_window([Waiting.of(record)]) is None

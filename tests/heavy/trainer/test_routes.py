"""Recorded routes on their way into a step: which rows are there, what a batch tells of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlstreams.schemas.events import ScoredTrajectory, Tensor
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.load import load
from rlstreams.workers.model.routes import RouterShape, check_routes, padded_routes
from rlstreams.workers.trainer.learn.loss_totals import LossSums
from rlstreams.workers.trainer.learn.packing import MicroBatch
from tests.unit.trainer.trainer_builders import (
    packed_within,
    policy_segment,
    prompt_segment,
    score,
    scored,
)

SHAPE = RouterShape(num_layers=1, top_k=2, num_experts=8)


def rows(*firsts: int, dtype: type = np.uint8) -> np.ndarray:
    return np.array([[[first, first + 1]] for first in firsts], dtype)


def sample(number: int, num_sampled: int, **experts: Tensor) -> ScoredTrajectory:
    """Two tokens of the prompt, and some that were sampled."""
    found = scored(
        (prompt_segment(), policy_segment([3] * num_sampled, [-1.0] * num_sampled)),
        (score(1, [-1.0] * num_sampled),),
        sample=number,
    )
    return replace(found, trajectory=replace(found.trajectory, **experts))


def packed(*samples: ScoredTrajectory, replay_routes: bool = True) -> MicroBatch:
    advantages = np.ones(len(samples), np.float32)
    (only,) = packed_within(
        samples,
        advantages,
        [],
        policy_version=0,
        token_budget=4096,
        replay_routes=replay_routes,
    ).micro_batches
    return only


def test_a_micro_batch_has_the_rows_of_its_tokens() -> None:
    """Row by row from the first token; padding, last tokens and what nobody recorded have none."""
    mask = Tensor.of(np.array([1, 0], np.uint8))
    batch = packed(
        sample(0, 2, routed_experts=Tensor.of(rows(1, 2, 3), "zstd")),
        sample(2, 2),
        sample(1, 1, routed_experts=Tensor.of(rows(4, 5)), routed_experts_mask=mask),
    )
    assert batch.is_routed_BT is not None
    assert batch.routed_experts_BTLK.shape == (3, 4, 1, 2)
    first_BT = np.where(batch.is_routed_BT, batch.routed_experts_BTLK[:, :, 0, 0].astype(int), -1)
    assert first_BT.tolist() == [[1, 2, 3, -1], [-1, -1, -1, -1], [4, -1, -1, -1]]


def test_wide_rows_become_integers_that_torch_indexes_with() -> None:
    """Beside narrow ones too, as samples of two engines may be."""
    padded = padded_routes([(rows(300, dtype=np.uint16), None), (rows(7), None)], 2)
    assert padded[0].dtype == np.int16
    assert padded[0][:, 0, 0].tolist() == [[300, 301], [7, 8]]


def test_what_is_not_recorded_is_not_looked_at() -> None:
    """A row that no mask vouches for may hold anything."""
    check_routes(rows(1, 200), np.array([1, 0], np.uint8), SHAPE)


def test_flips_and_records_are_shares_of_rows() -> None:
    """Over all micro-batches; absent where nothing is replayed."""
    totals = LossSums()
    assert not {"routing_flips", "routing_recorded"} & totals.totals().means().keys()
    totals.add_routes(num_layers=2, recorded=10, forwarded=10, flips=3)
    totals.add_routes(num_layers=2, recorded=5, forwarded=10, flips=0)
    means = totals.totals().means()
    assert (means["routing_flips"], means["routing_recorded"]) == (3 / 30, 15 / 20)


def test_routes_that_nobody_records_cannot_be_replayed() -> None:
    """Refused where it is read, with both fields."""
    words = ["trainer.routing_replay=true", "rollout.capture_experts=false"]
    with pytest.raises(ConfigError, match=r"routing_replay is true, but rollout\.capture_experts"):
        load([], words)

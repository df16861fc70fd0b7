"""Micro-batches dealt to ranks, and what a claim says of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from rlstreams.workers.compute.deal import deal
from rlstreams.workers.model.documents import Documents
from rlstreams.workers.trainer.learn.cutting import prefixes_of
from rlstreams.workers.trainer.learn.loss_totals import LossTotals, added
from rlstreams.workers.trainer.learn.packing import Batch
from tests.unit.trainer.trainer_builders import packed_within, random_samples


def batch_of(num: int, token_budget: int = 14) -> Batch:
    samples = random_samples(num, seed=3)
    return packed_within(
        samples, np.zeros(num, np.float32), [], policy_version=0, token_budget=token_budget
    )


def test_each_micro_batch_is_dealt_once_and_every_rank_passes_as_often() -> None:
    """A rank with nothing left passes an empty one, and the widest of its round is blamed."""
    batch = batch_of(11)
    hands = deal(batch, 3)
    assert {len(hand) for hand in hands} == {-(-len(batch.micro_batches) // 3)}
    given = sorted(t.index for hand in hands for t in hand if not t.is_empty)
    assert given == list(range(len(batch.micro_batches)))
    for of_round in zip(*hands, strict=True):
        sizes = [t.micro_batch.token_ids_BT.size for t in of_round if not t.is_empty]
        assert sizes == sorted(sizes, reverse=True)
        assert all(t.index == of_round[0].index for t in of_round if t.is_empty)


@pytest.mark.parametrize("shares", [False, True])
def test_an_empty_micro_batch_is_a_bin_as_the_others_are(shares: bool) -> None:
    """As wide, and with tables of shared tokens if they have some: no layer is compiled for it in
    the middle of a step."""
    samples = random_samples(3, seed=3)
    prefixes = prefixes_of(samples, replay_routes=False) if shares else None
    batch = packed_within(
        samples, np.zeros(3, np.float32), [],
        policy_version=0, token_budget=256, in_bins=True, prefixes=prefixes,
    )  # fmt: skip
    (one,), (other,) = deal(batch, 2)
    assert (one.is_empty, other.is_empty) == (False, True)
    assert one.micro_batch.bin_tokens == other.micro_batch.bin_tokens == 128
    for part in (one.micro_batch, other.micro_batch):
        row = Documents.of(part.real_BT.sum(1).tolist(), part.bin_tokens, part.taken)
        assert (row.shared is not None) == shares


def test_totals_add_up_but_for_maxima() -> None:
    one, other = LossTotals(tokens=3, loss=1.5, ratio_max=2.0), LossTotals(tokens=4, ratio_max=3.0)
    assert added([one, other]) == LossTotals(tokens=7, loss=1.5, ratio_max=3.0)

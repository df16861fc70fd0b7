"""GAE and the loss of values against their second implementation, and their laws."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.schemas.events import MaskedSegment
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.trainer.learn.batch_factors import Look, flat
from rlstreams.workers.trainer.learn.critic import gae, value_figures, value_losses, with_gae
from rlstreams.workers.trainer.learn.packing import Batch
from tests.reference import losses as reference
from tests.unit.trainer.trainer_builders import batch_of, random_samples

NUMBERS = st.floats(-3, 3)


@st.composite
def sections(draw: st.DrawFn) -> LossSection:
    """Any setting of the critic."""
    return LossSection(
        advantage="gae",
        gae_gamma=draw(st.sampled_from([0.5, 0.99, 1.0])),
        gae_lambda=draw(st.sampled_from([0.0, 0.9, 1.0])),
        value_clip=draw(st.sampled_from([0.0, 0.2, 1.0])),
    )


@settings(max_examples=100, deadline=None)
@given(sections(), st.lists(NUMBERS, min_size=1, max_size=9), NUMBERS)
def test_gae_equals_the_second_implementation(
    by: LossSection, values: list[float], reward: float
) -> None:
    """A recursion here, the paper's sum there."""
    found = gae(np.array(values), reward, by)
    np.testing.assert_allclose(
        found, reference.gae(values, reward, asdict(by)), rtol=1e-12, atol=1e-12
    )


@settings(max_examples=100, deadline=None)
@given(sections(), st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=9))
def test_value_losses_equal_the_second_implementation(
    by: LossSection, tokens: list[tuple[float, float, float]]
) -> None:
    """Values and slopes; where the clipped value's loss is the larger one there is no slope."""
    values, old, targets = torch.tensor(tokens, dtype=torch.float64).T
    values = values.clone().requires_grad_()
    losses, is_clipped = value_losses(values, old, targets, by)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    expected = [reference.value(*token, asdict(by)) for token in tokens]
    np.testing.assert_allclose(losses.detach(), [t.value for t in expected], rtol=1e-12, atol=1e-12)
    apart = [abs(abs(v - o) - by.value_clip) > 1e-9 and abs(v - r) > 1e-9 for v, o, r in tokens]
    slopes = np.array([t.slope for t in expected])
    np.testing.assert_allclose(values.grad[apart], slopes[apart], rtol=1e-12, atol=1e-12)
    assert by.value_clip or not is_clipped.any()


def looked(samples: Any, by: LossSection, **options: Any) -> Batch:
    """A batch whose values are a function of the token and its row."""
    batch = batch_of(samples, by=by, policy_version=3, **options)
    looks = [
        Look(
            np.zeros(part.num_loss_tokens, np.float32),
            np.zeros(part.num_loss_tokens, np.float32),
            np.sin(part.token_ids_BT[part.loss_mask_BT]).astype(np.float32),
        )
        for part in batch.micro_batches
    ]
    return with_gae(batch, looks, by)


def test_rewards_come_at_a_sample_s_last_token() -> None:
    """With gamma and lambda 1 the return of every token is the reward, whatever values are."""
    by = LossSection(advantage="gae", normalize_std=False)
    batch = looked(random_samples(8), by)
    for part in batch.micro_batches:
        assert part.returns_BT is not None
        assert part.advantages_BT is not None
        assert part.values_BT is not None
        for row, reward in enumerate(part.advantages_B):
            mask = part.loss_mask_BT[row]
            np.testing.assert_allclose(part.returns_BT[row][mask], reward, atol=1e-6)
            np.testing.assert_allclose(
                part.advantages_BT[row][mask], reward - part.values_BT[row][mask], atol=1e-6
            )
            assert not part.advantages_BT[row][~mask].any()


def test_it_is_the_same_wherever_the_batch_is_cut() -> None:
    """Scaled over all tokens of the batch: mean 0, deviation 1."""
    by = LossSection(advantage="gae", gae_lambda=0.9)
    whole = looked(random_samples(12), by, token_budget=10_000)
    parts = looked(random_samples(12), by, token_budget=20)
    assert len(parts.micro_batches) > len(whole.micro_batches)
    one, other = (np.sort(flat(b, "advantages_BT")) for b in (whole, parts))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert one.mean() == pytest.approx(0, abs=1e-5)
    assert one.std(ddof=1) == pytest.approx(1, abs=1e-4)
    assert value_figures(whole)["explained_variance"] == pytest.approx(
        value_figures(parts)["explained_variance"], rel=1e-5
    )


def test_a_masked_segment_is_passed_over() -> None:
    """It has no value; a sample that is masked whole has no token, and no reward."""
    by, samples = LossSection(advantage="gae", normalize_std=False), random_samples(4)
    first = samples[0].trajectory
    masked = [
        MaskedSegment(group_id=first.group_id, sample=first.sample, segment=s.segment, staleness=9)
        for s in samples[0].scores
    ]
    batch = looked(samples, by, masked=masked)
    others = looked([replace(s) for s in samples[1:]], by)
    assert sorted(flat(batch, "returns_BT")) == pytest.approx(sorted(flat(others, "returns_BT")))


def test_equal_returns_have_no_variance_to_explain() -> None:
    """No number, rather than a division by 0."""
    assert value_figures(batch_of(random_samples(2), by=LossSection(), policy_version=3)) == {}

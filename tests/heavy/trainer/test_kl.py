"""The KL term: against its formulas, and what it needs of a record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from rlstreams.schemas.events import ScoredTrajectory
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import OptimizerSection
from rlstreams.workers.trainer.intake.validation import check_reference
from rlstreams.workers.trainer.learn.optimizer import Learner, StepResult
from rlstreams.workers.trainer.learn.packing import pack
from tests.unit.trainer.trainer_builders import (
    TinyModel,
    batch_of,
    floats,
    policy_segment,
    prompt_segment,
    random_samples,
    score,
    scored,
)

BY = LossSection(kl_coef=0.1)


def compared(samples: list[ScoredTrajectory], below: float = 0.3) -> list[ScoredTrajectory]:
    """The same samples, with log-probs of a reference that finds each token less likely."""
    return [
        replace(
            sample,
            scores=tuple(
                replace(s, reference_logprobs=floats(s.proximal_logprobs.numpy() - below))
                for s in sample.scores
            ),
        )
        for sample in samples
    ]


def step(
    samples: list[ScoredTrajectory], **loss: Any
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    learner = Learner(TinyModel(), OptimizerSection(lr=1e-2), LossSection(**loss))
    batch = batch_of(samples, token_budget=20)
    assert len(batch.micro_batches) > 1
    result = learner.step(batch)
    return result, {name: tensor.clone() for name, tensor in learner.weights().items()}


def test_without_it_nothing_changes() -> None:
    """Not a bit, whether or not the records have log-probs of a reference."""
    samples = random_samples(8)
    plain, weights = step(samples)
    other, others = step(compared(samples))
    assert plain == other
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert "kl_reference" not in plain.metrics


@pytest.mark.parametrize("reduce", ["token", "sequence"])
def test_the_loss_grows_by_the_mean_of_the_terms(reduce: Literal["token", "sequence"]) -> None:
    """As the policy loss is reduced; the metric is the mean over tokens, before the coefficient."""
    samples = compared(random_samples(8))
    plain, _ = step(samples, reduce=reduce)
    one, weights = step(samples, reduce=reduce, kl_coef=0.5)
    two, others = step(samples, reduce=reduce, kl_coef=1.0)
    assert one.metrics["kl_reference"] == two.metrics["kl_reference"] > 0
    assert two.loss - plain.loss == pytest.approx(2 * (one.loss - plain.loss), rel=1e-4)
    if reduce == "token":
        assert one.loss - plain.loss == pytest.approx(0.5 * one.metrics["kl_reference"], rel=1e-4)
    assert any(not torch.equal(weights[name], others[name]) for name in weights)


def test_a_record_without_a_reference_is_refused() -> None:
    """By the name of what is missing, and of the setting that asks for it; so is another's."""
    with pytest.raises(ValueError, match=r"scores\[0\].reference_logprobs is missing, and trainer"):
        check_reference(scored(), BY)
    whole = compared([scored()])[0]
    check_reference(whole, BY)
    with pytest.raises(ValueError, match=r"scores\[0\].reference_hash must be a1, .* got none"):
        check_reference(whole, BY, "a1")
    check_reference(
        replace(whole, scores=(replace(whole.scores[0], reference_hash="a1"),)), BY, "a1"
    )


def test_each_token_has_its_own_reference() -> None:
    """In the column of the token, 0 elsewhere; where none was recorded no number is made up."""
    segments = (prompt_segment(), policy_segment([3, 4], [-1, -1]), policy_segment([5], [-1]))
    scores = (
        replace(score(1, [-1, -1]), reference_logprobs=floats([-2, -3])),
        replace(score(2, [-1]), reference_logprobs=floats([-4])),
    )
    samples = [scored(segments, scores), *compared([scored(sample=1)])]
    advantages = np.zeros(2, np.float32)
    (batch,) = pack(samples, advantages, [], policy_version=0, token_budget=99).micro_batches
    assert batch.reference_logprobs_BT is not None
    assert batch.reference_logprobs_BT[0].tolist() == [0, 0, -2, -3, -4]
    samples[1] = scored(sample=1)
    (batch,) = pack(samples, advantages, [], policy_version=0, token_budget=99).micro_batches
    assert batch.reference_logprobs_BT is not None
    assert batch.reference_logprobs_BT[0].tolist() == [0, 0, -2, -3, -4]
    assert np.isnan(batch.reference_logprobs_BT[1]).tolist() == [False, False, True, True, False]

"""Distillation: its divergences against a second implementation and against what they estimate."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.schemas.events import ScoredTrajectory, Tensor
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.compute.learn import Learner
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import OptimizerSection
from rlstreams.workers.trainer.intake.validation import check_reference, validate
from rlstreams.workers.trainer.learn.distill import divergences, sampled_gains, with_teacher
from rlstreams.workers.trainer.learn.loss import policy_losses
from rlstreams.workers.trainer.learn.step import StepResult
from tests.reference import losses as reference
from tests.unit.trainer.trainer_builders import (
    VOCAB_SIZE,
    TinyModel,
    batch_of,
    floats,
    random_samples,
)

BETAS = [0.0, 0.1, 0.5, 1.0]
ON: dict[str, Any] = {"kind": "distill", "advantage": "one", "correction": "none"}


def found(logits: Any, teacher: Any, top: list[int], beta: float) -> tuple[float, Any]:
    """Our divergence of one token, and its derivative in the student's logits."""
    own = torch.tensor(logits, dtype=torch.float64)[None].requires_grad_()
    its = torch.tensor(teacher, dtype=torch.float64)[None].log_softmax(-1)
    value = divergences(own.log_softmax(-1)[:, top], its[:, top], beta).sum()
    (slope,) = torch.autograd.grad(value, own)
    return float(value.detach()), slope[0]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9), st.sampled_from(BETAS), st.floats(0.1, 3))
def test_divergences_equal_the_second_implementation(
    seed: int, size: int, beta: float, spread: float
) -> None:
    """Value and gradient in every logit, over any tokens of a vocabulary."""
    rng = np.random.default_rng(seed)
    logits, teacher = rng.normal(0, spread, (2, size)).tolist()
    top = rng.permutation(size)[: rng.integers(1, size)].tolist()
    value, slope = found(logits, teacher, top, beta)
    expected, slopes = reference.divergence_of(logits, teacher, top, beta)
    assert value == pytest.approx(expected, rel=1e-12, abs=1e-12)
    np.testing.assert_allclose(slope, slopes, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("rest", [1e-3, 1e-5, 1e-7])
def test_what_the_teacher_s_tokens_leave_is_exact(rest: float, beta: float) -> None:
    """Log-probs come in float32, and 1 less their sum would be noise of that size: value and
    gradient are those of the numbers as they came, in the reference's float64."""
    logs = [
        [math.log1p(-rest - rest / 8), math.log(rest / 8)],
        [math.log1p(-3 * rest), math.log(rest)],
    ]
    given = np.float32(logs)
    policy, teacher = (torch.tensor(row)[None] for row in given)
    policy.requires_grad_()
    value = divergences(policy, teacher, beta)
    (slope,) = torch.autograd.grad(value.sum(), policy)
    expected, slopes = reference.divergence_of_top(*given.astype(float).tolist(), beta)
    assert (value.dtype, slope.dtype) == (torch.float32, torch.float32)
    assert float(value.detach()) == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(slope[0], slopes, rtol=1e-6)


def test_the_sampled_estimate_is_right_on_average() -> None:
    """Over tokens of an old policy its mean gradient is that of KL(student || teacher)."""
    draw = torch.Generator().manual_seed(0)
    logits, old, its = torch.randn(3, 6, generator=draw, dtype=torch.float64)
    logits.requires_grad_()
    own, old, its = logits.log_softmax(0), old.log_softmax(0), its.log_softmax(0)
    (expected,) = torch.autograd.grad((own.exp() * (own - its)).sum(), logits, retain_graph=True)
    by = LossSection(**ON)
    gains = sampled_gains(own, old, its)
    ones = torch.ones(6, dtype=torch.float64)
    losses = policy_losses(own, old, old, ones, [6], by, gains_N=gains).losses_N
    (actual,) = torch.autograd.grad((old.exp() * losses).sum(), logits)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


def taught(samples: list[ScoredTrajectory], k: int = 4) -> list[ScoredTrajectory]:
    """The same samples, with log-probs of a teacher that does not care what comes before."""
    its = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(9)).log_softmax(0).numpy()
    order = np.argsort(-its)[:k].astype(np.int32)

    def of(sample: ScoredTrajectory) -> ScoredTrajectory:
        segments, scores = sample.trajectory.segments, []
        for score in sample.scores:
            ids = segments[score.segment].token_ids.numpy()
            scores.append(
                replace(
                    score,
                    reference_logprobs=floats(its[ids]),
                    reference_top_ids=Tensor.of(np.tile(order, (len(ids), 1))),
                    reference_top_logprobs=Tensor.of(np.tile(its[order], (len(ids), 1))),
                )
            )
        return replace(sample, scores=tuple(scores))

    return [of(sample) for sample in samples]


def learn(samples: list[ScoredTrajectory], steps: int = 1, **loss: Any) -> list[StepResult]:
    torch.set_num_threads(1)
    by = LossSection(**ON, **loss)
    learner = Learner.of(TinyModel(), OptimizerSection(lr=3e-2), by)
    batch = with_teacher(batch_of(samples, token_budget=20, by=by), samples, by.distill_top_k)
    assert len(batch.micro_batches) > 1
    return [learner.step(batch) for _ in range(steps)]


@pytest.mark.parametrize(
    "loss",
    [{}, {"distill_top_k": 4}, {"distill_top_k": 2, "distill_beta": 0.0}, {"distill_top_k": 12}],
)
def test_a_student_comes_closer_to_its_teacher(loss: dict[str, Any]) -> None:
    """The divergence falls, step by step, on the same samples; and the same again to the bit."""
    samples = taught(random_samples(8), k=VOCAB_SIZE)
    steps = learn(samples, 12, **loss)
    distances = [step.metrics["kl_reference"] for step in steps]
    assert distances[-1] < 0.5 * distances[0]
    if loss:
        assert steps[0].loss == pytest.approx(distances[0], rel=1e-5)
    again = learn(samples, 12, **loss)
    assert [step.metrics for step in again] == [step.metrics for step in steps]


def test_a_record_that_says_too_little_is_refused() -> None:
    """Without the teacher, or with fewer of its tokens than are compared."""
    (plain,) = random_samples(1)
    (whole,) = taught([plain])
    check_reference(whole, LossSection(**ON, distill_top_k=4))
    with pytest.raises(ValueError, match=r"reference_logprobs is missing.*kind 'distill' needs"):
        check_reference(plain, LossSection(**ON))
    with pytest.raises(ValueError, match=r"has 4 tokens of the teacher.*distill_top_k is 5"):
        check_reference(whole, LossSection(**ON, distill_top_k=5))
    bare = replace(whole, scores=tuple(replace(s, reference_top_ids=None) for s in whole.scores))
    with pytest.raises(ValueError, match=r"reference_top_ids and reference_top_logprobs must both"):
        validate(bare, VOCAB_SIZE, 99)


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("reference_top_logprobs", np.float32([[-1, np.nan]]), r"top_logprobs\[1\] .*got nan"),
        ("reference_top_logprobs", np.float32([[-1, 0.5]]), r"top_logprobs\[1\] .*got 0.5"),
        ("reference_top_ids", np.int32([[1, 12]]), r"top_ids must be in 0 to 11, got 1 to 12"),
        ("reference_top_ids", np.int32([[3, 3]]), r"top_ids must be of different tokens"),
        ("reference_top_ids", np.int64([[1, 2]]), r"top_ids must be int32 .*got int64"),
    ],
)
def test_what_a_teacher_cannot_have_said(field: str, values: Any, message: str) -> None:
    """Set aside before it is trained on, with place and value."""
    (sample,) = taught(random_samples(1), k=2)
    first, *others = sample.scores
    tensor = Tensor.of(np.repeat(values, len(first.proximal_logprobs), 0))
    bad = replace(sample, scores=(replace(first, **{field: tensor}), *others))
    validate(sample, VOCAB_SIZE, 99)
    with pytest.raises(ValueError, match=message):
        validate(bad, VOCAB_SIZE, 99)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kind": "distill"}, r"kind is 'distill', but trainer.loss.advantage is 'grpo'"),
        (ON | {"kl_coef": 0.1}, r"kl_coef is 0.1, but trainer.loss.kind is 'distill'"),
        (ON | {"distill_beta": 0.5}, r"distill_beta is 0.5 and trainer.loss.distill_top_k is 0"),
        (
            ON | {"distill_top_k": 2, "distill_beta": 2.0},
            r"distill_beta must be in \[0, 1\], got 2",
        ),
        (
            ON | {"distill_top_k": 2, "correction": "truncate"},
            r"correction is 'truncate'.*top_k is 2",
        ),
        (
            {"distill_top_k": 2, "correction": "none"},
            r"distill_top_k is 2, but trainer.loss.kind is 'ppo'",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer.loss.{message}"):
        LossSection(**section)

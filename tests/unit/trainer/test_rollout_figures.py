"""Figures of rollout correctness against their definitions, whoever computed the log-probs."""

from __future__ import annotations

import numpy as np
import pytest

from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.trainer.learn.batch_factors import Look, with_factors
from rlstreams.workers.trainer.learn.packing import Batch
from rlstreams.workers.trainer.learn.rollout_figures import correctness, rollout_figures
from tests.unit.trainer.trainer_builders import (
    packed_within,
    policy_segment,
    prompt_segment,
    score,
    scored,
)

BEHAVIOR = ([-0.5], [-1.0, -1.5], [-0.5, -2.0])  # by segment, of two samples
PROXIMAL = ([-0.25], [-1.25, -1.75], [-0.75, -1.5])


def batch_of(anchor: str, token_budget: int = 1000) -> Batch:
    """A sample that went on behind a pull, and one that did not."""
    first = scored(
        (
            prompt_segment([1, 2]),
            policy_segment([3], BEHAVIOR[0], version=1),
            policy_segment([5, 6], BEHAVIOR[1], version=2),
        ),
        (score(1, PROXIMAL[0], anchor, 1), score(2, PROXIMAL[1], anchor, 2)),
        sample=1,
    )
    second = scored(
        (prompt_segment([1, 2]), policy_segment([3, 4], BEHAVIOR[2], version=2)),
        (score(1, PROXIMAL[2], anchor, 2),),
    )
    return packed_within(
        [first, second], np.ones(2, np.float32), (), policy_version=2, token_budget=token_budget
    )


def test_they_are_what_they_say() -> None:
    behavior, proximal = (np.concatenate(values) for values in (BEHAVIOR, PROXIMAL))
    log, rows = proximal - behavior, np.array([0, 0, 0, 1, 1])
    ratio, apart = np.exp(log), np.abs(np.exp(proximal) - np.exp(behavior))
    of_rows = [log[rows == row] for row in (0, 1)]
    expected = {
        "k1": np.mean(-log),
        "k3": np.mean(ratio - 1 - log),
        "ppl_ratio": np.mean([np.exp(-row.mean()) for row in of_rows]),
        "chi2_token": np.mean(ratio**2) - 1,
        "chi2_seq": np.mean([np.exp(row.sum()) ** 2 for row in of_rows]) - 1,
        "prob_diff_mean": apart.mean(),
        "prob_diff_max": apart.max(),
        "pearson": np.corrcoef(np.exp(proximal), np.exp(behavior))[0, 1],
    }
    found = correctness(proximal, behavior, rows)
    assert found == pytest.approx({f"rollout_{n}": v for n, v in expected.items()}, rel=1e-9)
    whole = rollout_figures(batch_of("sampled"))
    assert {name: whole[name] for name in found} == pytest.approx(found, rel=1e-6)
    distance = np.abs(log)
    before = distance[[0, 3, 4]]  # the others lie behind a pull
    assert whole["mismatch_mean"] == pytest.approx(before.mean())
    assert whole["mismatch_max"] == pytest.approx(before.max())
    assert whole["mismatch_after_pull_mean"] == pytest.approx(distance[1:3].mean())
    assert whole == pytest.approx(rollout_figures(batch_of("sampled", token_budget=5)), rel=1e-12)


def test_what_was_not_measured_is_absent() -> None:
    assert rollout_figures(batch_of("behavior")) == {}
    assert not [n for n in rollout_figures(batch_of("nearby")) if n.startswith("mismatch")]
    assert correctness(np.full(2, -1.0), np.full(2, -1.0), np.zeros(2, np.int64)) == {
        "rollout_k1": 0, "rollout_k3": 0, "rollout_ppl_ratio": 1, "rollout_chi2_token": 0,
        "rollout_chi2_seq": 0, "rollout_prob_diff_mean": 0, "rollout_prob_diff_max": 0,
    }  # fmt: skip


def test_a_trainer_that_scores_by_itself_has_the_same_figures() -> None:
    """Of its own weights; only tokens of their version, which have no staleness, are mismatch."""
    batch = batch_of("behavior")
    (part,) = batch.micro_batches
    log_probs = np.concatenate(PROXIMAL).astype(np.float32)
    look = (log_probs, np.zeros(5, np.float32))
    found = rollout_figures(
        with_factors(
            batch, [Look(*look, np.zeros(0, np.float32))], LossSection(proximal="step_start")
        )
    )
    scored_apart = rollout_figures(batch_of("sampled"))
    names = [name for name in scored_apart if name.startswith("rollout")]
    assert {n: found[n] for n in names} == pytest.approx({n: scored_apart[n] for n in names})
    assert found["mismatch_mean"] == pytest.approx(np.abs(log_probs[3:] - BEHAVIOR[2]).mean())
    assert part.start_logprobs_BT is None, "what was packed is as it was"

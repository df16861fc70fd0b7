"""What the clip and the weight do to a token, scores, and metrics by their definitions."""

import numpy as np
import pytest
import torch

from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.model.token_scores import TokenScores, score_tokens
from rlstreams.workers.trainer.learn.batch_factors import flat, with_factors
from rlstreams.workers.trainer.learn.correction import correction_weights
from rlstreams.workers.trainer.learn.loss import policy_losses
from rlstreams.workers.trainer.learn.loss_totals import LossSums
from tests.unit.trainer.trainer_builders import batch_of, random_samples

SECTION = LossSection(clip_low=0.2, clip_high=0.28, weight_cap=2.0, clip_dual=0.0)


def clipped_losses(policy, proximal, behavior, advantages, section):
    """Of tokens whose rows do not matter."""
    return policy_losses(policy, proximal, behavior, advantages, [len(policy)], section)


def random_tokens(num=200, seed=0, spread=0.5):
    """Log-probs of three policies and advantages, float64 [num]; all branches occur."""
    rng = np.random.default_rng(seed)
    behavior = -rng.uniform(1.0, 4.0, num)
    proximal = behavior + rng.normal(0, spread, num)
    policy = proximal + rng.normal(0, spread, num)
    return policy, proximal, behavior, rng.normal(0, 1, num)


def of(*arrays, dtype=torch.float64):
    return [torch.tensor(array, dtype=dtype) for array in arrays]


def test_weights_have_a_mean_of_one_before_any_look():
    """Asked for, they are divided by their mean over the batch; else the batch is as it was."""
    batch, by = batch_of(random_samples(9)), LossSection(weight_normalize=True, weight_cap=1.0)
    assert with_factors(batch, [], LossSection()) is batch
    assert not by.looks_first
    factors = flat(with_factors(batch, [], by), "factors_BT")
    near, behavior = (
        torch.from_numpy(flat(batch, f"{policy}_logprobs_BT"))
        for policy in ("proximal", "behavior")
    )
    counts = [count for part in batch.micro_batches for count in part.loss_tokens_by_row]
    weights = correction_weights(near, behavior, counts, by).numpy()
    assert abs(weights.mean() - 1) > 0.01
    assert (weights * factors).mean() == pytest.approx(1.0)


def test_scores_are_those_of_the_tempered_softmax():
    """Log-probs and entropy of softmax(logits / temperature), against numpy."""
    rng = np.random.default_rng(0)
    logits, ids = rng.normal(0, 3, (4, 7)), np.array([0, 6, 3, 3])
    temperatures = np.array([1.0, 0.5, 2.0, 1.0])
    scaled = logits / temperatures[:, None]
    probs = np.exp(scaled) / np.exp(scaled).sum(-1, keepdims=True)
    scores = score_tokens(
        *of(logits, dtype=torch.bfloat16),
        torch.from_numpy(ids),
        *of(temperatures, dtype=torch.float32),
    )
    assert scores.logprobs_N.dtype == torch.float32
    exact = score_tokens(
        *of(logits, dtype=torch.float32), torch.from_numpy(ids), of(temperatures)[0]
    )
    np.testing.assert_allclose(exact.logprobs_N, np.log(probs[range(4), ids]), rtol=1e-5)
    np.testing.assert_allclose(exact.entropy_N, -(probs * np.log(probs)).sum(-1), rtol=1e-5)


def totals_of(tokens, cuts=()):
    totals = LossSums()
    for part in np.split(np.arange(len(tokens[0])), cuts):
        policy, proximal, behavior, advantages = of(*(array[part] for array in tokens))
        losses = clipped_losses(policy, proximal, behavior, advantages, SECTION)
        scores = TokenScores(policy, torch.ones(len(part)))
        totals.add(losses, scores, behavior)
    return totals.totals()


def test_metrics_equal_their_definitions():
    """k3, mean weight, largest ratio, clip share, and how many tokens the weights leave of all."""
    tokens = random_tokens()
    policy, proximal, behavior, advantages = tokens
    means = totals_of(tokens).means()
    log_ratio, ratio = policy - behavior, np.exp(policy - proximal)
    weight = np.minimum(np.exp(proximal - behavior), 2.0)
    applied = weight * ratio
    expected = {
        "kl": np.mean(np.exp(log_ratio) - 1 - log_ratio),
        "weight_mean": weight.mean(),
        "entropy": 1.0,
        "ratio_max": ratio.max(),
        "ess": applied.sum() ** 2 / (len(policy) * (applied**2).sum()),
    }
    for name, value in expected.items():
        assert means[name] == pytest.approx(value, rel=1e-9), name
    assert 0 < means["clip_fraction"] < 1
    assert totals_of([policy] * 3 + [advantages]).means()["ess"] == 1.0


def test_micro_batches_add_up():
    """Metrics of a batch do not depend on where it was cut."""
    tokens = random_tokens()
    whole = totals_of(tokens).means()
    cut = totals_of(tokens, cuts=(1, 50, 130)).means()
    assert cut == pytest.approx(whole, rel=1e-12)

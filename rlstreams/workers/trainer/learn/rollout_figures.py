"""Distance of the sampler from the learner: figures of a batch, the same for each `logprob.place`.

Axes: `N` tokens of the loss of the whole batch that were scored a second time, `R` samples that
have some. Log-probs are in nats.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlstreams.workers.trainer.learn.batch_factors import flat
from rlstreams.workers.trainer.learn.correction import LOG_RATIO_LIMIT
from rlstreams.workers.trainer.learn.packing import Batch

Float64s = npt.NDArray[np.float64]


def rollout_figures(batch: Batch) -> dict[str, float]:
    """Figures of each token's proximal log-prob against the sampler's own.

    Proximal is the recorded log-prob; without one, where the batch was looked at first, that of the
    weights before the step. Figures that were not measured are absent.

    - `rollout_*`: see `correctness`. With proximal log-probs of another version than the sampling
      one, staleness is in them.
    - `mismatch_mean`, `mismatch_max`: abs(proximal - behavior) where both are the same version, so
      that engines alone differ, of tokens before the first pull within their sample.
    - `mismatch_after_pull_mean`: of tokens behind a pull; old keys and values have a part in it.
    """
    parts = batch.micro_batches
    behavior_N = flat(batch, "behavior_logprobs_BT").astype(np.float64)
    proximal_N = flat(batch, "proximal_logprobs_BT").astype(np.float64)
    is_same_N, is_behind_N = flat(batch, "is_true_anchor_BT"), flat(batch, "is_after_pull_BT")
    is_known_N = flat(batch, "is_scored_BT")
    if all(part.start_logprobs_BT is not None for part in parts):
        start_N = flat(batch, "start_logprobs_BT")
        proximal_N = np.where(is_known_N, proximal_N, start_N)
        is_same_N = np.where(is_known_N, is_same_N, flat(batch, "ages_BT") == 0)
        is_known_N = np.ones_like(is_known_N)
    counts = [count for part in parts for count in part.loss_tokens_by_row]
    rows_N = np.repeat(np.arange(len(counts)), counts)
    found = correctness(proximal_N[is_known_N], behavior_N[is_known_N], rows_N[is_known_N])
    distance_N = np.abs(proximal_N - behavior_N)
    if len(first_N := distance_N[is_same_N & ~is_behind_N]):
        found |= {"mismatch_mean": float(first_N.mean()), "mismatch_max": float(first_N.max())}
    if len(later_N := distance_N[is_same_N & is_behind_N]):
        found["mismatch_after_pull_mean"] = float(later_N.mean())
    return found


def correctness(
    proximal_N: Float64s, behavior_N: Float64s, rows_N: npt.NDArray[np.int64]
) -> dict[str, float]:
    """Figures of rollout correctness as verl has them (verl.readthedocs.io/en/latest/algo/
    rollout_corr.html), with l = proximal - behavior, clamped to +-20 in exponentials.

    - `k1`, `k3`: Schulman's estimators of KL(behavior || proximal): means of -l and exp(l) - 1 - l.
    - `ppl_ratio`: mean over samples of exp(-mean l): perplexity under proximal over behavior.
    - `chi2_token`, `chi2_seq`: mean of exp(l)^2 - 1, over tokens; over samples, of their sum of l.
    - `prob_diff_mean`, `prob_diff_max`: of abs(exp(proximal) - exp(behavior)).
    - `pearson`: correlation of the two probabilities; absent where one never changes.

    Args:
        rows_N: sample of each token.
    """
    if not len(proximal_N):
        return {}
    log_N = proximal_N - behavior_N
    bounded_N = _bounded(log_N)
    nums_R = np.bincount(rows_N)
    sums_R = np.bincount(rows_N, log_N)[nums_R > 0]
    nums_R = nums_R[nums_R > 0]
    probs_2N = np.exp(np.stack([proximal_N, behavior_N]))
    apart_N = np.abs(probs_2N[0] - probs_2N[1])
    found = {
        "k1": -log_N.mean(),
        "k3": (np.expm1(bounded_N) - bounded_N).mean(),
        "ppl_ratio": np.exp(_bounded(-sums_R / nums_R)).mean(),
        "chi2_token": np.expm1(2 * bounded_N).mean(),
        "chi2_seq": np.expm1(2 * _bounded(sums_R)).mean(),
        "prob_diff_mean": apart_N.mean(),
        "prob_diff_max": apart_N.max(),
    }
    if (probs_2N.std(1) > 0).all():
        found["pearson"] = np.corrcoef(probs_2N)[0, 1]
    return {f"rollout_{name}": float(value) for name, value in found.items()}


def _bounded(values: Float64s) -> Float64s:
    return np.clip(values, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

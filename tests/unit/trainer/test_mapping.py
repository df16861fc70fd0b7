"""The table of other trainers' corrections and losses: each row against what theirs computes."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.trainer.learn.correction import correction_weights
from rlstreams.workers.trainer.learn.loss import policy_losses

PAGE = Path(__file__).parents[3] / "infra/docs/from-other-trainers.md"
Logs = Sequence[float]  # log proximal / behavior of a sample's tokens
Weigh = Callable[[Logs], list[float]]

ROWS = {
    (trainer, theirs): LossSection(**tomllib.loads(here.replace("; ", "\n")))
    for trainer, theirs, here in re.findall(
        r"^\| (verl|TRL|AReaL|prime-rl|NeMo RL) \| (.+) \| `(.+)` \|$", PAGE.read_text(), re.M
    )
}


def truncated(cap: float) -> Weigh:
    return lambda logs: [min(math.exp(x), cap) for x in logs]


def masked(low: float, high: float) -> Weigh:
    return lambda logs: [math.exp(x) if low <= math.exp(x) <= high else 0.0 for x in logs]


def sequence(cap: float, *, masks: bool) -> Weigh:
    def weigh(logs: Logs) -> list[float]:
        ratio = math.prod(math.exp(x) for x in logs)
        return [(0.0 if ratio > cap else ratio) if masks else min(ratio, cap)] * len(logs)

    return weigh


def kept_if(keeps: Callable[[Logs], bool], weigh: Weigh) -> Weigh:
    return lambda logs: weigh(logs) if keeps(logs) else [0.0] * len(logs)


def ones(logs: Logs) -> list[float]:
    return [1.0] * len(logs)


def geometric(low: float, high: float) -> Callable[[Logs], bool]:
    return lambda logs: low <= math.prod(math.exp(x) for x in logs) ** (1 / len(logs)) <= high


def k3_mean(logs: Logs) -> bool:
    return sum(math.exp(x) - 1 - x for x in logs) / len(logs) <= 0.01


# By how the row begins; what names no weight is only loaded.
THEIRS: dict[tuple[str, str], Weigh] = {
    ("verl", "its default"): ones,
    ("verl", "`rollout_is = token`, `rollout_is_threshold = 2` "): truncated(2.0),
    ("verl", "`rollout_is = token`, `rollout_is_threshold = 0.5_2.0`"): masked(0.5, 2.0),
    ("verl", "`rollout_is = sequence`"): sequence(5.0, masks=False),
    ("verl", "`rollout_rs = token_k1`"): lambda logs: [
        float(0.5 <= math.exp(x) <= 2.0) for x in logs
    ],
    ("verl", "`rollout_rs = seq_mean_k1`"): kept_if(geometric(0.999, 1.001), ones),
    ("verl", "`rollout_rs = seq_mean_k3`"): kept_if(k3_mean, ones),
    ("verl", "`rollout_rs = seq_max_k2`"): kept_if(
        lambda logs: max(x * x / 2 for x in logs) <= 0.5, ones
    ),
    ("verl", "`bypass_mode`"): ones,
    ("TRL", "its default"): sequence(3.0, masks=True),
    ("TRL", "`vllm_importance_sampling_mode = token_truncate`"): truncated(3.0),
    ("TRL", "`vllm_importance_sampling_mode = token_mask`"): masked(0.5, 3.0),
    ("TRL", "`vllm_importance_sampling_correction = False`"): ones,
    ("AReaL", "its default"): masked(0.0, 5.0),
    ("AReaL", "`behave_imp_weight_mode = token_truncate`"): truncated(5.0),
    ("AReaL", "`use_decoupled_loss`, `prox_logp_method = recompute`"): masked(0.0, 5.0),
    ("AReaL", "`use_decoupled_loss`, `prox_logp_method = loglinear`"): masked(0.0, 5.0),
    ("AReaL", "`use_decoupled_loss = false`"): ones,
    ("prime-rl", "its default"): ones,
    ("NeMo RL", "`truncated_importance_sampling_type = tis`"): truncated(2.0),
    ("NeMo RL", "`truncated_importance_sampling_type = icepop`"): masked(0.5, 5.0),
    ("NeMo RL", "`truncated_importance_sampling_type = seq-mask-tis`"): kept_if(
        geometric(0.999, 1.002), truncated(math.inf)
    ),
    ("NeMo RL", "`use_importance_sampling_correction = false`"): ones,
}


def section_of(trainer: str, begin: str) -> LossSection:
    found = [
        by
        for (name, theirs), by in ROWS.items()
        if name == trainer and f"{theirs} ".startswith(begin)
    ]
    assert len(found) == 1, (trainer, begin, len(found))
    return found[0]


@pytest.mark.parametrize(("trainer", "begin"), THEIRS)
def test_a_row_s_weights_are_theirs(trainer: str, begin: str) -> None:
    """Of samples close to the sampler's policy and far from it, in float64."""
    by, rng = section_of(trainer, begin), np.random.default_rng(0)
    rows = [rng.normal(0, spread, 6) for spread in (1e-4, 1e-3, 0.05, 0.3, 1.0, 2.0)]
    logs = torch.tensor(np.concatenate(rows))
    actual = correction_weights(logs, torch.zeros_like(logs), [6] * len(rows), by)
    expected = [w for row in rows for w in THEIRS[trainer, begin](row.tolist())]
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    assert len(set(expected)) > 1 or by.correction == "none"


def test_trl_s_cispo_names_the_cap_itself() -> None:
    """`epsilon_high = 5` is a weight of at most 5, not of 6."""
    by = section_of("TRL", "`loss_type = cispo`")
    policy = torch.tensor([math.log(9.0)], requires_grad=True)
    zero = torch.zeros(1)
    policy_losses(policy, zero, zero, zero + 1, [1], by).losses_N.sum().backward()  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(policy.grad, [-5.0], rtol=1e-6)


def test_prime_rl_s_mask_is_ours() -> None:
    """By the difference of chances alone, in the direction of the advantage."""
    by = section_of("prime-rl", "its default")
    rng = np.random.default_rng(1)
    mu, pi = (torch.tensor(np.log(rng.uniform(0.01, 0.99, 200))) for _ in range(2))
    advantages = torch.tensor(rng.normal(size=200))
    found = policy_losses(pi, mu, mu, advantages, [200], by)
    off = pi.exp() - mu.exp()
    expected = torch.where(advantages > 0, off > 0.2, off < -0.2)
    assert found.is_clipped_N.tolist() == expected.tolist()
    assert 0 < int(expected.sum()) < 200


def test_every_row_is_a_section() -> None:
    """All were parsed, each names something of ours, and none is written twice."""
    lines = re.findall(r"^\| (?:verl|TRL|AReaL|prime-rl|NeMo RL) \|", PAGE.read_text(), re.M)
    assert len(ROWS) == len(lines) > len(THEIRS)

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
from rlstreams.workers.trainer.learn.advantage import advantages_by
from rlstreams.workers.trainer.learn.correction import correction_weights
from rlstreams.workers.trainer.learn.loss import policy_losses, reduced
from tests.reference import peers
from tests.reference.losses import Token

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
    ("verl", "`rollout_rs = token_k1`, `rollout_rs_threshold = 0.5_2.0`"): lambda logs: [
        float(0.5 <= math.exp(x) <= 2.0) for x in logs
    ],
    ("verl", "`rollout_rs = token_k1`, `rollout_rs_threshold = 0.5_4.0`"): lambda logs: [
        float(keep) for keep in peers.verl_k1_keeps([Token(0, x, 0.0, 1.0) for x in logs], 0.5, 4.0)
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


def batch(seed: int, spread: float) -> list[list[Token]]:
    """Samples of other lengths; their policies are apart by `spread` nats a token."""
    rng, rows = np.random.default_rng(seed), []
    for length, advantage in ((2, 1.3), (7, -0.8), (4, 0.4), (9, -0.2), (1, 1.0)):
        mu = np.log(rng.uniform(0.05, 0.9, length))
        prox = np.minimum(mu + rng.normal(0, spread, length), -1e-3)
        pi = np.minimum(prox + rng.normal(0, spread, length), -1e-3)
        rows.append(
            [Token(*map(float, (p, q, m, advantage))) for p, q, m in zip(pi, prox, mu, strict=True)]
        )
    return rows


def ours(rows: list[list[Token]], by: LossSection) -> tuple[float, list[float]]:
    """The batch's loss, and its derivative in each token's log-prob."""
    tokens = [token for row in rows for token in row]
    columns = list(zip(*(token[:4] for token in tokens), strict=True))
    pi, prox, mu, advantages = (torch.tensor(c, dtype=torch.float64) for c in columns)
    pi.requires_grad_()
    prox, counts = mu if by.proximal == "behavior" else prox, [len(row) for row in rows]
    losses = policy_losses(pi, prox, mu, advantages, counts, by)
    loss = reduced(
        losses.losses_N, counts, by, num_batch_tokens=len(tokens), num_batch_learnt=len(rows),
        num_batch_samples=len(rows),
    )  # fmt: skip
    (slopes,) = torch.autograd.grad(loss, pi)
    return float(loss.detach()), slopes.tolist()


LOSSES: dict[tuple[str, str], Callable[[list[list[Token]]], tuple[float, list[float]]]] = {
    ("verl", "`loss_mode = gspo`"): lambda rows: peers.verl_gspo(rows, 3e-4, 4e-4),
    ("verl", "`loss_mode = sapo`"): lambda rows: peers.verl_sapo(rows, 1.0, 1.05),
    ("prime-rl", "its default"): lambda rows: peers.prime_rl(rows, 0.2, 0.2),
}


@pytest.mark.parametrize("spread", [1e-4, 0.02, 0.4])
@pytest.mark.parametrize(("trainer", "begin"), LOSSES)
def test_a_row_s_loss_is_theirs(trainer: str, begin: str, spread: float) -> None:
    """The whole batch's, and its gradient: reduction and further terms too."""
    for seed in range(5):
        rows = batch(seed, spread)
        value, slopes = ours(rows, section_of(trainer, begin))
        expected, theirs = LOSSES[trainer, begin](rows)
        assert value == pytest.approx(expected, rel=1e-12)
        np.testing.assert_allclose(slopes, theirs, rtol=1e-9, atol=1e-15)


def test_what_the_page_says_stays_different() -> None:
    """Means over samples and over tokens: equal where all samples are as long, else not."""
    for lengths in ((3, 3), (1, 5)):
        rows = [[Token(0, x, 0, 1)] * n for x, n in zip((0.3, -0.2), lengths, strict=True)]
        by = LossSection(correction_level="sequence", weight_cap=5.0)
        counts = [len(row) for row in rows]
        logs = torch.tensor([t.prox for row in rows for t in row], dtype=torch.float64)
        own = correction_weights(logs, torch.zeros_like(logs), counts, by)
        of_rows = (own / own.mean()).split(counts)
        theirs = peers.verl_sequence_weights(rows, 5.0)
        is_equal = np.allclose([float(w[0]) for w in of_rows], theirs)
        groups = {"a": [1.0, 0.0], "b": [1.0, 1.0, 0.0]}
        spans = {"a": lengths, "b": (*lengths, lengths[0])}
        found = advantages_by(
            [r for own in groups.values() for r in own],
            [g for g, own in groups.items() for _ in own],
            LossSection(advantage="reinforce++baseline"),
        )
        white = [a for own in peers.verl_reinforce_baseline(groups, spans).values() for a in own]
        ratios = np.array(found) / white
        is_scaled = ratios.max() / ratios.min() < 1.001
        assert (is_equal, is_scaled) == ((True, True) if lengths == (3, 3) else (False, False))


def test_every_row_is_a_section() -> None:
    """All were parsed, each names something of ours, and none is written twice."""
    lines = re.findall(r"^\| (?:verl|TRL|AReaL|prime-rl|NeMo RL) \|", PAGE.read_text(), re.M)
    assert len(ROWS) == len(lines) > len(THEIRS)

"""Every loss, advantage and correction against its second implementation, and laws of them all."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.loss import UNCOMPARED, Advantage, Kind, LossSection
from rlstreams.workers.config.trainer import OptimizerSection, TrainerSection
from rlstreams.workers.trainer.learn.adam import lr_at
from rlstreams.workers.trainer.learn.advantage import advantages_by, overlong_penalty
from rlstreams.workers.trainer.learn.batch_factors import entropy_mask, second_moment_mask
from rlstreams.workers.trainer.learn.cutting import minibatch_of, planned_cut
from rlstreams.workers.trainer.learn.distill import sampled_gains
from rlstreams.workers.trainer.learn.kl import kl_terms, with_entropy, with_kl
from rlstreams.workers.trainer.learn.loss import LOSSES, policy_losses, proximal_of, reduced
from tests.reference import losses as reference

KINDS, ADVANTAGES = get_args(Kind), get_args(Advantage)
REJECTIONS: list[dict[str, Any]] = [
    {},
    {"rejection": "k1", "rejection_low": 0.7, "rejection_high": 1.3},
    {"rejection": "k2", "rejection_high": 0.08},
    {"rejection": "k3", "rejection_high": 0.08},
]


@st.composite
def sections(draw: st.DrawFn) -> LossSection:
    """Any mixture of settings that is not refused."""
    rejection = draw(st.sampled_from(REJECTIONS))
    levels = ["token", "sequence_sum", "sequence_mean", "sequence_max"]
    if rejection.get("rejection") == "k1":
        levels.pop()
    correction = draw(st.sampled_from(["truncate", "mask", "none"]))
    kind = draw(st.sampled_from(KINDS))
    return LossSection(
        kind=kind,
        advantage="one" if kind == "distill" else "grpo",
        clip_low=draw(st.sampled_from([0.05, 0.2])),
        clip_dual=draw(st.sampled_from([0.0, 1.5, 3.0])),
        divergence=draw(st.sampled_from(["tv", "kl"])),
        divergence_max=draw(st.sampled_from([0.02, 0.2])),
        correction=correction,
        correction_level=draw(st.sampled_from(["token", "sequence", "geometric"])),
        weight_cap=draw(st.sampled_from([1.1, 2.0])),
        weight_floor=0.8 if correction == "mask" else 0.0,
        veto_low=draw(st.sampled_from([0.0, 0.4])),
        veto_high=draw(st.sampled_from([0.0, 2.5])),
        rejection_level=draw(st.sampled_from(levels)),
        off_policy_max=draw(st.sampled_from([0.0, 0.3])),
        kl_coef=0.0 if kind == "distill" else draw(st.sampled_from([0.0, 0.3])),
        kl_estimator=draw(st.sampled_from(["k3", "k2"])),
        kl_weight=draw(st.sampled_from(["none", "ratio"])),
        entropy_coef=draw(st.sampled_from([0.0, 0.2])),
        **rejection,
    )


Batch = list[list[reference.Token]]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Rows of tokens; some spreads reach every clamp."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    spread = draw(st.sampled_from([0.05, 0.5, 15.0]))
    rows = []
    for count in draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)):
        advantage = rng.normal()
        rows.append([_token(rng, spread, advantage) for _ in range(count)])
    return rows


def _token(rng: np.random.Generator, spread: float, advantage: float) -> reference.Token:
    pi, mu, ref = -rng.uniform(0.05, 4.0, 3)
    prox = min(mu + rng.normal(0, spread), -1e-3)
    pi = min(prox + rng.normal(0, spread), -1e-3)
    return reference.Token(pi, prox, mu, advantage, ref, rng.uniform(0, 3), rng.integers(0, 2))


def columns(rows: Batch) -> list[Tensor]:
    tokens = [token for row in rows for token in row]
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)]


def ours(rows: Batch, by: LossSection) -> tuple[Tensor, Tensor]:
    """Loss of each token, and derivative of their sum in each token's log-prob."""
    policy, proximal, behavior, advantages, ref, entropy, factors = columns(rows)
    policy.requires_grad_()
    counts = [len(row) for row in rows]
    gains = sampled_gains(policy, proximal, ref) if by.kind == "distill" else None
    found = policy_losses(policy, proximal, behavior, advantages, counts, by, factors, gains)
    if by.kl_coef:
        found = with_kl(found, kl_terms(policy, ref, by), policy, proximal, by)
    if by.entropy_coef:
        found = with_entropy(found, policy, entropy, by)
    found.losses_N.sum().backward()  # type: ignore[no-untyped-call]
    assert policy.grad is not None
    return found.losses_N.detach(), policy.grad


@settings(max_examples=100, deadline=None)
@given(sections(), batches())
def test_value_and_gradient_equal_the_second_implementation(by: LossSection, rows: Batch) -> None:
    """Any loss with any correction and any further term, token by token."""
    values, slopes = ours(rows, by)
    expected = reference.losses(rows, asdict(by))
    for found, terms in (
        (values, [t.value for t in expected]),
        (slopes, [t.slope for t in expected]),
    ):
        np.testing.assert_allclose(found, terms, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("cispo", "distill")])
def test_gradients_equal_finite_differences(kind: Kind) -> None:
    """Of the second implementation's values; a gradient that is stopped is not that of the value
    (CISPO's; of `distill` see `test_distill.py`)."""
    rng = np.random.default_rng(1)
    rows = [[_token(rng, 0.4, a)._replace(factor=1) for _ in range(7)] for a in (1.3, -0.7)]
    by = LossSection(kind=kind, kl_coef=0.2, kl_weight="ratio", clip_high=0.2)
    _, slopes = ours(rows, by)
    moved = []
    for h in (1e-6, -1e-6):
        near = [[t._replace(pi=t.pi + h) for t in row] for row in rows]
        moved.append(np.array([t.value for t in reference.losses(near, asdict(by))]))
    expected = (moved[0] - moved[1]) / 2e-6
    np.testing.assert_allclose(slopes, expected, rtol=1e-5, atol=1e-7)


@settings(max_examples=20, deadline=None)
@given(sections(), batches(), st.randoms(use_true_random=False))
def test_rows_may_come_in_any_order(by: LossSection, rows: Batch, random: Any) -> None:
    """To the bit: no row knows of another."""
    order = list(range(len(rows)))
    random.shuffle(order)
    ends = np.cumsum([0, *(len(row) for row in rows)])
    places = np.concatenate([np.arange(ends[i], ends[i + 1]) for i in order])
    for found, turned in zip(ours(rows, by), ours([rows[i] for i in order], by), strict=True):
        assert torch.equal(found[places], turned)


@pytest.mark.parametrize(
    "loss",
    [
        {"kind": "dppo"},
        {"kind": "m2po"},
        {"kind": "distill", "advantage": "one"},
        {"kl_coef": 1.0, "kl_weight": "ratio", "kl_estimator": "k2"},
        {"entropy_coef": 1.0},
    ],
)
def test_no_token_outweighs_a_batch(loss: dict[str, Any]) -> None:
    """One that the proximal policy found absurd weighs ten times what it weighs at a ratio of 1,
    not e^20 times; its gradient is as much."""
    absurd, plain = (
        [reference.Token(-1.0, prox, prox, 1.0, ref=-0.5, entropy=0.5)] for prox in (-19.0, -1.0)
    )
    by = LossSection(**loss, clip_dual=0.0, clip_high=0.28, divergence_max=1.0)
    at_most = 10.5 if loss.get("kind") else 11.5  # PPO's own part is clipped at 1.28
    (_, slope), (_, expected) = ours([absurd], by), ours([plain], by)
    assert 1 < abs(float(slope)) / abs(float(expected)) < at_most


def test_each_name_has_its_formula() -> None:
    """Here and in the second implementation."""
    assert set(LOSSES) == set(KINDS) == set(reference.LOSSES)


REWARDS = st.lists(st.floats(0, 5).map(lambda r: round(r, 2)), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(ADVANTAGES),
    st.booleans(),
    st.sampled_from(["zero", "reward"]),
    st.sampled_from([0.0, 1.5]),
    st.lists(REWARDS, min_size=1, max_size=4),
)
def test_advantages_equal_the_second_implementation(
    kind: Advantage, normalize: bool, lone: Any, least: float, rewards: list[list[float]]
) -> None:
    """Groups of any size, of one too; equal rewards; siblings apart from each other."""
    least *= kind in UNCOMPARED
    by = LossSection(advantage=kind, normalize_std=normalize, lone=lone, reward_min=least)
    groups = {str(number): own for number, own in enumerate(rewards)}
    listed = [(place, g, r) for g, own in groups.items() for place, r in enumerate(own)]
    listed.sort()
    actual = advantages_by([r for *_, r in listed], [g for _, g, _ in listed], by)
    expected = reference.advantages(groups, asdict(by))
    wanted = [expected[g][place] for place, g, _ in listed]
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", sorted({*ADVANTAGES} - {*UNCOMPARED, "gae"}))
def test_equal_rewards_teach_nothing(kind: Advantage) -> None:
    """Exactly nothing, whatever they are compared with."""
    by = LossSection(advantage=kind)
    assert advantages_by([0.1] * 6, ["a", "b", "a", "a", "b", "b"], by).tolist() == [0.0] * 6


def test_maxrl_needs_rewards_of_0_or_more() -> None:
    """A group's mean of 0 would be divided by."""
    with pytest.raises(ConfigError, match="'maxrl', but a reward of group a is -1"):
        advantages_by([-1.0, 1.0], ["a", "a"], LossSection(advantage="maxrl"))


def test_length_takes_from_a_reward() -> None:
    """Nothing before the buffer, all at its end, a share in it (DAPO, equation 13)."""
    by = LossSection(overlong_tokens=100, overlong_buffer_tokens=20, overlong_factor=0.5)
    assert [overlong_penalty(n, by) for n in (0, 80, 90, 100, 120)] == [0, 0, -0.25, -0.5, -0.5]
    sharp = LossSection(overlong_tokens=100)
    assert [overlong_penalty(n, sharp) for n in (99, 100)] == [0, -1]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.0]), min_size=1, max_size=12))
def test_the_second_moment_s_mask(gaps: list[float]) -> None:
    """It equals the second implementation; what is left keeps the bound."""
    policy = np.float32(gaps)
    kept = second_moment_mask(policy, np.zeros_like(policy), 0.04)
    squares = [float(g) ** 2 for g in policy]
    assert kept.tolist() == reference.second_moment(squares, 0.04)
    assert not kept.any() or np.mean(np.square(policy[kept].astype(np.float64))) <= 0.04


def test_tokens_of_high_entropy_are_kept() -> None:
    """The share of them, ties included, and one at least."""
    entropy = np.float32([0.1, 2.0, 0.5, 2.0, 0.3])
    assert entropy_mask(entropy, 0.2).tolist() == [False, True, False, True, False]
    assert entropy_mask(entropy, 0.6).tolist() == [False, True, True, True, False]
    assert entropy_mask(entropy, 0.001).sum() == 2


def test_the_entropy_s_gradient_is_right_on_average() -> None:
    """Over the policy's own tokens the estimate's mean is the gradient of the entropy."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.5], dtype=torch.float64, requires_grad=True)
    by = LossSection(entropy_coef=1.0, kind="ppo")
    logprobs = logits.log_softmax(0)
    chances = logprobs.detach().exp()
    entropy = -(logprobs.exp() * logprobs).sum()
    (expected,) = torch.autograd.grad(-entropy, logits, retain_graph=True)
    at, zeros = logprobs.detach(), torch.zeros(4, dtype=torch.float64)
    losses = policy_losses(logprobs, at, at, zeros, [4], by)
    losses = with_entropy(losses, logprobs, entropy.detach().expand(4), by)
    (actual,) = torch.autograd.grad((chances * losses.losses_N).sum(), logits)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(losses.losses_N.detach(), [-float(entropy.detach())] * 4)


def test_a_divergence_weighed_by_the_ratio_has_no_bias() -> None:
    """Over tokens of an old policy its mean gradient is that of KL(policy || reference)."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.0, 0.4, -0.3, 0.2], dtype=torch.float64).log_softmax(0)
    ref = torch.tensor([1.0, 0.4, 0.3, -0.2], dtype=torch.float64).log_softmax(0)
    by = LossSection(kl_coef=1.0, kl_weight="ratio")
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - ref)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    losses = policy_losses(logprobs, old, old, torch.zeros(4, dtype=torch.float64), [4], by)
    weighed = with_kl(losses, kl_terms(logprobs, ref, by), logprobs, old, by)
    mean = (old.exp() * weighed.losses_N).sum()
    (actual,) = torch.autograd.grad(mean, logits)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)
    assert float(mean.detach()) == pytest.approx(float(exact.detach()), rel=1e-12)


def test_the_interpolated_policy_is_one_step_behind() -> None:
    """At (a - 1) / a of the way from the sampling version to now (AReaL's `prox_approx`)."""
    ages = torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    sampled = torch.full((4,), -2.0, dtype=torch.float64)
    policy = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    by = LossSection(proximal="interpolated")
    found = proximal_of(sampled, sampled - 1, policy, by, ages_N=ages)
    assert found.tolist() == [-2.0, -2.0, -1.5, -1.25]
    assert not found.requires_grad


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_schedules(schedule: Any, warmup: int) -> None:
    """Step by step, beyond the end too."""
    decay = 0 if schedule == "constant" else 20
    by = OptimizerSection(
        lr=0.3, warmup_steps=warmup, schedule=schedule, decay_steps=decay, lr_end=0.03
    )
    for step in range(1, 30):
        assert lr_at(step, by) == pytest.approx(reference.lr(step, asdict(by)), rel=1e-12)


def test_mini_batches_are_whole_groups() -> None:
    """And no micro-batch is of two of them."""
    groups = ["a", "b", "a", "c", "d", "d", "b"]
    assert minibatch_of(groups, 2) == [0, 0, 0, 1, 1, 1, 0]
    cut = planned_cut([9, 3, 5, 4, 8, 2, 1], groups, 16, minibatches=2)
    cut.check(7)
    assert [{minibatch_of(groups, 2)[i] for i in own} for own in cut.members] in (
        [{0}, {0}, {1}, {1}],
        [{0}, {0}, {1}],
    )
    one = planned_cut([9, 3, 5], ["a", "b", "c"], 16)
    assert sorted(one.order) == [0, 1, 2]


@pytest.mark.parametrize("reduce", ["token", "sequence", "constant"])
def test_a_batch_that_is_rejected_whole_is_no_nan(reduce: Any) -> None:
    """Its loss is 0, as is its gradient; `rejected_fraction` says why."""
    by = LossSection(veto_low=0.9, reduce=reduce, constant_tokens=9 * (reduce == "constant"))
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    losses = policy_losses(policy, torch.full((2,), -3.0), torch.zeros(2), torch.ones(2), [2], by)
    share = reduced(
        losses.losses_N, [2], by, num_batch_tokens=2, num_batch_learnt=1, num_batch_samples=1
    )
    share.backward()  # type: ignore[no-untyped-call]
    assert (float(share.detach()), policy.grad.tolist()) == (0, [0, 0])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"weight_floor": 0.5}, r"weight_floor is 0.5, but trainer.loss.correction is 'truncate'"),
        (
            {"correction": "mask", "weight_floor": 3.0},
            r"weight_floor is 3, not below trainer.loss.weight_cap",
        ),
        ({"veto_low": 1.5}, r"veto_low must be in \[0, 1\], got 1.5"),
        ({"veto_high": 0.5}, r"veto_high must be at least 1, or 0 for none, got 0.5"),
        ({"rejection": "k2"}, r"rejection is 'k2' and trainer.loss.rejection_high is 0"),
        ({"rejection_high": 2.0}, r"rejection is 'none' and trainer.loss.rejection_high is 2"),
        (
            {"rejection": "k1", "rejection_high": 0.5},
            r"rejection_low is 0 and .*rejection_high is 0.5: they must",
        ),
        (
            {"rejection": "k3", "rejection_high": 1.0, "rejection_low": 0.1},
            r"rejection_low is 0.1, but .*rejection is 'k3': only k1",
        ),
        ({"entropy_share": 1.5}, r"entropy_share must be in \(0, 1\], got 1.5"),
        ({"entropy_share": 0.0}, r"entropy_share must be in \(0, 1\], got 0.0"),
        ({"overlong_buffer_tokens": 5}, r"overlong_buffer_tokens is 5, above trainer.loss.overl"),
        ({"reward_min": 0.5}, r"reward_min is 0.5, but trainer.loss.advantage is 'grpo': only"),
        ({"gae_lambda": 0.9}, r"gae_lambda is 0.9, but trainer.loss.advantage is 'grpo': only"),
        ({"value_warmup_steps": 2}, r"value_warmup_steps is 2, but trainer.loss.advantage is"),
        ({"advantage": "gae", "gae_gamma": 1.5}, r"gae_gamma must be in \(0, 1\], got 1.5"),
        ({"advantage": "gae", "value_lr": 0.0}, r"value_lr must be above 0, got 0.0"),
        (
            {"advantage": "gae", "off_policy_max": 1.0},
            r"off_policy_max is 1, but with .* a sample",
        ),
        ({"tau_positive": 0.0}, r"tau_positive must be above 0, got 0.0"),
    ],
)
def test_what_cannot_be_meant_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer.loss.{message}"):
        LossSection(**section)


def test_mini_batches_must_divide() -> None:
    with pytest.raises(ConfigError, match=r"minibatches is 3, which does not divide .*step is 16"):
        TrainerSection(minibatches=3)

"""Every loss, advantage and correction again, a token at a time, with its derivative by hand.

Shares nothing with the trainer's code but the names of the settings. A derivative is in the token's
own log-prob under the policy that learns; where a paper stops the gradient there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Row = Sequence["Token"]


class Token(NamedTuple):
    """One token of the loss; log-probs in nats."""

    pi: float
    prox: float
    mu: float
    advantage: float
    ref: float = 0.0
    entropy: float = 0.0
    factor: float = 1.0


class Term(NamedTuple):
    """A token's loss and its derivative."""

    value: float
    slope: float


def limit(x: float, low: float = -20.0, high: float = 20.0) -> float:
    return low if x < low else min(x, high)


def ratio(token: Token) -> tuple[float, float]:
    """rho, and its derivative in log pi: rho, or 0 where the log-ratio is clamped."""
    x = token.pi - token.prox
    rho = math.exp(limit(x))
    return rho, rho if -20 <= x <= 20 else 0.0


def bounded(token: Token) -> tuple[float, float]:
    """rho, at most 10, and its derivative: as in DPPO's code itself again, beyond the bound too."""
    rho = min(ratio(token)[0], 10.0)
    return rho, rho


# Losses: gain and slope of each token of a row, before the importance weight.


def ppo(row: Row, by: Mapping[str, Any]) -> list[Term]:
    """Schulman et al. 2017, with DAPO's two bounds and Ye et al.'s third."""
    return [_clip(*ratio(t), t.advantage, by, by["clip_dual"]) for t in row]


def gspo(row: Row, by: Mapping[str, Any]) -> list[Term]:
    """Zheng et al. 2025, GSPO-token: s_i = (product of rho)^(1 / |y|)."""
    mean = sum(t.pi - t.prox for t in row) / len(row)
    s = math.exp(limit(mean, -20, 10))
    slope = s if -20 <= mean <= 10 else 0.0
    return [_clip(s, slope, t.advantage, by, 0.0) for t in row]


def _clip(rho: float, slope: float, a: float, by: Mapping[str, Any], dual: float) -> Term:
    low, high = 1 - by["clip_low"], 1 + by["clip_high"]
    free, bound = rho * a, min(max(rho, low), high) * a
    if dual and a < 0 and min(free, bound) < dual * a:
        return Term(dual * a, 0.0)
    return Term(free, slope * a) if free <= bound else Term(bound, 0.0)


def cispo(row: Row, by: Mapping[str, Any]) -> list[Term]:
    """MiniMax-M1, equation 4 and 5, without the lower bound."""
    weights = [min(ratio(t)[0], 1 + by["clip_high"]) for t in row]
    return [
        Term(w * t.advantage * t.pi, w * t.advantage) for w, t in zip(weights, row, strict=True)
    ]


def sapo(row: Row, by: Mapping[str, Any]) -> list[Term]:
    """SAPO: f(r) = 4 / tau sigmoid(tau (r - 1)), whose slope at 1 is 1."""
    found = []
    for t in row:
        rho, slope = ratio(t)
        tau = by["tau_positive"] if t.advantage > 0 else by["tau_negative"]
        gate = 1 / (1 + math.exp(-tau * (rho - 1))) if rho < 600 else 1.0
        found.append(
            Term(4 / tau * gate * t.advantage, 4 * gate * (1 - gate) * slope * t.advantage)
        )
    return found


def dppo(row: Row, by: Mapping[str, Any]) -> list[Term]:
    """DPPO-Binary-TV and -KL: PPO's mask with the divergence for the ratio."""
    found = []
    for t in row:
        rho = ratio(t)[0]
        p, q = math.exp(t.prox), math.exp(t.pi)
        if by["divergence"] == "tv":
            d = abs(p - q)
        else:
            d = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        away = (t.advantage > 0 and rho > 1) or (t.advantage <= 0 and rho < 1)
        keep = not (away and d > by["divergence_max"])
        gain, slope = (x * t.advantage for x in bounded(t))
        found.append(Term(gain, slope) if keep else Term(0.0, 0.0))
    return found


def m2po(row: Row, by: Mapping[str, Any]) -> list[Term]:
    """M2PO's objective; its mask comes as the tokens' factor."""
    return [Term(bounded(t)[0] * t.advantage, bounded(t)[1] * t.advantage) for t in row]


def sft(row: Row, _: Mapping[str, Any]) -> list[Term]:
    """Weighted maximum likelihood: the log-prob itself is the gain."""
    return [Term(t.advantage * t.pi, t.advantage) for t in row]


def distill(row: Row, _: Mapping[str, Any]) -> list[Term]:
    """The policy gradient of the reverse KL: the reward of a token is log teacher - log student."""
    found = []
    for t in row:
        rho, slope = bounded(t)
        reward = t.advantage * limit(t.ref - t.pi)
        found.append(Term(rho * reward, slope * reward))
    return found


def divergence_of(
    logits: Sequence[float], teacher: Sequence[float], top: Sequence[int], beta: float
) -> tuple[float, list[float]]:
    """Of a student's and a teacher's logits: GKD's divergence over the tokens `top` and one more
    that stands for all others, with its derivative in the student's logits."""
    q, p = softmax(logits), softmax(teacher)
    share = [[own[i] for i in top] + [sum(own) - sum(own[i] for i in top)] for own in (q, p)]
    value, slopes = _of_buckets(*share, beta)
    of_token = [slopes[top.index(i)] if i in top else slopes[-1] for i in range(len(q))]
    mean = sum(s * x for s, x in zip(of_token, q, strict=True))
    return value, [x * (s - mean) for s, x in zip(of_token, q, strict=True)]


def divergence_of_top(
    student: Sequence[float], teacher: Sequence[float], beta: float
) -> tuple[float, list[float]]:
    """The same of the log-probs of some tokens, with its derivative in the student's. What these
    leave is a sum of -expm1 and -exp: of what came, no digit is lost."""
    q, p = ([math.exp(x) for x in own] for own in (student, teacher))
    for own, logs in ((q, student), (p, teacher)):
        first, *others = sorted(logs, reverse=True)
        own.append(math.fsum([-math.expm1(first), *(-math.exp(x) for x in others)]))
    value, slopes = _of_buckets(q, p, beta)
    return value, [x * (s - slopes[-1]) for x, s in zip(q[:-1], slopes[:-1], strict=True)]


def _of_buckets(q: Sequence[float], p: Sequence[float], beta: float) -> tuple[float, list[float]]:
    """The divergence, and its slopes in the student's probability of each bucket."""
    value, slopes = 0.0, []
    for a, b in zip(q, p, strict=True):
        m = beta * b + (1 - beta) * a
        if beta == 1:
            value += a * math.log(a / b)
            slopes.append(math.log(a / b) + 1)
        elif beta == 0:
            value += b * math.log(b / a)
            slopes.append(-b / a)
        else:
            value += beta * b * math.log(b / m) + (1 - beta) * a * math.log(a / m)
            slopes.append((1 - beta) * math.log(a / m))
    return value, slopes


def softmax(logits: Sequence[float]) -> list[float]:
    whole = sum(math.exp(x) for x in logits)
    return [math.exp(x) / whole for x in logits]


LOSSES = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
    "m2po": m2po,
    "sft": sft,
    "distill": distill,
}


# Corrections: the weight of each token of a row.


def weights(row: Row, by: Mapping[str, Any]) -> list[float]:
    """TIS, IcePop, MIS and their kin; 0 of what is rejected."""
    logs = [t.prox - t.mu for t in row]
    level = by["correction_level"]
    shared = {"sequence": sum(logs), "geometric": sum(logs) / len(logs)}
    found = []
    for own in logs:
        w = math.exp(limit(shared.get(level, own)))
        if by["correction"] == "truncate":
            w = min(w, by["weight_cap"])
        elif by["correction"] == "mask":
            w = w if by["weight_floor"] <= w <= by["weight_cap"] else 0.0
        else:
            w = 1.0
        found.append(w)
    kept = [not bad for bad in rejected(logs, by)]
    drift = sum(t.mu - t.pi for t in row) / len(row)
    if by["off_policy_max"] and row[0].advantage < 0 and drift > by["off_policy_max"]:
        kept = [False] * len(row)
    return [w * keep * t.factor for w, keep, t in zip(found, kept, row, strict=True)]


def rejected(logs: Sequence[float], by: Mapping[str, Any]) -> list[bool]:
    """A veto by any token, and the statistics k1, k2 and k3 of Schulman."""
    logs = [limit(x) for x in logs]
    veto = any(
        math.exp(x) < by["veto_low"] or (by["veto_high"] and math.exp(x) > by["veto_high"])
        for x in logs
    )
    kind = by["rejection"]
    if kind == "none":
        return [veto] * len(logs)
    of = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.expm1(x) - x}[kind]
    each = [of(x) for x in logs]
    whole = {
        "token": None,
        "sequence_sum": sum(each),
        "sequence_mean": sum(each) / len(each),
        "sequence_max": max(each),
    }[by["rejection_level"]]
    values = each if whole is None else [whole] * len(each)
    if kind == "k1":
        inside = [by["rejection_low"] <= math.exp(limit(x)) <= by["rejection_high"] for x in values]
        return [veto or not ok for ok in inside]
    return [veto or x > by["rejection_high"] for x in values]


# Terms beside the policy's.


def divergence(token: Token, w: float, by: Mapping[str, Any]) -> Term:
    """GRPO's KL term; weighed by the ratio, DeepSeek-V3.2's."""
    d = token.ref - token.pi
    x = limit(d)
    k = math.exp(x) - 1 - x if by["kl_estimator"] == "k3" else x * x / 2
    slope = 1 - math.exp(x) if by["kl_estimator"] == "k3" else -x
    if k > 10:
        k, slope = 10.0, 0.0
    if not -20 <= d <= 20:
        slope = 0.0
    if by["kl_weight"] == "ratio":
        rho, rho_slope = bounded(token)
        k, slope = w * rho * k, w * (rho_slope * k + rho * slope)
    return Term(by["kl_coef"] * k, by["kl_coef"] * slope)


def losses(rows: Sequence[Row], by: Mapping[str, Any]) -> list[Term]:
    """Every token's, row by row."""
    found = []
    for row in rows:
        gains, ws = LOSSES[by["kind"]](row, by), weights(row, by)
        sequence = sum(t.pi - t.prox for t in row) / len(row)
        for token, gain, w in zip(row, gains, ws, strict=True):
            kl = divergence(token, w, by) if by["kl_coef"] else Term(0.0, 0.0)
            rho = math.exp(limit(sequence, -20, 10)) if by["kind"] == "gspo" else ratio(token)[0]
            scores = by["entropy_coef"] * w * min(rho, 10.0) * (token.pi + token.entropy)
            found.append(
                Term(
                    -w * gain.value + kl.value - by["entropy_coef"] * token.entropy,
                    -w * gain.slope + kl.slope + scores,
                )
            )
    return found


# Advantages.


def advantages(
    groups: Mapping[str, Sequence[float]], by: Mapping[str, Any]
) -> dict[str, list[float]]:
    """By group, in its own order."""
    kind, every = by["advantage"], [r for rewards in groups.values() for r in rewards]
    if kind == "reinforce++":
        mean, std = moments(every)
        return {g: [scaled(r, mean, std) for r in rewards] for g, rewards in groups.items()}
    if kind in ("reward", "one", "gae"):
        least = by["reward_min"] or -math.inf
        return {
            g: [(1.0 if kind == "one" else r) if r >= least else 0.0 for r in rs]
            for g, rs in groups.items()
        }
    found = {g: [_of_group(r, rs, by) for r in rs] for g, rs in groups.items()}
    if kind == "reinforce++baseline":
        mean, std = moments([a for own in found.values() for a in own])
        found = {g: [scaled(a, mean, std) for a in own] for g, own in found.items()}
    return found


def gae(values: Sequence[float], reward: float, by: Mapping[str, Any]) -> list[float]:
    """Schulman et al. 2016, equation 16: the sum of (gamma lambda)^l times the residuals."""
    gamma, decay = by["gae_gamma"], by["gae_gamma"] * by["gae_lambda"]
    after = [*values[1:], 0.0]
    rewards = [0.0] * (len(values) - 1) + [reward]
    deltas = [r + gamma * nxt - v for r, nxt, v in zip(rewards, after, values, strict=True)]
    return [
        sum(decay**later * delta for later, delta in enumerate(deltas[at:]))
        for at in range(len(deltas))
    ]


def value(v: float, old: float, target: float, by: Mapping[str, Any]) -> Term:
    """PPO's reference code: the worse of the value's loss and of the clipped value's."""
    free, clip = 0.5 * (v - target) ** 2, by["value_clip"]
    near = old + limit(v - old, -clip, clip)
    if clip and 0.5 * (near - target) ** 2 > free:
        return Term(0.5 * (near - target) ** 2, 0.0)
    return Term(free, v - target)


def _of_group(reward: float, rewards: Sequence[float], by: Mapping[str, Any]) -> float:
    kind, (mean, std) = by["advantage"], moments(rewards)
    if len(rewards) == 1:
        lone = reward if by["lone"] == "reward" else 0.0
        return lone / (1 + 1e-6) if kind == "grpo" and by["normalize_std"] else lone
    if len(set(rewards)) == 1:
        return 0.0
    if kind == "rloo":
        return reward - (sum(rewards) - reward) / (len(rewards) - 1)
    if kind == "maxrl":
        return (reward - mean) / mean
    return scaled(reward, mean, std) if kind == "grpo" and by["normalize_std"] else reward - mean


def moments(values: Sequence[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    squares = sum((v - mean) ** 2 for v in values)
    return mean, math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else 0.0


def scaled(value: float, mean: float, std: float) -> float:
    return (value - mean) / (std + 1e-6) if std else 0.0


# What a batch decides.


def second_moment(squares: Sequence[float], most: float) -> list[bool]:
    """M2PO: drop the largest until the mean of the rest is small enough."""
    kept = sorted(squares)
    while kept and sum(kept) / len(kept) > most:
        kept = [s for s in kept if s < kept[-1]]
    return [bool(kept) and s <= kept[-1] for s in squares]


def lr(step: int, by: Mapping[str, Any]) -> float:
    """The schedules, from their pictures."""
    top, warm, end = by["lr"], by["warmup_steps"], by["decay_steps"]
    if step < warm:
        return float(top * step / warm)
    if by["schedule"] == "constant" or step == warm:
        return float(top)
    if step >= end:
        return float(by["lr_end"])
    height = top - by["lr_end"]
    if by["schedule"] == "linear":
        return float(top - height * (step - warm) / (end - warm))
    return float(top - height * math.sin(math.pi / 2 * (step - warm) / (end - warm)) ** 2)

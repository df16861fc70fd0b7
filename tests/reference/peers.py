"""Other trainers' losses, written from their sources: of a whole batch, with its derivative.

verl b178a3c (`trainer/ppo/core_algos.py`, `rollout_corr_helper.py`), prime-rl 559b447
(`trainer/rl/loss.py`). Rows of tokens as in `losses.py`; `prox` is what they call old, `mu` the
sampler's. No code of theirs and none of ours: numbers, a token at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tests.reference.losses import Row, Term

Rows = Sequence[Row]


def verl_gspo(rows: Rows, low: float, high: float) -> tuple[float, list[float]]:
    """Their aggregation of it is always "seq-mean-token-mean"."""
    terms = []
    for row in rows:
        s = math.exp(min(sum(t.pi - t.prox for t in row) / len(row), 10.0))
        bound = min(max(s, 1 - low), 1 + high)
        terms.append(
            [
                Term(-t.advantage * s, -t.advantage * s)
                if -t.advantage * s >= -t.advantage * bound
                else Term(-t.advantage * bound, 0.0)
                for t in row
            ]
        )
    return _sequence_mean(terms)


def verl_sapo(rows: Rows, tau_pos: float, tau_neg: float) -> tuple[float, list[float]]:
    """As above."""
    terms = []
    for row in rows:
        own = []
        for t in row:
            tau = tau_pos if t.advantage > 0 else tau_neg
            r = math.exp(t.pi - t.prox)
            gate = 1 / (1 + math.exp(-tau * (r - 1)))
            own.append(
                Term(-4 / tau * gate * t.advantage, -4 * gate * (1 - gate) * r * t.advantage)
            )
        terms.append(own)
    return _sequence_mean(terms)


def prime_rl(rows: Rows, mask_low: float, mask_high: float) -> tuple[float, list[float]]:
    """The default without its term (log r)^2: a sum, divided by the batch's tokens."""
    tokens = [t for row in rows for t in row]
    values, slopes = 0.0, []
    for t in tokens:
        off = math.exp(t.pi) - math.exp(t.mu)
        is_masked = off > mask_high if t.advantage > 0 else off < -mask_low
        gain = 0.0 if is_masked else t.advantage * math.exp(t.pi - t.mu)
        values -= gain
        slopes.append(-gain / len(tokens))
    return values / len(tokens), slopes


def verl_k1_keeps(row: Row, low: float, high: float) -> list[bool]:
    """`token_k1`: k1 is log mu - log old, and the bounds are bounds of its exponential."""
    return [low <= math.exp(t.mu - t.prox) <= high for t in row]


def verl_sequence_weights(rows: Rows, most: float) -> list[float]:
    """`rollout_is = sequence`, normalised: each sample counts once in the mean."""
    capped = [min(math.exp(sum(t.prox - t.mu for t in row)), most) for row in rows]
    mean = sum(capped) / len(capped)
    return [w / mean for w in capped]


def verl_reinforce_baseline(
    groups: Mapping[str, Sequence[float]], lengths: Mapping[str, Sequence[int]]
) -> dict[str, list[float]]:
    """`reinforce_plus_plus_baseline`: less the group's mean, then whitened over tokens."""
    centred = {
        g: [r - (sum(rs) / len(rs) if len(rs) > 1 else 0.0) for r in rs] for g, rs in groups.items()
    }
    spread = [
        a
        for g, own in centred.items()
        for a, n in zip(own, lengths[g], strict=True)
        for _ in range(n)
    ]
    mean = sum(spread) / len(spread)
    variance = sum((a - mean) ** 2 for a in spread) / (len(spread) - 1)
    return {g: [(a - mean) / math.sqrt(variance + 1e-8) for a in own] for g, own in centred.items()}


def _sequence_mean(rows: Sequence[Sequence[Term]]) -> tuple[float, list[float]]:
    values = [sum(term.value for term in row) / len(row) for row in rows]
    slopes = [term.slope / len(row) / len(rows) for row in rows for term in row]
    return sum(values) / len(rows), slopes

"""The section of a configuration about the policy loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.checks import not_negative, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSection:
    """Clipped policy loss against the version that sampled, weighed per token for what the sampling
    engine computes otherwise."""

    kind: Literal["ppo", "gspo", "cispo"] = "ppo"
    """What is clipped: each token's ratio; the sequence's (GSPO; `clip_low` 3e-4 and `clip_high`
    4e-4 are usual then); or the token's weight, which keeps its gradient (CISPO)."""
    reduce: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens; over samples of each one's mean; or over samples of each one's sum
    divided by `constant_tokens` (Dr. GRPO)."""
    constant_tokens: int = 0
    """What `reduce = "constant"` divides by; `rollout.max_new_tokens` is usual."""
    clip_low: float = 0.2
    """Ratio to the proximal policy is clipped at 1 - this."""
    clip_high: float = 0.28
    """... and at 1 + this."""
    clip_dual: float = 3.0
    """With `kind = "ppo"`: a token with a negative advantage weighs at most this many times its
    advantage, whatever its ratio; 0: no bound."""
    weight_cap: float = 2.0
    """Cap of the importance weight proximal / behavior."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation."""
    lone: Literal["zero", "reward"] = "zero"
    """Advantage of a sample without living siblings: 0, or its bare reward."""
    kl_coef: float = 0.0
    """Weight of the KL divergence from `logprob.reference`, added to each token's loss (GRPO); 0:
    none, and no reference is loaded."""
    kl_estimator: Literal["k3", "k2"] = "k3"
    """Its estimator for each token, of d = log reference - log policy: k3 is exp(d) - 1 - d, k2 is
    d * d / 2."""
    mask_truncated: bool = False
    """Samples that were cut at `rollout.max_new_tokens` stay out of the loss; siblings are still
    compared with them (overlong filtering, DAPO)."""

    def __post_init__(self) -> None:
        positive("trainer.loss", weight_cap=self.weight_cap)
        not_negative(
            "trainer.loss",
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            constant_tokens=self.constant_tokens,
            kl_coef=self.kl_coef,
        )
        if self.clip_low >= 1:
            raise ConfigError(f"trainer.loss.clip_low must be below 1, got {self.clip_low}")
        if self.clip_dual and self.clip_dual <= 1:
            raise ConfigError(
                f"trainer.loss.clip_dual must be above 1, or 0 for none, got {self.clip_dual}"
            )
        if (self.reduce == "constant") != bool(self.constant_tokens):
            raise ConfigError(
                f"trainer.loss.reduce is {self.reduce!r} with trainer.loss.constant_tokens "
                f"{self.constant_tokens}: the one needs the other"
            )

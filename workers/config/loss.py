"""The section of a configuration about the policy loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.checks import not_negative, positive

Kind = Literal["ppo", "gspo", "cispo", "sapo", "dppo", "m2po", "sft", "distill"]
Advantage = Literal[
    "grpo", "rloo", "reinforce++", "reinforce++baseline", "maxrl", "gae", "reward", "one"
]
UNCOMPARED = ("reward", "one")  # advantages that compare a reward with no other
WITHOUT_GROUPS = ("reinforce++", "gae", *UNCOMPARED)  # that do not compare a sample with its group


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSection:
    """Policy loss: advantages, what bounds a token's ratio, and what corrects the sampler's weight.
    Formulas and sources: infra/docs/loss.md; `rlstreams explain` prints the one that will run."""

    kind: Kind = "ppo"
    """What bounds a step: the ratio of a token (PPO) or of a sequence (GSPO, with `clip_low` 3e-4,
    `clip_high` 4e-4), the token's weight (CISPO), a soft gate (SAPO), a divergence (DPPO), the
    batch's second moment (M2PO). `sft` is the likelihood of the answers alone, without a ratio;
    `distill` is the divergence from a teacher, `logprob.reference`, on the model's own answers."""
    proximal: Literal["sampled", "behavior", "step_start", "interpolated"] = "sampled"
    """Policy that the ratio is taken to: the version that sampled, scored again; the sampler
    itself; the weights before the step's first update; or an approximation of these."""
    reduce: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens; over samples of each one's mean; or of each one's sum divided by
    `constant_tokens`."""
    constant_tokens: int = 0
    """What `reduce = "constant"` divides by; `rollout.max_new_tokens` is usual."""
    clip_low: float = 0.2
    """Ratio to the proximal policy is clipped at 1 - this."""
    clip_high: float = 0.28
    """... and at 1 + this."""
    clip_dual: float = 3.0
    """A token of negative advantage weighs at most this many times its advantage; 0: no bound. Of
    `ppo`."""
    tau_positive: float = 1.0
    """With `kind = "sapo"`: temperature of the gate where the advantage is positive."""
    tau_negative: float = 1.05
    """... and where it is not."""
    divergence: Literal["tv", "kl"] = "tv"
    """Of `dppo`: total variation or KL divergence, of the sampled token against all others."""
    divergence_max: float = 0.2
    """Of `dppo`: a token further than this from the proximal policy moves away no more."""
    second_moment_max: float = 0.04
    """Of `m2po`: the batch's mean of (log policy / behavior)^2; the tokens furthest off are
    masked."""
    advantage: Advantage = "grpo"
    """What a reward is compared with: the group (GRPO), the siblings (RLOO), the batch
    (REINFORCE++), the group, divided by its mean (MaxRL), or a critic's value of each token
    (GAE); `reward`: nothing; `one`: each sample has advantage 1."""
    reward_min: float = 0.0
    """With `reward` and `one`: a sample of a lower reward has advantage 0; 0: none has."""
    normalize_std: bool = True
    """With `grpo`: divide by the group's standard deviation; false is Dr. GRPO. With `gae`:
    advantages less their mean, divided by their deviation, over the batch's tokens."""
    gae_gamma: float = 1.0
    """Of `gae`: discount of a later token's value."""
    gae_lambda: float = 1.0
    """Of `gae`: 1 takes the reward less the token's value, 0 the next token's value alone."""
    value_coef: float = 0.1
    """Of `gae`: weight of the value's loss in each token's loss."""
    value_clip: float = 0.2
    """Of `gae`: a value learns no further than this from that of the step's start; 0: no bound."""
    value_lr: float = 1e-3
    """Of `gae`: learning rate of the value head, constant."""
    value_warmup_steps: int = 0
    """Of `gae`: first steps, in which the value head alone learns."""
    lone: Literal["zero", "reward"] = "zero"
    """Advantage of a sample without living siblings: 0, or its bare reward."""
    overlong_tokens: int = 0
    """Answers as long as this lose `overlong_factor` of their reward; 0: none do."""
    overlong_buffer_tokens: int = 0
    """... and shorter ones by up to so many tokens a share of it, rising linearly."""
    overlong_factor: float = 1.0
    """Greatest loss of reward through length."""
    correction: Literal["truncate", "mask", "none"] = "truncate"
    """Importance weight proximal / behavior: cut at `weight_cap` (TIS), 0 outside of its bounds
    (IcePop, MIS), or 1."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Whose weight it is: each token's, the sample's product, or its geometric mean."""
    weight_cap: float = 2.0
    """Upper bound of the importance weight."""
    weight_floor: float = 0.0
    """Lower bound of a weight that `correction = "mask"` keeps."""
    weight_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    veto_low: float = 0.0
    """A sample is rejected if proximal / behavior of one token is below this; 0: off."""
    veto_high: float = 0.0
    """... or above this; 0: off."""
    rejection: Literal["none", "k1", "k2", "k3"] = "none"
    """Statistic of proximal / behavior, `k1`, `k2` or `k3`, by which tokens or samples go."""
    rejection_level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    """Whose statistic counts: each token's, or the sample's sum, mean or maximum."""
    rejection_low: float = 0.0
    """With k1: the ratio below which is rejected."""
    rejection_high: float = 0.0
    """Statistic above which is rejected."""
    off_policy_max: float = 0.0
    """A sample of negative advantage is rejected if its tokens' mean of log behavior / policy is
    above this; 0: off."""
    kl_coef: float = 0.0
    """Weight of the KL divergence from `logprob.reference` in each token's loss; 0: none, and no
    reference is loaded."""
    kl_estimator: Literal["k3", "k2"] = "k3"
    """Its estimator for each token: `k3` or `k2`."""
    kl_weight: Literal["none", "ratio"] = "none"
    """`ratio`: each estimate is weighed by the importance weight and the ratio, so it is unbiased
    for stale samples."""
    entropy_coef: float = 0.0
    """Weight of the policy's entropy, which is subtracted from each token's loss."""
    entropy_share: float = 1.0
    """Share of the batch's tokens that learn, those of highest entropy; below 1: one more forward
    pass."""
    distill_top_k: int = 0
    """Of `distill`: likeliest tokens of the teacher that its distribution is compared in; 0: the
    sampled token alone. Each takes 8 bytes a sampled token in the log."""
    distill_beta: float = 1.0
    """Of `distill`: 1 is the reverse KL divergence, from the teacher; with `distill_top_k` also 0,
    the forward one, or between them the generalized Jensen-Shannon divergence (GKD)."""
    mask_truncated: bool = False
    """Samples that were cut stay out of the loss; siblings are still compared with them."""

    @property
    def looks_first(self) -> bool:
        """Whether a step begins with a forward pass over the whole batch."""
        return (
            self.proximal == "step_start"
            or self.kind == "m2po"
            or self.entropy_share < 1
            or self.advantage == "gae"
        )

    @property
    def why_compared(self) -> str:
        """The setting that asks for log-probs of `logprob.reference`, with its value; "": none."""
        if self.kind == "distill":
            return "trainer.loss.kind is 'distill'"
        return f"trainer.loss.kl_coef is {self.kl_coef:g}" if self.kl_coef else ""

    def __post_init__(self) -> None:
        positive(
            "trainer.loss",
            weight_cap=self.weight_cap,
            tau_positive=self.tau_positive,
            tau_negative=self.tau_negative,
            divergence_max=self.divergence_max,
            second_moment_max=self.second_moment_max,
            overlong_factor=self.overlong_factor,
            entropy_share=self.entropy_share,
            gae_gamma=self.gae_gamma,
            value_coef=self.value_coef,
            value_lr=self.value_lr,
        )
        not_negative(
            "trainer.loss",
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            constant_tokens=self.constant_tokens,
            overlong_tokens=self.overlong_tokens,
            overlong_buffer_tokens=self.overlong_buffer_tokens,
            weight_floor=self.weight_floor,
            veto_low=self.veto_low,
            veto_high=self.veto_high,
            rejection_low=self.rejection_low,
            rejection_high=self.rejection_high,
            off_policy_max=self.off_policy_max,
            reward_min=self.reward_min,
            gae_lambda=self.gae_lambda,
            value_clip=self.value_clip,
            value_warmup_steps=self.value_warmup_steps,
            kl_coef=self.kl_coef,
            entropy_coef=self.entropy_coef,
            distill_top_k=self.distill_top_k,
            distill_beta=self.distill_beta,
        )
        if problem := next(self._problems(), ""):
            raise ConfigError(f"trainer.loss.{problem}")

    def _problems(self) -> Iterator[str]:
        """What cannot be meant, each with field and value."""
        if self.clip_low >= 1:
            yield f"clip_low must be below 1, got {self.clip_low}"
        if self.clip_dual and self.clip_dual <= 1:
            yield f"clip_dual must be above 1, or 0 for none, got {self.clip_dual}"
        if (self.reduce == "constant") != bool(self.constant_tokens):
            yield (
                f"reduce is {self.reduce!r} with trainer.loss.constant_tokens "
                f"{self.constant_tokens}: the one needs the other"
            )
        if self.reward_min and self.advantage not in UNCOMPARED:
            yield (
                f"reward_min is {self.reward_min:g}, but trainer.loss.advantage is "
                f"{self.advantage!r}: only 'reward' and 'one' leave samples out by it"
            )
        if self.entropy_share > 1:
            yield f"entropy_share must be at most 1, got {self.entropy_share}"
        if self.overlong_buffer_tokens > self.overlong_tokens:
            yield (
                f"overlong_buffer_tokens is {self.overlong_buffer_tokens}, above "
                f"trainer.loss.overlong_tokens {self.overlong_tokens}"
            )
        if self.weight_floor and self.correction != "mask":
            yield (
                f"weight_floor is {self.weight_floor}, but trainer.loss.correction is "
                f"{self.correction!r}: only 'mask' has a lower bound"
            )
        if self.weight_floor >= self.weight_cap:
            yield f"weight_floor is {self.weight_floor}, not below weight_cap {self.weight_cap}"
        if self.veto_low > 1:
            yield f"veto_low must be at most 1, got {self.veto_low}"
        if self.veto_high and self.veto_high < 1:
            yield f"veto_high must be at least 1, or 0 for none, got {self.veto_high}"
        yield from self._distill_problems()
        yield from self._critic_problems()
        yield from self._rejection_problems()

    def _distill_problems(self) -> Iterator[str]:
        if self.kind == "distill" and self.advantage not in UNCOMPARED:
            yield (
                f"kind is 'distill', but trainer.loss.advantage is {self.advantage!r}: the teacher "
                'says what is better; set "one", with reward_min to learn from good answers alone, '
                'or "reward"'
            )
        if self.distill_top_k and self.correction != "none":
            yield (
                f"correction is {self.correction!r}, but with trainer.loss.distill_top_k "
                f"{self.distill_top_k} the loss of a token does not depend on which was sampled: "
                'set "none"'
            )
        if self.kind == "distill" and self.kl_coef:
            yield (
                f"kl_coef is {self.kl_coef:g}, but trainer.loss.kind is 'distill': both would pull "
                "to the one logprob.reference; set it to 0"
            )
        for name, off in (("distill_top_k", 0), ("distill_beta", 1.0)):
            if self.kind != "distill" and (value := getattr(self, name)) != off:
                yield (
                    f"{name} is {value:g}, but trainer.loss.kind is {self.kind!r}: only 'distill' "
                    "has a teacher"
                )
        if self.distill_beta > 1:
            yield f"distill_beta must be at most 1, got {self.distill_beta:g}"
        if self.distill_beta != 1 and not self.distill_top_k:
            yield (
                f"distill_beta is {self.distill_beta:g} with trainer.loss.distill_top_k 0: of the "
                "sampled token alone only the reverse KL divergence, 1, can be estimated"
            )

    def _critic_problems(self) -> Iterator[str]:
        for name in ("gae_gamma", "gae_lambda"):
            if (value := getattr(self, name)) > 1:
                yield f"{name} must be at most 1, got {value}"
        if self.advantage == "gae":
            if self.off_policy_max:
                yield (
                    f"off_policy_max is {self.off_policy_max:g}, but with trainer.loss.advantage "
                    "'gae' a sample has no advantage, its tokens have: set it to 0"
                )
            return
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.startswith(("gae_", "value_")) and value != field.default:
                yield (
                    f"{field.name} is {value:g}, but trainer.loss.advantage is "
                    f"{self.advantage!r}: only 'gae' has a critic"
                )

    def _rejection_problems(self) -> Iterator[str]:
        low, high = self.rejection_low, self.rejection_high
        if (self.rejection == "none") != (high == 0):
            yield (
                f"rejection is {self.rejection!r} with trainer.loss.rejection_high {high}: the one "
                "needs the other"
            )
        if low and self.rejection != "k1":
            yield f"rejection_low is {low}, but rejection is {self.rejection!r}: only k1 has one"
        if self.rejection == "k1" and not low < 1 <= high:
            yield f"rejection_low {low} and rejection_high {high} must have 1 between them"
        if self.rejection == "k1" and self.rejection_level == "sequence_max":
            yield "rejection is 'k1' with rejection_level 'sequence_max': take 'k2' or 'k3'"

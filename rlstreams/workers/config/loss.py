"""The section of a configuration about the policy loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal, get_args

from rlstreams.workers.config.checks import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveShare,
    Section,
    Share,
    ShareBelow1,
)
from rlstreams.workers.config.user_code import Option, Own, ours_or_own

Kind = Literal["ppo", "gspo", "cispo", "sapo", "dppo", "m2po", "sft", "distill"]
Advantage = Literal[
    "grpo", "rloo", "reinforce++", "reinforce++baseline", "maxrl", "gae", "reward", "one"
]
KINDS: tuple[str, ...] = get_args(Kind)
ADVANTAGES: tuple[str, ...] = get_args(Advantage)
UNCOMPARED = ("reward", "one")  # advantages that compare a reward with no other
RATIO_MAX = 10.0  # policy / proximal, where a loss multiplies by it and does not clip it
WITHOUT_GROUPS = ("reinforce++", "gae", *UNCOMPARED)  # that do not compare a sample with its group


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSection(Section, section="trainer.loss"):
    """Policy loss: advantages, bounds of a token's ratio, and corrections of the sampler's weight.
    Formulas and sources: infra/docs/loss.md; `rlstreams config loss` prints the one that runs."""

    kind: Annotated[str, ours_or_own(KINDS)] = "ppo"
    """Bound of a step: the ratio of a token (PPO) or of a sequence (GSPO, with `clip_low` 0.03,
    `clip_high` 0.04; to the step's start 3e-4, 4e-4), the token's weight (CISPO), a soft gate
    (SAPO), a divergence (DPPO), the batch's second moment (M2PO). `sft`: the answers' likelihood;
    `distill`: the divergence from a teacher, `logprob.reference`; or your `file.py:function` or
    `module:function`, called in the trainer with (tokens)."""
    options: dict[str, Option] = field(default_factory=dict)
    """Keyword arguments for your loss. They are in the log as they are written here: no secrets."""
    proximal: Literal["sampled", "behavior", "step_start", "interpolated"] = "sampled"
    """Policy that the ratio is taken to: the version that sampled, scored again; the sampler
    itself; the weights before the step's first update; or an approximation of these."""
    reduce: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens; over samples of each one's mean; or of each one's sum divided by
    `constant_tokens`."""
    constant_tokens: NonNegativeInt = 0
    """Divisor of `reduce = "constant"`; `rollout.max_new_tokens` is usual."""
    clip_low: ShareBelow1 = 0.2
    """Ratio to the proximal policy is clipped at 1 - this."""
    clip_high: NonNegativeFloat = 0.28
    """... and at 1 + this."""
    clip_dual: float = 3.0
    """A token of negative advantage weighs at most this many times its advantage; 0: no bound. Of
    `ppo`."""
    tau_positive: PositiveFloat = 1.0
    """With `kind = "sapo"`: temperature of the gate where the advantage is positive."""
    tau_negative: PositiveFloat = 1.05
    """... and where it is not."""
    divergence: Literal["tv", "kl"] = "tv"
    """Of `dppo`: total variation or KL divergence, of the sampled token against all others."""
    divergence_max: PositiveFloat = 0.2
    """Of `dppo`: a token further than this from the proximal policy moves away no more."""
    second_moment_max: PositiveFloat = 0.04
    """Of `m2po`: the batch's mean of (log policy / behavior)^2; the tokens furthest off are
    masked."""
    advantage: Annotated[str, ours_or_own(ADVANTAGES)] = "grpo"
    """Baseline of a reward: the group (GRPO), the siblings (RLOO), the batch
    (REINFORCE++), the group, divided by its mean (MaxRL), or a critic's value of each token
    (GAE); `reward`: none; `one`: each sample has advantage 1; or your `file.py:function` or
    `module:function`, called in the trainer with (samples) of a batch."""
    advantage_options: dict[str, Option] = field(default_factory=dict)
    """Keyword arguments for your advantage, as `options` for your loss."""
    reward_min: NonNegativeFloat = 0.0
    """With `reward` and `one`: a sample of a lower reward has advantage 0; 0: none has."""
    normalize_std: bool = True
    """With `grpo`: divide by the group's standard deviation; false is Dr. GRPO. With `gae`:
    normalise advantages over the batch's tokens."""
    gae_gamma: PositiveShare = 1.0
    """Of `gae`: discount of a later token's value."""
    gae_lambda: Share = 1.0
    """Of `gae`: 1 takes the reward less the token's value, 0 the next token's value alone."""
    value_coef: PositiveFloat = 0.1
    """Of `gae`: weight of the value's loss in each token's loss."""
    value_clip: NonNegativeFloat = 0.2
    """Of `gae`: a value learns no further than this from that of the step's start; 0: no bound."""
    value_lr: PositiveFloat = 1e-3
    """Of `gae`: learning rate of the value head, constant."""
    value_warmup_steps: NonNegativeInt = 0
    """Of `gae`: first steps, in which the value head alone learns."""
    lone: Literal["zero", "reward"] = "zero"
    """Advantage of a sample without living siblings: 0, or its bare reward."""
    overlong_tokens: NonNegativeInt = 0
    """Answers as long as this lose `overlong_factor` of their reward; 0: none do."""
    overlong_buffer_tokens: NonNegativeInt = 0
    """... and shorter ones by up to so many tokens a share of it, rising linearly."""
    overlong_factor: PositiveFloat = 1.0
    """Greatest loss of reward through length."""
    correction: Literal["truncate", "mask", "none"] = "truncate"
    """Importance weight proximal / behavior: cut at `weight_cap` (TIS), 0 outside of its bounds
    (IcePop, MIS), or 1."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Level of the weight: each token's, the sample's product, or its geometric mean."""
    weight_cap: PositiveFloat = 2.0
    """Upper bound of the importance weight."""
    weight_floor: NonNegativeFloat = 0.0
    """Lower bound of a weight that `correction = "mask"` keeps."""
    weight_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    veto_low: Share = 0.0
    """A sample is rejected if proximal / behavior of one token is below this; 0: off."""
    veto_high: NonNegativeFloat = 0.0
    """... or above this; 0: off."""
    rejection: Literal["none", "k1", "k2", "k3"] = "none"
    """Statistic of proximal / behavior, `k1`, `k2` or `k3`, by which tokens or samples go."""
    rejection_level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    """Level of the statistic: each token's, or the sample's sum, mean or maximum."""
    rejection_low: NonNegativeFloat = 0.0
    """With k1: the ratio below which is rejected."""
    rejection_high: NonNegativeFloat = 0.0
    """Statistic above which is rejected."""
    off_policy_max: NonNegativeFloat = 0.0
    """A sample of negative advantage is rejected if its mean of log behavior / policy is above
    this; 0: off."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence from `logprob.reference` in each token's loss; 0: no reference is
    loaded."""
    kl_estimator: Literal["k3", "k2"] = "k3"
    """Its estimator for each token: `k3` or `k2`."""
    kl_weight: Literal["none", "ratio"] = "none"
    """`ratio`: each estimate is weighed by the importance weight and the ratio, so it is unbiased
    for stale samples."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the policy's entropy, which is subtracted from each token's loss."""
    entropy_share: PositiveShare = 1.0
    """Share of the batch's tokens that learn, those of highest entropy; below 1: one more forward
    pass."""
    distill_top_k: NonNegativeInt = 0
    """Of `distill`: likeliest tokens of the teacher that are compared; 0: the sampled token alone.
    Each takes 8 bytes a sampled token in the log."""
    distill_beta: Share = 1.0
    """Of `distill`: 1 is the reverse KL divergence, from the teacher; with `distill_top_k` also 0,
    the forward one, or between them the generalized Jensen-Shannon divergence (GKD)."""
    mask_truncated: bool = False
    """Samples that were cut stay out of the loss; siblings are still compared with them."""

    @property
    def has_own_kind(self) -> bool:
        """Whether the loss is a function of the user's."""
        return self.kind not in KINDS

    @property
    def has_own_advantage(self) -> bool:
        """Whether the advantage is a function of the user's."""
        return self.advantage not in ADVANTAGES

    def own(self) -> Iterator[Own]:
        """The user's functions that these fields name."""
        if self.has_own_kind:
            yield f"{self._section}.kind", self.kind, self.options
        if self.has_own_advantage:
            yield f"{self._section}.advantage", self.advantage, self.advantage_options

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

    def _problems(self) -> Iterator[str]:
        if self.clip_dual and self.clip_dual <= 1:
            yield f"trainer.loss.clip_dual must be above 1, or 0 for none, got {self.clip_dual}"
        if (self.reduce == "constant") != bool(self.constant_tokens):
            yield "[reduce] and [constant_tokens]: the one needs the other"
        if self.reward_min and self.advantage not in UNCOMPARED:
            yield "[reward_min], but [advantage]: only 'reward' and 'one' leave samples out by it"
        if self.overlong_buffer_tokens > self.overlong_tokens:
            yield "[overlong_buffer_tokens], above [overlong_tokens]"
        if self.weight_floor and self.correction != "mask":
            yield "[weight_floor], but [correction]: only 'mask' has a lower bound"
        if self.weight_floor >= self.weight_cap:
            yield "[weight_floor], not below [weight_cap]"
        if self.veto_high and self.veto_high < 1:
            yield f"trainer.loss.veto_high must be at least 1, or 0 for none, got {self.veto_high}"
        for name, is_own in (("kind", self.has_own_kind), ("advantage", self.has_own_advantage)):
            options = "options" if name == "kind" else "advantage_options"
            if getattr(self, options) and not is_own:
                yield f"[{options}], but [{name}]: only a function of your own has options"
        yield from self._distill_problems()
        yield from self._critic_problems()
        yield from self._rejection_problems()

    def _distill_problems(self) -> Iterator[str]:
        if self.kind != "distill":
            for name, off in (("distill_top_k", 0), ("distill_beta", 1.0)):
                if getattr(self, name) != off:
                    yield f"[{name}], but [kind]: only 'distill' has a teacher"
            return
        if self.advantage not in UNCOMPARED and not self.has_own_advantage:
            yield (
                '[kind], but [advantage]: the teacher says what is better; set "one", with '
                'reward_min to learn from good answers alone, or "reward"; to learn from a '
                "comparison of rewards and a teacher at once, leave kind at 'ppo' and set kl_coef"
            )
        if self.distill_top_k and self.correction != "none":
            yield (
                "[correction] and [distill_top_k]: the loss of a token does not depend on which "
                'was sampled; set trainer.loss.correction to "none"'
            )
        if self.kl_coef:
            yield (
                "[kl_coef], but [kind]: both would pull to the one logprob.reference, for a run "
                "has one; set it to 0"
            )
        if self.distill_beta != 1 and not self.distill_top_k:
            yield (
                "[distill_beta] and [distill_top_k]: of the sampled token alone only the reverse "
                "KL divergence, 1, can be estimated"
            )

    def _critic_problems(self) -> Iterator[str]:
        if self.advantage == "gae" and self.off_policy_max:
            yield (
                "[off_policy_max], but with trainer.loss.advantage 'gae' a sample has no "
                "advantage, its tokens have: set it to 0"
            )
        for own in fields(self) if self.advantage != "gae" else ():
            is_other = getattr(self, own.name) != own.default
            if own.name.startswith(("gae_", "value_")) and is_other:
                yield f"[{own.name}], but [advantage]: only 'gae' has a critic"

    def _rejection_problems(self) -> Iterator[str]:
        if (self.rejection == "none") != (self.rejection_high == 0):
            yield "[rejection] and [rejection_high]: the one needs the other"
        if self.rejection_low and self.rejection != "k1":
            yield "[rejection_low], but [rejection]: only k1 has one"
        if self.rejection == "k1" and not self.rejection_low < 1 <= self.rejection_high:
            yield "[rejection_low] and [rejection_high]: they must have 1 between them"
        if self.rejection == "k1" and self.rejection_level == "sequence_max":
            yield "[rejection] and [rejection_level]: take 'k2' or 'k3'"

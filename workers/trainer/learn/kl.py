"""How far the policy that learns is from a reference, token by token, as a term of the loss.

GRPO's term: Shao et al., arXiv 2402.03300, section 4.1.1; estimators: Schulman, "Approximating KL
divergence" (joschu.net/blog/kl-approx.html). As there, and in verl's `kl_loss`, it is not weighed
by the ratios of the policy loss: of stale samples it is an estimate under the policy that sampled.

Axes: `N` tokens of the loss, row by row. Log-probs are in nats.
"""

from __future__ import annotations

from torch import Tensor

from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.trainer.learn.loss import LOG_RATIO_LIMIT, TokenLosses

KL_LIMIT = 10.0  # nats a token, as in verl: beyond it a token weighs no more and pulls no more


def kl_terms(policy_N: Tensor, reference_N: Tensor, by: LossSection) -> Tensor:
    """KL(policy || reference) of each token, at least 0, with gradient; nats.

    With d = log reference - log policy, clamped to +-20: k3 is exp(d) - 1 - d, which is unbiased
    and pulls hardest where the reference finds a token likelier; k2 is d^2 / 2, whose gradient
    grows with d alone. Both are clamped to 10 from above.
    """
    d_N = (reference_N - policy_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    terms_N = d_N.expm1() - d_N if by.kl_estimator == "k3" else d_N.square() / 2
    return terms_N.clamp(max=KL_LIMIT)


def with_kl(losses: TokenLosses, kl_N: Tensor, by: LossSection) -> TokenLosses:
    """The same losses, with `kl_coef` times the divergence added to each token's."""
    return losses._replace(losses_N=losses.losses_N + by.kl_coef * kl_N)

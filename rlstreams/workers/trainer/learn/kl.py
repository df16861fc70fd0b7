"""Terms of the loss beside the policy's: divergence from a reference, and entropy, by token.

GRPO's term: Shao et al., arXiv 2402.03300, section 4.1.1; estimators: Schulman, "Approximating KL
divergence" (joschu.net/blog/kl-approx.html). As there, and in verl's `kl_loss`, it is not weighed
by the ratios of the policy loss: for stale samples it is an estimate under the sampling policy.
`kl_weight = "ratio"` weighs it (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

Axes: `N` tokens of the loss, row by row. Log-probs are in nats.
"""

from __future__ import annotations

from torch import Tensor

from rlstreams.workers.config.loss import RATIO_MAX, LossSection
from rlstreams.workers.trainer.learn.correction import bounded_ratios, clamped
from rlstreams.workers.trainer.learn.loss import TokenLosses

KL_LIMIT = 10.0  # nats a token, as in verl: beyond it a token weighs no more and pulls no more


def kl_terms(policy_N: Tensor, reference_N: Tensor, by: LossSection) -> Tensor:
    """KL(policy || reference) of each token, at least 0, with gradient; nats.

    With d = log reference - log policy, clamped to +-20: k3 is exp(d) - 1 - d, which is unbiased
    and pulls hardest where the reference finds a token likelier; k2 is d^2 / 2, whose gradient
    grows with d alone. Both are clamped to 10 from above.
    """
    d_N = clamped(reference_N - policy_N)
    terms_N = d_N.expm1() - d_N if by.kl_estimator == "k3" else d_N.square() / 2
    return terms_N.clamp(max=KL_LIMIT)


def with_kl(
    losses: TokenLosses, kl_N: Tensor, policy_N: Tensor, proximal_N: Tensor, by: LossSection
) -> TokenLosses:
    """The same losses, with `kl_coef` times the divergence added to each token's.

    With `kl_weight = "ratio"` each divergence is multiplied by w min(rho, 10), with gradient
    through rho = policy / proximal: for k3 that is the divergence's own gradient, under any
    sampler.
    """
    if by.kl_weight == "ratio":
        kl_N = losses.weights_N * bounded_ratios(policy_N, proximal_N) * kl_N
    return losses._replace(losses_N=losses.losses_N + by.kl_coef * kl_N)


def with_entropy(
    losses: TokenLosses, policy_N: Tensor, entropy_N: Tensor, by: LossSection
) -> TokenLosses:
    """The same losses, with `entropy_coef` times the entropy H subtracted from each token's.

    Its gradient is estimated from the sampled token: that of -w min(rho, 10) (log pi + H) log pi,
    with gradient through the last factor alone. Over the policy's own tokens its mean is H's
    gradient (Williams and Peng, Connection Science 3, 1991); + H is a baseline and changes no mean.

    Args:
        entropy_N: of the whole distribution at each token, no gradient.
    """
    at_N = policy_N.detach()
    scale_N = losses.weights_N * losses.ratios_N.clamp(max=RATIO_MAX) * (at_N + entropy_N)
    bonus_N = entropy_N - scale_N * (policy_N - at_N)
    return losses._replace(losses_N=losses.losses_N - by.entropy_coef * bonus_N)

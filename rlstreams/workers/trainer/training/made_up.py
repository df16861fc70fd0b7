"""Made-up tokens, samples and parameters, with which a user's functions are tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import OptimizerSection, TrainerSection
from rlstreams.workers.config.user_code import LOSS, OPTIMIZER
from rlstreams.workers.sandbox.recorded import Code, OwnFunction, own_functions
from rlstreams.workers.trainer.learn.adam import Parameter
from rlstreams.workers.trainer.learn.loss import LossTokens
from rlstreams.workers.trainer.learn.own import own_losses, own_update
from rlstreams.workers.trainer.learn.packing import Float32s
from rlstreams.workers.trainer.learn.rewarded import RewardedSample, advantages_of

_PARAMETERS = {  # a matrix of each form, a norm's weights, stacked experts
    "model.embed_tokens.weight": (12, 4),
    "model.layers.0.self_attn.k_proj.weight": (2, 4),
    "model.layers.0.mlp.down_proj.weight": (4, 8),
    "model.layers.0.mlp.experts.gate_up_proj": (2, 8, 4),
    "model.norm.weight": (4,),
}


def made_up(by: TrainerSection, group_size: int, parts: Sequence[str], code: Code) -> list[str]:
    """Call the user's functions twice with a few made-up tokens, samples and parameters.

    Args:
        parts: names of the reward's parts.

    Returns:
        Lines on what was called.

    Raises:
        OwnCodeError: one cannot be loaded or called, gave a wrong shape, no finite number or no
            gradient, or two results that differ.
    """
    lines = []
    for field, function in own_functions(by, code).items():
        if field == LOSS:
            first, again = (_tried_loss(function, by.loss) for _ in range(2))
        elif field == OPTIMIZER:
            first, again = (_tried_update(function, by.optimizer) for _ in range(2))
        else:
            samples = _samples(group_size, parts)
            found = (advantages_of(samples, by.loss, code) for _ in range(2))
            first, again = (np.concatenate([a.of_samples, *a.of_tokens]) for a in found)
        if not np.array_equal(first, again, equal_nan=True):  # state may be
            raise function.refused(
                f"gave {_differing(first, again)} for the same {function.given}: a redo would not "
                "make the same weights; draw no random numbers, and keep nothing between calls"
                + " but the state that it returns"
                * (field == OPTIMIZER)
            )
        lines.append(f"{function.place} was called twice with made-up {function.given}")
    return lines


def _differing(first: Float32s, again: Float32s) -> str:
    """The first number that differs between two results."""
    if first.shape != again.shape:
        return f"{first.size} numbers, then {again.size}"
    at = int(np.flatnonzero(first != again)[0])
    return f"{first[at]:.6g}, then {again[at]:.6g}"


def _tried_loss(function: OwnFunction, by: LossSection) -> Float32s:
    """Losses and gradients of made-up tokens."""
    tokens = _tokens(by)
    losses_N, *_ = own_losses(function, tokens)
    losses_N.sum().backward()  # type: ignore[no-untyped-call]
    gradient_N = tokens.policy_N.grad
    if gradient_N is None or not gradient_N.any():
        raise function.refused("gave losses of which tokens.policy_N has no gradient")
    for name, own in (("a loss", losses_N.detach()), ("a gradient", gradient_N)):
        if not own.isfinite().all():
            at = int((~own.isfinite()).nonzero()[0])
            raise function.refused(f"gave {name} of {float(own[at])} for made-up token {at}")
    return torch.cat([losses_N.detach(), gradient_N]).numpy()


def _tried_update(function: OwnFunction, section: OptimizerSection) -> Float32s:
    """Values and state after two updates of made-up parameters."""
    draw = np.random.default_rng(0)
    found = [np.zeros(0, np.float32)]
    changed = False
    for name, shape in _PARAMETERS.items():
        state: Mapping[str, Tensor] = {}
        values, *gradients = (
            torch.from_numpy(draw.standard_normal(shape).astype(np.float32)) for _ in range(3)
        )
        for gradient in gradients:
            given = Parameter(
                name=name, values=values.clone(), gradient=gradient, state=state, lr=1e-2,
                section=section,
            )  # fmt: skip
            before = values
            with torch.no_grad():
                values, state = own_update(function, given)
            changed |= not torch.equal(before, values)
        found += [own.numpy().ravel() for own in (values, *state.values())]
    if not changed:
        raise function.refused("changed no parameter: return the new values")
    return np.concatenate(found)


def unweighted(by: LossSection, code: Code) -> str:
    """Finding that the user's loss gives the same for other weights, though they are asked for; ""
    if there is none."""
    asked = [f"{n} = {v!r}" for n in ("correction", "rejection") if (v := getattr(by, n)) != "none"]
    if not by.has_own_kind or not asked:
        return ""
    function, tokens = own_functions(by, code)[LOSS], _tokens(by)
    halved = tokens._replace(weights_N=tokens.weights_N / 2)
    first_N, again_N = (own_losses(function, one)[0] for one in (tokens, halved))
    if not torch.equal(first_N, again_N):
        return ""
    settings = " and ".join(f"trainer.loss.{one}" for one in asked)
    return f"{function.place} does not use tokens.weights_N: nothing comes of {settings}"


def _tokens(by: LossSection) -> LossTokens:
    """Made-up tokens of three rows."""
    draw = np.random.default_rng(0)
    counts = (4, 1, 7)
    num = sum(counts)
    old = -draw.exponential(1.0, (3, num)).astype(np.float32)
    old[1:, : counts[0]] = old[0, : counts[0]]  # ratios of 1: not all rows may be clipped
    policy_N, proximal_N, behavior_N = (torch.from_numpy(one.copy()) for one in old)
    policy_N.requires_grad_()
    return LossTokens(
        policy_N=policy_N,
        proximal_N=proximal_N,
        behavior_N=behavior_N,
        advantages_N=torch.tensor([1.0] * 4 + [0.0] + [-0.5] * 7),
        weights_N=torch.tensor([1.0] * (num - 1) + [0.0]),
        counts_R=counts,
        ages_N=torch.tensor([0.0] * 4 + [1.0] * 8),
        entropy_N=policy_N.square(),
        reference_N=proximal_N if by.why_compared else None,  # as in a step
    )


def _samples(group_size: int, parts: Sequence[str]) -> list[RewardedSample]:
    """Made-up samples of two groups: rewards of one differ, those of the other do not."""
    return [
        RewardedSample(
            group=str(group),
            number=number,
            reward=float(group and number % 2),
            parts=dict.fromkeys(parts, float(group and number % 2)),
            turn_tokens=(3, 2 + number),
            is_truncated=number == 1,
        )
        for group in range(2)
        for number in range(group_size)
    ]

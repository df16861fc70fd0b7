"""A loss of the user's own in the place of one of ours, with checks of its result.

It is called in the trainer's process, where autograd needs it. Its source is that of the claim
(`TrainerStarted.code`), so a redo computes what the step did (decision 0107).

Axes: `N` tokens of the loss, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlstreams.schemas.events import ScoredTrajectory
from rlstreams.streams.segments import num_sampled
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.sandbox.recorded import LOSS, Code, OwnFunction, own_functions
from rlstreams.workers.trainer.learn.loss import LOSSES, Bounded, LossCall, LossTokens
from rlstreams.workers.trainer.learn.out_of_memory import is_out_of_memory
from rlstreams.workers.trainer.learn.packing import Batch, Float32s
from rlstreams.workers.trainer.learn.rewarded import RewardedSample, advantages_of

_NUM_LOSS = 3  # results of a loss


def loss_of(by: LossSection, code: Code) -> LossCall:
    """The loss that `by.kind` names, of ours or of the user's.

    Raises:
        OwnCodeError: the user's cannot be loaded. Without `code`, before a learner is configured,
            its call raises.
    """
    if not by.has_own_kind:
        return LOSSES[by.kind]
    if code:
        own_functions(by, code)
    return lambda tokens, by: own_losses(own_functions(by, code)[LOSS], tokens)


def loss_place(by: LossSection, code: Code) -> str:
    """Field and place of a loss of the user's own; "": it is one of ours."""
    function = own_functions(by, code).get(LOSS)
    return f"{function.field} of {function.place}" if function else ""


def own_losses(function: OwnFunction, tokens: LossTokens) -> Bounded:
    """The user's losses of these tokens, with their ratios and where they were clipped.

    Raises:
        OwnCodeError: it raised, or returned something else; names the place.
    """
    found = function(tokens, is_out_of_memory)
    if isinstance(found, tuple) and len(found) != _NUM_LOSS:
        raise function.refused(
            f"gave a tuple of {len(found)}: return the losses, or losses, ratios and is_clipped"
        )
    losses_N, ratios_N, is_clipped_N = found if isinstance(found, tuple) else (found, None, None)
    if ratios_N is None:
        ratios_N = tokens.ratios()
    if is_clipped_N is None:
        is_clipped_N = torch.zeros_like(tokens.weights_N, dtype=torch.bool)
    for name, own in (("losses", losses_N), ("ratios", ratios_N), ("is_clipped", is_clipped_N)):
        if not isinstance(own, Tensor):
            raise function.refused(f"gave {type(own).__name__} for {name}, not a tensor")
        if own.shape != tokens.policy_N.shape or own.device != tokens.policy_N.device:
            raise function.refused(
                f"gave {name} of shape {tuple(own.shape)} on {own.device}; the tokens have "
                f"{tuple(tokens.policy_N.shape)} on {tokens.policy_N.device}: give one for each "
                "token there, which trainer.loss.reduce makes one number of"
            )
    if not losses_N.is_floating_point() or not losses_N.requires_grad:
        raise function.refused(
            "gave losses without gradient: they must be computed from tokens.policy_N, not from "
            "a detached copy"
        )
    return losses_N, ratios_N, is_clipped_N.bool()


def with_token_advantages(
    batch: Batch, rows: Sequence[Sequence[ScoredTrajectory]], of_tokens: Sequence[Float32s]
) -> Batch:
    """The batch with an advantage for each token; itself where samples have one each.

    Args:
        rows: of each sample, in batch order.
        of_tokens: as in `Advantages`.
    """
    if not of_tokens:
        return batch
    every: list[tuple[ScoredTrajectory, Float32s]] = []
    for own, of_sample in zip(of_tokens, rows, strict=True):
        lengths = [num_sampled(row.trajectory) for row in of_sample]
        every += zip(of_sample, np.split(own, np.cumsum(lengths)[:-1]), strict=True)
    parts = []
    for part, members in zip(batch.micro_batches, batch.cut.members, strict=True):
        advantages_BT = np.zeros(part.loss_mask_BT.shape, np.float32)
        for place, (row, own) in enumerate(every[index] for index in members):
            segments = row.trajectory.segments
            is_policy = np.array([segment.author == "policy" for segment in segments])
            sampled = np.repeat(is_policy, [len(segment.token_ids) for segment in segments])
            advantages_BT[place, : len(sampled)][sampled] = own
        parts.append(replace(part, advantages_BT=advantages_BT))
    return replace(batch, micro_batches=tuple(parts))


def made_up(by: LossSection, group_size: int, parts: Sequence[str], code: Code) -> list[str]:
    """Call the user's functions twice with a few made-up tokens and samples.

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
            first, again = (_tried_loss(function, by) for _ in range(2))
        else:
            samples = _samples(group_size, parts)
            found = (advantages_of(samples, by, code) for _ in range(2))
            first, again = (np.concatenate([a.of_samples, *a.of_tokens]) for a in found)
        if not np.array_equal(first, again):
            raise function.refused(
                f"gave {_differing(first, again)} for the same {function.given}: a redo would not "
                "make the same weights; draw no random numbers, and keep nothing between calls"
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

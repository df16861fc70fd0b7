"""The deal of micro-batches to ranks. Pure: the batch alone decides, so a redo deals alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlstreams.workers.model.prefixes import NOTHING_TAKEN
from rlstreams.workers.trainer.learn.packing import Batch, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One rank's part of a round; in every round every rank passes through the model once."""

    index: int  # index of the micro-batch to blame if memory runs out
    micro_batch: MicroBatch
    is_empty: bool = False  # no micro-batch is left for this rank: it passes a stand-in


def deal(batch: Batch, ranks: int, *, alone: bool = False) -> list[list[Task]]:
    """Tasks of each rank, round by round; micro-batches without a token to learn from are left out.

    Widest first: the ranks of a round wait for each other in every layer, so they get neighbours
    in size.

    Args:
        alone: no rank waits for another: the micro-batches stay in the batch's order.
    """
    sized = [
        (0 if alone else -micro_batch.num_computed_tokens, index)
        for index, micro_batch in enumerate(batch.micro_batches)
        if micro_batch.num_loss_tokens
    ]
    order = [index for _, index in sorted(sized)]
    hands: list[list[Task]] = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        of_round = order[start : start + ranks]
        for rank, hand in enumerate(hands):
            if rank < len(of_round):
                index = of_round[rank]
                hand.append(Task(index=index, micro_batch=batch.micro_batches[index]))
            else:
                widest = of_round[0]
                nothing = empty(batch.micro_batches[widest])
                hand.append(Task(index=widest, micro_batch=nothing, is_empty=True))
    return hands


def for_hands(batch: Batch, hands: Sequence[int]) -> list[Batch]:
    """The batch that each rank receives: without the large arrays of other hands' micro-batches.

    A hand is one of the parts that `deal` makes; ranks of the same hand compute the same tasks.

    Args:
        hands: the hand of each rank, by rank.
    """
    ranks = max(hands) + 1
    own: list[set[int]] = [set() for _ in range(ranks)]
    for members in (tuple(range(len(batch.micro_batches))), *batch.updates):  # looks come first
        parts = tuple(batch.micro_batches[index] for index in members)
        for hand, tasks in enumerate(deal(replace(batch, micro_batches=parts), ranks)):
            own[hand] |= {members[task.index] for task in tasks if not task.is_empty}
    return [batch, *(_reduced(batch, own[hand]) for hand in hands[1:])]


def _reduced(batch: Batch, own: set[int]) -> Batch:
    parts = enumerate(batch.micro_batches)
    kept = (part if index in own else _small(part) for index, part in parts)
    return replace(batch, micro_batches=tuple(kept))


def _small(part: MicroBatch) -> MicroBatch:
    return replace(part, routed_experts_BTLK=None, top_ids_BTK=None, top_logprobs_BTK=None)


def empty(like: MicroBatch) -> MicroBatch:
    """A micro-batch of one token, so that every parameter gets a gradient; the caller makes it
    zeros.

    Args:
        like: the micro-batch whose bin size to take: layers are compiled for it already.
    """
    zeros_BT, mask_BT = np.zeros((1, 2), np.float32), np.array([[False, True]])
    return MicroBatch(
        token_ids_BT=np.zeros((1, 2), np.int64),
        real_BT=np.ones((1, 2), np.bool_),
        loss_mask_BT=mask_BT,
        behavior_logprobs_BT=zeros_BT,
        proximal_logprobs_BT=zeros_BT,
        is_true_anchor_BT=mask_BT,
        is_scored_BT=mask_BT,
        is_after_pull_BT=np.zeros((1, 2), np.bool_),
        temperature_BT=np.ones((1, 2), np.float32),
        advantages_B=np.zeros(1, np.float32),
        num_batch_loss_tokens=1,
        num_batch_learnt=1,
        num_batch_samples=1,
        bin_tokens=like.bin_tokens,
        taken=None if like.taken is None else (NOTHING_TAKEN,),
    )

"""Which rank computes which micro-batch. Pure: the batch alone decides, so a redo deals alike."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlstreams.workers.trainer.learn.packing import Batch, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One rank's part of a round. Every rank passes through the model once a round."""

    index: int  # of the micro-batch that is blamed if memory runs out
    micro_batch: MicroBatch
    is_empty: bool = False  # nothing is left for this rank, which passes `empty`


def deal(batch: Batch, ranks: int) -> list[list[Task]]:
    """Each rank's tasks, round by round; micro-batches without a token to learn from are left out.

    Widest first: the ranks of a round wait for each other in every layer, so they get neighbours
    in size.
    """
    sized = [
        (-micro_batch.num_computed_tokens, index)
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
                own = replace(batch.micro_batches[index], trajectories=())  # nobody needs them
                hand.append(Task(index=index, micro_batch=own))
            else:
                widest = of_round[0]
                nothing = empty(batch.micro_batches[widest].bin_tokens)
                hand.append(Task(index=widest, micro_batch=nothing, is_empty=True))
    return hands


def empty(bin_tokens: int) -> MicroBatch:
    """One token to score, so that every parameter gets a gradient; the caller makes it zeros.

    Args:
        bin_tokens: of the others' bins: layers are compiled for that size already.
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
        num_batch_rows=1,
        num_batch_samples=1,
        trajectories=(),
        bin_tokens=bin_tokens,
    )

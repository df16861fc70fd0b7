"""A follower that has little memory: a micro-batch of more than eight rows does not fit."""

import sys

import torch

from rlstreams.workers.trainer.learn.packing import MicroBatch
from rlstreams.workers.trainer.parallel.follower import main
from rlstreams.workers.trainer.parallel.rank_learner import RankLearner

ROWS = 8
_accumulate = RankLearner._accumulate


def accumulate(self: RankLearner, micro_batch: MicroBatch, *more: object) -> None:
    """In the middle of the round: rank 0 is in its pass already."""
    if len(micro_batch.token_ids_BT) > ROWS:
        raise torch.OutOfMemoryError("out of memory: this rank is poor")
    _accumulate(self, micro_batch, *more)  # type: ignore[arg-type]


if __name__ == "__main__":
    RankLearner._accumulate = accumulate  # type: ignore[method-assign, assignment]
    main(sys.argv[1:])

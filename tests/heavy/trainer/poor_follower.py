"""A follower that has little memory: a micro-batch of more than eight rows does not fit."""

import sys

import torch

from rlstreams.workers.compute.follower import main
from rlstreams.workers.compute.passes import Passes
from rlstreams.workers.model.token_scores import TokenScores
from rlstreams.workers.trainer.learn.packing import MicroBatch

ROWS = 8
_score = Passes.score


def score(self: Passes, micro_batch: MicroBatch) -> TokenScores:
    """In the middle of the round: rank 0 is in its pass already."""
    if len(micro_batch.token_ids_BT) > ROWS:
        raise torch.OutOfMemoryError("out of memory: this rank is poor")
    return _score(self, micro_batch)


if __name__ == "__main__":
    Passes.score = score  # type: ignore[method-assign]
    main(sys.argv[1:])

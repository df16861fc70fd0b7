"""A follower on a CPU that takes documents, as it would on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch.distributed.tensor import DTensor

from rlstreams.workers.model import bins, documents
from rlstreams.workers.model.token_scores import Score, TokenScorer
from rlstreams.workers.trainer.parallel import rank_learner, rank_scorer
from rlstreams.workers.trainer.parallel.follower import main
from tests.documents_on_cpu import one_by_one


def take_documents(replace: Callable[[object, str, object], object]) -> None:
    """Let ranks of this process do so.

    Args:
        replace: `setattr`, or a test's.
    """
    replace(bins, "_try_kernel", lambda _model, _device: None)
    replace(documents, "_fused", one_by_one)
    for module in (rank_learner, rank_scorer):
        replace(module, "take_documents", _take)


def _take(scorer: TokenScorer, _: str, root: Score) -> str:
    # Whole, the model lies on the CPU, where the kernel of a GPU cannot be measured.
    assert all(isinstance(parameter, DTensor) for parameter in scorer.model.parameters())
    return bins.take_documents(scorer, "any", root)


if __name__ == "__main__":
    take_documents(setattr)
    main(sys.argv[1:])

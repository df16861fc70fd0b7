"""A follower on a CPU that takes documents, as it would on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rlstreams.workers.model import bins, documents
from rlstreams.workers.trainer.parallel import rank_learner
from rlstreams.workers.trainer.parallel.follower import main
from tests.documents_on_cpu import one_by_one


def take_documents(replace: Callable[[object, str, object], object]) -> None:
    """Let ranks of this process do so.

    Args:
        replace: `setattr`, or a test's.
    """
    replace(bins, "_try_kernel", lambda _model, _device: None)
    replace(documents, "_fused", one_by_one)
    replace(rank_learner, "take_documents", lambda scorer, _: bins.take_documents(scorer, "any"))


if __name__ == "__main__":
    take_documents(setattr)
    main(sys.argv[1:])

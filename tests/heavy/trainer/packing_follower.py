"""A follower on a CPU that packs and compiles, as it would on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from rlstreams.workers.compute.follower import main
from rlstreams.workers.model import bins
from tests.documents_on_cpu import take_documents_on_cpu


def pack(replace: Callable[[object, str, object], object]) -> None:
    """Let ranks of this process do so.

    Args:
        replace: `setattr`, or a test's.
    """
    take_documents_on_cpu(replace)
    plain = bins._try_kernel

    def try_kernel(model: Any, device: str) -> None:
        # Whole, the model lies on the CPU, where the kernel of a GPU cannot be tried.
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        plain(model, device)

    replace(bins, "_try_kernel", try_kernel)


if __name__ == "__main__":
    pack(setattr)
    main(sys.argv[1:])

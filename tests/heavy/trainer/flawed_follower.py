"""A follower that packs, and whose compiler is flawed: fused, its layers give other numbers;
otherwise it fails."""

from __future__ import annotations

import sys
from typing import Any

import torch

from rlstreams.workers.compute.follower import main
from tests.heavy.trainer.packing_follower import pack

_compile = torch.compile


def flawed(forward: Any, **how: Any) -> Any:
    """In place of `torch.compile`."""
    if not hasattr(forward, "__self__"):  # the head's functions
        return _compile(forward, backend="aot_eager", **how)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch._inductor.config.max_fusion_size == 1:
            raise RuntimeError("the compiler of this rank is flawed")
        return 1.2 * forward(*args, **kwargs)

    return call


if __name__ == "__main__":
    pack(setattr)
    torch.compile = flawed
    main(sys.argv[1:])

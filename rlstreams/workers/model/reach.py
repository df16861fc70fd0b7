"""Whether attention of documents reaches as far back as that of padded rows, in each layer.

Log-probs cannot say so: in 16 bits rounding changes those of made-up tokens by as much as a window
that is not kept does. So attention is asked alone. Where queries and keys are 0, a token takes the
mean of the values that it sees; where in addition all values but one token's are 0, its output is
above 0 if and only if it sees that token: no rounding is involved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlstreams.workers.model.documents import ATTENTION, attend


def difference_of_reach(
    padded: Callable[[], object], packed: Callable[[], object], places_N: Tensor
) -> str:
    """The first layer in which other tokens of a document see its first one than in a padded row;
    "": none.

    Args:
        padded: computes the sequence alone, in a row of its own.
        packed: computes it as a document.
        places_N: int64, of its tokens in the row of documents.
    """
    with _asked(0) as alone:
        padded()
    with _asked(int(places_N[0])) as together:
        packed()
    for layer, (expected_T, found_T) in enumerate(zip(alone, together, strict=True)):
        num = len(places_N)
        wanted_N, own_N = expected_T[:num], found_T[places_N.to(found_T.device)]
        if not torch.equal(wanted_N, own_N):
            wanted, own = int(wanted_N.sum()), int(own_N.sum())
            seen = f"{own} of {num} tokens see the first one"
            return f"in layer {layer}, {seen}, in padded rows {wanted}"
    return ""


@contextmanager
def _asked(place: int) -> Iterator[list[Tensor]]:
    """Of each call of attention, in order: the first row's tokens that see the one at `place`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found: list[Tensor] = []

    def asked(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **more: Any,  # noqa: ANN401
    ) -> tuple[Tensor, None]:
        one = torch.zeros_like(value)
        one[:, :, place] = 1.0
        means, _ = attend(module, torch.zeros_like(query), torch.zeros_like(key), one, mask, **more)
        found.append(means[0, :, 0, 0] > 0)
        return attend(module, query, key, value, mask, **more)

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, asked)
    try:
        yield found
    finally:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)

"""Training and held-out rows: one file divided by content, and two compared by it.

A row is held out for what its prompt is, not for where it stands: so the same rows are held out
whatever the seed, and copies of one never end on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.dataset.index import Split

_WHOLE = 1 << 64
_CHUNK = 1 << 18  # rows compared at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What is kept out of a file; neither: nothing."""

    num_rows: int = 0
    fraction: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.num_rows or self.fraction)


def divide(
    whole: Split, share: Share, title: str
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Numbers of the rows to train on, and of those to hold out.

    Held out are the prompts with the smallest digests, the first row of each; its copies are in
    neither.

    Raises:
        ConfigError: one of the two would be empty.
    """
    starts = range(0, len(whole), _CHUNK)
    prompts = np.concatenate([whole.prompts(first, first + _CHUNK) for first in starts])
    different = np.unique(prompts)
    bound = np.uint64(min(round(share.fraction * _WHOLE), _WHOLE - 1))
    wanted = share.num_rows or int(np.searchsorted(different, bound))
    if not 0 < wanted < len(different):
        named = "rows" if share.num_rows else "fraction"
        raise ConfigError(
            f"data.held_out_{named} is {share.num_rows or share.fraction}: of {len(different):,} "
            f"different prompts of {title} it would hold out {wanted:,}; both splits need one"
        )
    is_held = prompts <= different[wanted - 1]
    held = np.flatnonzero(is_held)
    _, first = np.unique(prompts[held], return_index=True)
    return np.flatnonzero(~is_held).astype(np.uint32), held[np.sort(first)].astype(np.uint32)


def first_common(train: Split, held_out: Split) -> tuple[int, tuple[int, int] | None]:
    """How many held-out rows have a prompt that is in `train`, and rows of the first such pair.

    Returns:
        The count; `(held-out row, training row)`, or None.
    """
    wanted = held_out.prompts()
    is_common = np.zeros(len(wanted), bool)
    pair: tuple[int, int] | None = None
    for first in range(0, len(train), _CHUNK):
        prompts = train.prompts(first, first + _CHUNK)
        both = np.flatnonzero(np.isin(prompts, wanted))
        is_common |= np.isin(wanted, prompts[both])
        if pair is None and len(both):
            pair = (int(np.flatnonzero(wanted == prompts[both[0]])[0]), first + int(both[0]))
    return int(is_common.sum()), pair

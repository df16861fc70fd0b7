"""Training and held-out rows: one file divided by content, and two compared by it.

A row is held out for what its prompt is, not for where it stands: so the same rows are held out
whatever the seed, and copies of one never end on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.dataset.index import HELD_OUT, TRAIN, Split, SplitWriter

_WHOLE = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What is kept out of a file; neither: nothing."""

    num_rows: int = 0
    fraction: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.num_rows or self.fraction)


def divide(folder: Path, share: Share, title: str) -> int:
    """Make the split `held_out` out of the split `train` of a folder.

    Held out are the prompts with the smallest digests, one row of each; its copies are left out.

    Returns:
        How many copies were left out.

    Raises:
        ConfigError: one of the two would be empty.
    """
    whole = Split(folder, TRAIN, in_memory=False)
    prompts = np.unique(whole.prompts())
    wanted = share.num_rows or int(np.searchsorted(prompts, _bound(share.fraction)))
    if not 0 < wanted < len(prompts):
        named = "rows" if share.num_rows else "fraction"
        raise ConfigError(
            f"data.held_out_{named} is {share.num_rows or share.fraction}: of {len(prompts):,} "
            f"different prompts of {title} it would hold out {wanted:,}; both splits need one"
        )
    held_out, taken, num_copies = prompts[:wanted], np.zeros(wanted, bool), 0
    with SplitWriter(folder, HELD_OUT) as kept_out, SplitWriter(folder, "rest") as rest:
        for entries, digests in whole.chunks():
            is_held = _is_in(digests, held_out)
            rest.extend(entries[~is_held], digests[~is_held])
            places = np.flatnonzero(is_held)
            which = np.searchsorted(held_out, digests[places])
            is_first = np.zeros(len(places), bool)
            is_first[np.unique(which, return_index=True)[1]] = True
            is_first &= ~taken[which]
            taken[which] = True
            kept_out.extend(entries[places[is_first]], digests[places[is_first]])
            num_copies += int((~is_first).sum())
    for kind in ("rows", "prompts"):
        (folder / f"rest.{kind}").replace(folder / f"{TRAIN}.{kind}")
    return num_copies


def first_common(train: Split, held_out: Split) -> tuple[int, tuple[int, int] | None]:
    """How many held-out rows have a prompt that is in `train`, and rows of the first such pair.

    Returns:
        The count; `(held-out row, training row)`, or None.
    """
    digests = held_out.prompts()
    wanted = np.unique(digests)
    seen = np.zeros(len(wanted), bool)
    pair: tuple[int, int] | None = None
    first = 0
    for prompts in train.prompt_chunks():
        both = np.flatnonzero(_is_in(prompts, wanted))
        seen[np.searchsorted(wanted, prompts[both])] = True
        if pair is None and len(both):
            row = int(np.flatnonzero(digests == prompts[both[0]])[0])
            pair = (row, first + int(both[0]))
        first += len(prompts)
    return int(np.isin(digests, wanted[seen]).sum()), pair


def _bound(fraction: float) -> np.uint64:
    return np.uint64(min(round(fraction * _WHOLE), _WHOLE - 1))


def _is_in(
    digests: npt.NDArray[np.uint64], wanted: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """Whether each is among `wanted`, which is sorted and not empty."""
    at = np.minimum(np.searchsorted(wanted, digests), len(wanted) - 1)
    found: npt.NDArray[np.bool_] = wanted[at] == digests
    return found

"""Micro-batches of a batch, and the common prefixes of its samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlstreams.schemas.events import ScoredTrajectory
from rlstreams.workers.model.cut import Cut, cut_evenly
from rlstreams.workers.model.prefixes import Prefixes, Tokens


def planned_cut(
    lengths: Sequence[int],
    group_ids: Sequence[str],
    token_budget: int,
    minibatches: int = 1,
    *,
    in_bins: bool = False,
    hands: int = 1,
    prefixes: Prefixes | None = None,
) -> Cut:
    """Micro-batches of samples in batch order, each within one mini-batch.

    Args:
        hands: number of micro-batches that are computed side by side.
        prefixes: of the samples, which share tokens in bins; None: they do not share.
    """
    of_sample = minibatch_of(group_ids, minibatches)
    members: list[tuple[int, ...]] = []
    bins: list[int] = []
    for number in range(minibatches):
        places = [place for place, own in enumerate(of_sample) if own == number]
        own_lengths = [lengths[place] for place in places]
        own_prefixes = prefixes and prefixes.some(places)
        cut = cut_evenly(own_lengths, token_budget, hands, in_bins=in_bins, prefixes=own_prefixes)
        members += [tuple(places[index] for index in own) for own in cut.members]
        bins += cut.bins
    order = tuple(index for own in members for index in own)
    return Cut(order=order, sizes=tuple(len(own) for own in members), bins=tuple(bins))


def minibatch_of(group_ids: Sequence[str], minibatches: int) -> list[int]:
    """The mini-batch of each sample: whole groups, in batch order, as equal as may be."""
    places = {group_id: place for place, group_id in enumerate(dict.fromkeys(group_ids))}
    return [places[group_id] * minibatches // len(places) for group_id in group_ids]


def prefixes_of(samples: Sequence[ScoredTrajectory], *, replay_routes: bool) -> Prefixes:
    """Common prefixes of a batch's samples; each group is laid out together."""
    tokens = [
        Tokens(
            np.concatenate([s.token_ids.numpy() for s in scored.trajectory.segments]),
            *(recorded_routes(scored) if replay_routes else ()),
        )
        for scored in samples
    ]
    return Prefixes(tokens, [scored.trajectory.group_id for scored in samples])


def recorded_routes(
    scored: ScoredTrajectory,
) -> tuple[npt.NDArray[Any] | None, npt.NDArray[Any] | None]:
    """A sample's experts [tokens - 1, layers, top_k], and its mask of recorded rows."""
    experts, mask = scored.trajectory.routed_experts, scored.trajectory.routed_experts_mask
    if experts is None:
        return None, None
    return experts.numpy(), None if mask is None else mask.numpy()

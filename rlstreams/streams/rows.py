"""The rows of a sample: sequences of tokens, each of which the model reads by itself. Pure.

A sample is one row, except for a session with branches. One of several rows is the sample with
empty segments in place of the other rows', so segments keep their numbers, by which scores and
masks name them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlstreams.schemas.events import ScoredTrajectory, Segment, Tensor, Trajectory

_NOTHING = Segment(author="environment", token_ids=Tensor.of(np.empty(0, np.int32)))


def row_places(trajectory: Trajectory) -> list[range]:
    """Return the segment numbers of each row."""
    authors = [segment.author for segment in trajectory.segments]
    starts = [
        number
        for number in range(1, len(authors))
        if authors[number] == "prompt" and authors[number - 1] != "prompt"
    ]
    return [
        range(start, end) for start, end in zip([0, *starts], [*starts, len(authors)], strict=True)
    ]


def rows_of_sample(trajectory: Trajectory) -> tuple[Trajectory, ...]:
    """Return each row as a sample by itself; a sample of one row unchanged.

    Raises:
        schemas.TensorError: routed experts that cannot be read.
    """
    places = row_places(trajectory)
    if len(places) == 1:
        return (trajectory,)
    found, end = [], 0
    for place in places:
        start = end
        end += sum(len(trajectory.segments[number].token_ids) for number in place)
        segments = (s if n in place else _NOTHING for n, s in enumerate(trajectory.segments))
        found.append(
            replace(
                trajectory,
                segments=tuple(segments),
                routed_experts=_part(trajectory.routed_experts, start, end - 1),
                routed_experts_mask=_part(trajectory.routed_experts_mask, start, end - 1),
            )
        )
    return tuple(found)


def _part(rows: Tensor | None, start: int, end: int) -> Tensor | None:
    return None if rows is None else Tensor.of(rows.numpy()[start:end])


def scored_rows(scored: ScoredTrajectory) -> tuple[ScoredTrajectory, ...]:
    """Return each row with its scores; raises as `rows_of_sample`."""
    places, rows = row_places(scored.trajectory), rows_of_sample(scored.trajectory)
    if len(rows) == 1:
        return (scored,)
    return tuple(
        replace(
            scored, trajectory=row, scores=tuple(s for s in scored.scores if s.segment in place)
        )
        for row, place in zip(rows, places, strict=True)
    )


def row_counts(samples: Sequence[ScoredTrajectory]) -> tuple[int, ...]:
    """Return the number of rows of each sample; (): one each."""
    counts = tuple(len(row_places(sample.trajectory)) for sample in samples)
    return counts if any(num > 1 for num in counts) else ()


def main_row(trajectory: Trajectory) -> tuple[Segment, ...]:
    """Return the segments of a sample's first row: its main chain, without branches."""
    return trajectory.segments[: row_places(trajectory)[0].stop]

"""The policy version that a segment is scored under. Pure.

It is the version that sampled the segment, if that is held or can still be pulled; else one at
most two versions away; else none, and the behavior log-probs are used. Never silently the newest:
at staleness 4 that choice makes a run collapse that stays stable with the sampling version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rlstreams.schemas.events import NO_VERSION, Trajectory
from rlstreams.streams.segments import sampled_segments

MAX_DISTANCE = 2  # versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """The choice for one segment; `label` is the event's field `anchor`."""

    label: str  # "sampled", "nearby", "behavior"
    policy_version: int  # NO_VERSION for "behavior"


def plan_anchors(
    sampled: Iterable[int], held: Collection[int], served: Collection[int] = ()
) -> dict[int, Anchor]:
    """The anchor of every version that sampled something.

    Args:
        held: versions that the scorer holds.
        served: versions that could be pulled now.
    """
    return {version: _anchor(version, {*held, *served}) for version in sorted(sampled)}


def _anchor(sampled: int, available: Collection[int]) -> Anchor:
    near = [version for version in available if abs(version - sampled) <= MAX_DISTANCE]
    if not near:
        return Anchor(label="behavior", policy_version=NO_VERSION)
    # The newer one of two equally near: its rollouts come next, so it is the better one to hold.
    version = min(near, key=lambda v: (abs(v - sampled), -v))
    return Anchor(label="sampled" if version == sampled else "nearby", policy_version=version)


def versions_of(trajectory: Trajectory) -> frozenset[int]:
    """The versions that sampled the trajectory."""
    return frozenset(segment.policy_version for segment in sampled_segments(trajectory))

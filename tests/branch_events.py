"""Where a branch begins, for tests."""

from __future__ import annotations

from typing import Any

from rlstreams.schemas.events import (
    ClosedGroups,
    DroppedGroup,
    OpenGroup,
    PartitionPosition,
    RunBranched,
)

HASH = "a1" * 32
NOW_MS = 1_795_000_000_000
DROPPED = DroppedGroup(
    group_id="8",
    reason="stale",
    permanent=False,
    staleness=3,
    row=4,
    dataset_epoch=0,
    replacement=0,
)


def run_branched(**changes: Any) -> RunBranched:
    """Of run `parent` at step 3: it had reached group 9, and 7 was open."""
    values = {
        "run": "run",
        "parent": "parent",
        "parent_place": "/runs/parent",
        "step": 3,
        "policy_version": 3,
        "weight_hash": HASH,
        "value_head_hash": "",
        "batch_hash": HASH,
        "cluster_id": "cluster",
        "topic_ids": {"steps": "id-1"},
        "positions": (PartitionPosition(topic="steps", partition=0, offset=12),),
        "config": "{}",
        "hashes": {"model": HASH},
        "versions": {"torch": "2"},
        "closed": ClosedGroups(watermark=7, above=(8, 9)),
        "next_group": 10,
        "next_position": 9,
        "open": (OpenGroup(group_id="7", row=5, dataset_epoch=0, replaces="2", replacement=1),),
        "dropped": (DROPPED,),
        "branched_at_ms": NOW_MS,
    }
    return RunBranched(**{**values, **changes})

"""Runs of steady fields: what stands in a record as it stood in an earlier one is found at once.

A run is a row of neighbouring leaves that take few values (`STEADY`, union branches, counts). Equal
bytes at the same place of the schema have equal values and end at the same place, so one look-up of
the bytes replaces reading them field by field. The lengths of earlier runs, by their first byte,
say which bytes to try.
"""

from __future__ import annotations

_TABLE_ENTRIES = 8192  # a table that grew beyond this starts again; its misses are only slower

# Fields with few values in a run, whatever its size: no times, no counters of samples. Only speed
# hangs on this list.
STEADY = frozenset(
    {
        *(
            "sample",
            "attempt",
            "group_size",
            "purpose",
            "dataset_epoch",
            "replacement",
            "author",
            "anchor",
        ),
        *("policy_version", "weight_hash", "load_id", "temperature", "top_p", "top_k"),
        *("finish_reason", "dtype", "engine", "worker", "instance"),
        *("prompt_partition", "trajectory_partition"),
    }
)
_RUN_BYTES = 512  # longer runs are not kept
_RUN_SIZES = 4  # lengths of earlier runs that are tried

Runs = dict[bytes, tuple[object, ...]]  # a run's bytes -> the values of its fields
Sizes = list[list[int]]  # by the first byte of a run: how long such runs were, the latest first


def run_tables() -> tuple[Runs, Sizes]:
    """For one place of a schema, empty."""
    return {}, [[] for _ in range(256)]


def keep(
    runs: Runs, sizes: Sizes, b: bytes, start: int, end: int, values: tuple[object, ...]
) -> None:
    """Remember what `b[start:end]` says, unless the record was cut within it."""
    size = end - start
    if end > len(b) or size > _RUN_BYTES:
        return
    if len(runs) >= _TABLE_ENTRIES:
        runs.clear()
    runs[b[start:end]] = values
    latest = sizes[b[start]]
    if size in latest:
        latest.remove(size)
    latest.insert(0, size)
    del latest[_RUN_SIZES:]

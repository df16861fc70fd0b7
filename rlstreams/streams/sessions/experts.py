"""Routed experts of a whole sample, from the rows that its requests returned. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlstreams.schemas.events import NO_VERSION

Rows: TypeAlias = npt.NDArray[Any]  # uint8 or uint16 [rows, layers, top_k]
Part: TypeAlias = tuple[int, int, Rows]  # policy version, row of the first, rows


def stitched(
    versions: npt.NDArray[np.int64], parts: Sequence[Part]
) -> tuple[Rows | None, npt.NDArray[np.uint8] | None]:
    """Return the rows of the whole sample, and the mask of recorded ones (None: all).

    A token's row belongs to the version under which the token was first passed. A later request
    returns rows of all tokens before it once more, under its own weights: the row that came first
    stays, and a row of another version does not replace a missing one.

    Args:
        versions: the version of each row, int64 [tokens - 1]; see `row_versions`.
        parts: in the order in which they came.

    Returns:
        `[tokens - 1, layers, top_k]` and uint8 `[tokens - 1]`; None, None if nothing was captured.

    Raises:
        ValueError: rows outside the sample, or parts that disagree on layers, top_k or dtype.
    """
    there = [part for part in parts if len(part[2])]
    if not there:
        return None, None
    first = there[0][2]
    num_rows = len(versions)
    whole = np.zeros((num_rows, *first.shape[1:]), first.dtype)
    seen = np.zeros(num_rows, np.uint8)
    for version, start, rows in there:
        if rows.shape[1:] != first.shape[1:] or rows.dtype != first.dtype:
            raise ValueError(
                f"routed_experts of one sample are {first.dtype} {first.shape[1:]} "
                f"and {rows.dtype} {rows.shape[1:]}"
            )
        if start < 0 or start + len(rows) > num_rows:
            raise ValueError(
                f"routed_experts rows {start} to {start + len(rows)} of a sample with {num_rows}"
            )
        here = slice(start, start + len(rows))
        fresh = np.flatnonzero((seen[here] == 0) & (versions[here] == version))
        whole[start + fresh] = rows[fresh]
        seen[start + fresh] = 1
    return whole, None if seen.all() else seen


def row_versions(num_tokens: int, sampled: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Return the version that first passed each token but the last, int64 [tokens - 1].

    Rows of tokens that no policy sampled, and of the last token of a turn, come with the request of
    the turn that follows.

    Args:
        num_tokens: tokens of the sample, its prompt included.
        sampled: version and end, in tokens of the sample, of each segment of the policy that has
            tokens, in order.
    """
    versions = np.full(max(0, num_tokens - 1), NO_VERSION, np.int64)
    done = 0  # rows that have an owner
    for version, end in sampled:
        versions[done : end - 1] = version
        done = end - 1
    return versions


def one_behind_another(
    parts: Sequence[tuple[Rows | None, npt.NDArray[np.uint8] | None, int]],
) -> tuple[Rows | None, npt.NDArray[np.uint8] | None]:
    """Return the experts of several sequences and the mask of recorded rows (None: all), as
    `stitched` does. A sequence's last token has no record.

    Args:
        parts: of each sequence its rows, the mask of recorded ones, and its number of tokens.

    Raises:
        ValueError: sequences that disagree on layers, top_k or dtype.
    """
    if len(parts) == 1:
        return parts[0][:2]
    num_rows = sum(num_tokens for *_, num_tokens in parts) - 1
    versions = np.zeros(num_rows, np.int64)
    found: list[Part] = []
    start = 0
    for rows, mask, num_tokens in parts:
        here = slice(start, start + num_tokens - 1)
        if mask is not None:
            versions[here] = mask.astype(np.int64) - 1  # rows that are not recorded have no owner
        if rows is not None:
            found.append((0, start, rows))
        start += num_tokens
    return stitched(versions, found)

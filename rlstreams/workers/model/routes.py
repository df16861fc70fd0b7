"""Recorded routes as arrays: the experts of each token in each layer. Pure.

Axes: `B` sequence, `T` token, `L` layer with a router, `K` experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]  # integers [tokens - 1, L, K]
Recorded = npt.NDArray[Any]  # [tokens - 1], 0: the row is not recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterShape:
    """Number of layers, choices and experts of a model's routers."""

    num_layers: int  # with a router
    top_k: int
    num_experts: int


def check_routes(rows: Rows, recorded: Recorded | None, shape: RouterShape) -> None:
    """Check that routers of this shape can take these rows.

    Raises:
        ValueError: names the field and its expected value.
    """
    if rows.ndim != 3 or rows.shape[1:] != (shape.num_layers, shape.top_k):
        raise ValueError(
            f"routed_experts has shape {list(rows.shape)}, should be "
            f"[tokens - 1, {shape.num_layers}, {shape.top_k}]: it was sampled from another model"
        )
    used = rows if recorded is None else rows[recorded.astype(bool)]
    if used.size and int(used.max()) >= shape.num_experts:
        raise ValueError(
            f"routed_experts names expert {int(used.max())}, the model has {shape.num_experts}"
        )


def padded_routes(
    sequences: Sequence[tuple[Rows | None, Recorded | None]], width: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]] | None:
    """Routes (B, T, L, K) and a mask of tokens that have some (B, T); None: no sequence has any.

    A token without a row (padding, a sequence's last token, an unrecorded row) is left to the live
    router.

    Args:
        sequences: rows, and a mask of recorded ones (None: all); they fit one model.
        width: T.
    """
    found = [rows for rows, _ in sequences if rows is not None]
    if not found:
        return None
    # Experts are fewer than 2^15, and torch knows more of int16 than of uint16.
    dtype = np.uint8 if all(rows.dtype == np.uint8 for rows in found) else np.int16
    experts_BTLK = np.zeros((len(sequences), width, *found[0].shape[1:]), dtype)
    recorded_BT = np.zeros((len(sequences), width), np.bool_)
    for index, (rows, recorded) in enumerate(sequences):
        if rows is not None:
            experts_BTLK[index, : len(rows)] = rows
            recorded_BT[index, : len(rows)] = True if recorded is None else recorded != 0
    return experts_BTLK, recorded_BT

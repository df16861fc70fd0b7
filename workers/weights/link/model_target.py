"""A model server's own parameters as a target; what cannot be received in place goes through the
model's own `load_weights`.

CUDA graphs keep addresses, so bytes received in place are used by the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .errors import PullError
from .pieces import Piece
from .target import Row, dtype_name, run_of


class ModelTarget:
    """One rank of a served model.

    Pieces of place "load" are collected by checkpoint name and given to the loader batch by batch.
    """

    def __init__(self, model: Any, device: torch.device) -> None:  # noqa: ANN401  (any engine's)
        self._model = model
        self._device = device
        self._parameters = dict(model.named_parameters())
        self.loaded: set[str] = set()  # checkpoint names that went through the loader

    def parameters(self) -> Sequence[Row]:
        """The server's own names, shapes and dtypes."""
        return [(n, dtype_name(p.dtype), tuple(p.shape)) for n, p in self._parameters.items()]

    def buffer(self, piece: Piece) -> torch.Tensor:
        """A run of a parameter, or room for a checkpoint's tensor."""
        if piece.place == "parameter":
            return run_of(self._parameters, piece)
        room = torch.empty(
            piece.shape, dtype=getattr(torch, piece.dtype), device=self._device
        ).view(-1)
        return room.view(torch.uint8)

    def took(self, pieces: Sequence[Piece], buffers: Sequence[torch.Tensor]) -> None:
        """Hand checkpoint tensors to the loader.

        Raises:
            PullError: `server`: the loader failed.
        """
        tensors = [
            (piece.name, buffer.view(getattr(torch, piece.dtype)).view(piece.shape))
            for piece, buffer in zip(pieces, buffers, strict=True)
            if piece.place == "load"
        ]
        if not tensors:
            return
        try:
            self._model.load_weights(iter(tensors))
        except Exception as err:
            raise PullError("server", f"load_weights: {type(err).__name__}: {err}") from err
        self.loaded |= {name for name, _ in tensors}
        self.synchronize()  # the buffers go now

    def synchronize(self) -> None:
        """Until the device has done what was begun."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

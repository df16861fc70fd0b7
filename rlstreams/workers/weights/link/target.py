"""Target of received bytes: fresh tensors beside the old weights, or a model's own parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from .errors import PullError
from .pieces import Piece

Row = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype: `float32`, not `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def rows_of(tensors: Mapping[str, torch.Tensor]) -> list[Row]:
    """Layout of the tensors, in their order."""
    return [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]


class Target:
    """A receiver's memory; the next try overwrites a broken one."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.touched = False  # bytes may have been written since the last success

    def buffer(self, piece: Piece) -> torch.Tensor:
        """Memory for one piece: flat uint8, contiguous.

        Raises:
            PullError: `layout`: it has no such parameter, or another shape or dtype.
        """
        return run_of(self.tensors, piece)

    def expect(self, pieces: Sequence[Piece]) -> None:
        """Begin a try: these pieces come now, and a half-done try before it is void.

        Raises:
            PullError: `layout`: they cannot be taken; nothing is touched.
        """

    def took(self, pieces: Sequence[Piece], buffers: Sequence[torch.Tensor]) -> None:
        """Take a batch that has arrived whole."""

    def check_filled(self) -> None:
        """Check, once all pieces were taken, that nothing is left as it was.

        Raises:
            PullError: `layout`: some parameters are.
        """

    def synchronize(self) -> None:
        """Wait until all bytes are in place."""


class FreshTensors(Target):
    """New tensors of a layout; the old ones stay untouched."""

    def __init__(self, rows: Iterable[Row], device: torch.device) -> None:
        super().__init__(
            {
                name: torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                for name, dtype, shape in rows
            }
        )


def run_of(tensors: Mapping[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    """Bytes of a parameter that a piece names.

    Raises:
        PullError: `layout`, naming the piece and the parameter's layout.
    """
    tensor = tensors.get(piece.name)
    if tensor is None:
        raise PullError("layout", f"the sender means {piece.name!r}, which is not a parameter here")
    fits = piece.start >= 0 and piece.start + piece.num_elements <= tensor.numel()
    if dtype_name(tensor.dtype) != piece.dtype or not fits or not tensor.is_contiguous():
        raise PullError(
            "layout",
            f"{piece.name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, the sender means "
            f"{piece.num_elements} elements of {piece.dtype} from {piece.start}",
        )
    flat = tensor.detach().view(-1)[piece.start : piece.start + piece.num_elements]
    return flat.view(torch.uint8)

"""A model server's own parameters as a target; tensors that cannot be received in place go through
the model's own `load_weights`.

CUDA graphs keep addresses, so bytes received in place are used by the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import PullError
from .mapping import EXPERTS, each_expert, few
from .pieces import Piece
from .target import Target, dtype_name

PACKED = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32})


@dataclass(frozen=True)  # no slots: servers may have another Python version
class Loading:
    """An engine's calls around its own `load_weights`."""

    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    packs_again: bool = True  # the loader quantises the given weights
    takes_fused_experts: bool = True  # else it skips them silently


def turned_experts(model: Any) -> frozenset[str]:  # noqa: ANN401
    """Names of the experts' parameters that this model's kernels have in another order than a
    folder, in equal shapes: the up matrix before the gate. Only the loader knows that order.

    vLLM names the kernel (`oracle/unquantized.py`), SGLang the order (`fused_moe_triton/layer.py`).
    """
    found = set()
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kernel = getattr(getattr(method, "unquantized_backend", None), "name", "")
        has_up_first = getattr(method, "load_up_proj_weight_first", False) is True
        if has_up_first or str(kernel).startswith(("FLASHINFER", "AITER")):
            names = (name for name, _ in module.named_parameters())
            found |= {f"{path}.{name}" if path else name for name in names}
    return frozenset(found)


class ModelTarget(Target):
    """One rank of a served model.

    Pieces of place "load" are collected by checkpoint name and given to the loader batch by batch.
    Between `before` and `after` a model has no weights to compute with, so they are called for
    pieces of that place only, and `settle` always ends what `expect` began.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401  (any engine's)
        device: torch.device,
        loading: Loading,
    ) -> None:
        # The parameters that the model computes with: a loader may replace them meanwhile.
        self._every = dict(model.named_parameters())
        turned = turned_experts(model)
        super().__init__({n: tensor for n, tensor in self._every.items() if n not in turned})
        self._model = model
        self._device = device
        self._loading = loading
        self._is_loading = False
        self._names: frozenset[str] = frozenset()  # of what the loader gets in this try
        self._unfilled: set[str] = set()  # own parameters that the loader has not filled in it

    def expect(self, pieces: Sequence[Piece]) -> None:
        """Prepare the loader, if it gets anything; anew for each try, because it counts its
        tensors.

        Raises:
            PullError: `layout`: the loader would put plain weights into packed parameters.
        """
        self.settle()
        self._names = frozenset(piece.name for piece in pieces if piece.place == "load")
        if all(piece.place != "load" for piece in pieces):
            return
        packed = [n for n, p in self._every.items() if p.dtype in PACKED]
        if packed and not self._loading.packs_again:
            raise PullError(
                "layout",
                f"{packed[0]} is {dtype_name(self._every[packed[0]].dtype)}, {len(packed)} "
                "parameters are packed, and the loader of this server cannot pack weights again: "
                "start it without quantization",
            )
        self._is_loading = True
        self._loading.before()
        placed = {piece.name for piece in pieces if piece.place == "parameter"}
        # Packed ones have scales that no loader names; stacked experts have names of their own.
        now = [] if packed else [name for name, _ in self._model.named_parameters()]
        known = {name for name in now if name.rpartition(".")[2] not in EXPERTS}
        self._unfilled = (known & self.tensors.keys()) - placed

    def check_filled(self) -> None:
        """Check that the loader has filled all parameters that no bytes were received into.

        Raises:
            PullError: `layout`: it has passed over some, which would keep older weights.
        """
        if self._is_loading and self._unfilled:
            raise PullError(
                "layout",
                f"the server's loader filled all but {few(sorted(self._unfilled))}: they have no "
                "tensor of the trainer's, and would keep the weights that the server began with",
            )

    def settle(self) -> None:
        """Let the loader end its work; idempotent. If it fails, the weights are damaged."""
        if self._is_loading:
            self._is_loading = False
            was_touched, self.touched = self.touched, True
            self._loading.after()
            self.touched = was_touched

    def buffer(self, piece: Piece) -> torch.Tensor:
        """A run of a parameter's memory, or room for a checkpoint's tensor."""
        if piece.place == "parameter":
            return super().buffer(piece)
        dtype = getattr(torch, piece.dtype)
        return torch.empty(piece.shape, dtype=dtype, device=self._device).view(-1).view(torch.uint8)

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
        given = (
            iter(tensors)
            if self._loading.takes_fused_experts
            else each_expert(tensors, self._names)
        )
        try:
            filled = self._model.load_weights(given)
        except Exception as err:
            raise PullError("server", f"load_weights: {type(err).__name__}: {err}") from err
        # vLLM's returns names, as its own start checks them; SGLang's returns nothing.
        self._unfilled = set() if filled is None else self._unfilled - set(filled)
        self.synchronize()  # the buffers are freed now

    def synchronize(self) -> None:
        """Wait until the device has done the work so far."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

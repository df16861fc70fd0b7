"""A model server's own parameters as a target; tensors that cannot be received in place go through
the model's own `load_weights`.

CUDA graphs keep addresses, so bytes received in place are used by the next step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import PullError
from .mapping import EXPERTS, FUSED, each_expert, few
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
    names_filled: bool = True  # else what it writes is watched, where it returns no names


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


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes where torch's operations write while it is active, whoever calls them: so it is known
    what a loader filled that names nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._at: list[tuple[int, int]] = []  # address, elements

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  (an operation)
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  (its result)
        given, more = func._schema.arguments, kwargs or {}
        values = [*zip(given, args, strict=False), *((a, more.get(a.name)) for a in given)]
        for argument, value in values:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, torch.Tensor):
                self._at.append((value.data_ptr(), value.numel()))
        return func(*args, **more)

    def into(self, parameters: Mapping[str, torch.Tensor]) -> Counter[str]:
        """Elements written into each of these parameters, by name."""
        found: Counter[str] = Counter()
        begins = sorted((parameter.data_ptr(), name) for name, parameter in parameters.items())
        for at, num in self._at:
            begin, name = begins[max(0, bisect_right(begins, at, key=lambda one: one[0]) - 1)]
            tensor = parameters[name]
            found[name] += num * (begin <= at < begin + tensor.numel() * tensor.element_size())
        return found


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
        self._before: dict[str, int] = {}  # addresses of those that it is to fill
        self._written: Counter[str] = Counter()  # elements of them

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
        self._before = {n: self._every[n].data_ptr() for n in self._every.keys() & {*now} - placed}
        self._written.clear()

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
        writes = Writes()
        try:
            with nullcontext() if self._loading.names_filled else writes:
                filled = self._model.load_weights(given)
        except Exception as err:
            raise PullError("server", f"load_weights: {type(err).__name__}: {err}") from err
        # vLLM's returns names, as its own start checks them; most of SGLang's return nothing.
        if filled is not None:
            self._unfilled -= set(filled)
        elif self._before and not self._loading.names_filled:
            self._written += writes.into({name: self._every[name] for name in self._before})
            self._unfilled = {name for name in self._before if self._lacks(name)}
        else:
            self._unfilled.clear()
        self.synchronize()  # the buffers are freed now

    def _lacks(self, name: str) -> bool:
        """Whether the loader has written nothing into a parameter, or not all parts of a fused one,
        and has put no other memory in its place."""
        parameter, written = self._every[name], self._written[name]
        is_fused = name.rpartition(".")[0].rpartition(".")[2] in FUSED
        is_old = parameter.data_ptr() == self._before[name]
        return is_old and written < (parameter.numel() if is_fused else 1)

    def synchronize(self) -> None:
        """Wait until the device has done the work so far."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

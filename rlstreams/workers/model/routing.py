"""Routing replay: a forward whose tokens take the experts that they took when they were sampled.

Every family of mixtures makes weights of its scores in its own way: softmax before the choice or
behind it, sigmoids with a bias, scaling. So no formula is repeated here. Only one call in a router
is replaced, the choice by `topk` over its experts: it returns the recorded experts and the live
scores *at them*, and the family's own code makes the weights, with their gradient. A family that
chooses in another way is refused: `engines/routing_check.py` measures it at load.
Source: rollout routing replay (R3), https://arxiv.org/abs/2510.11370.
Routers of transformers 5 (`...mlp.gate`) return logits (N, E), scores (N, K) and indices (N, K), in
this order or another; a layer calls its router once per forward. Forward hooks record the chosen
experts.
Axes: `B` sequence, `T` token, `N` = B x T row-major, `L` layer with a router, `K` experts per
token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlstreams.workers.model.folder import num_experts_of

_TOPK = (torch.topk, Tensor.topk)


# Ends of the names of router classes: most families', AFMoE's, HunYuan's.
_ROUTERS = ("TopKRouter", "TopkRouter", "TokenChoiceRouter", "MoEV1Gate")


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers in layer order; empty for a dense model."""
    return [m for m in model.modules() if type(m).__name__.endswith(_ROUTERS)]


def chosen_of(output: Any) -> Tensor:  # noqa: ANN401  (of an untyped library)
    """The indices among a router's outputs: Granite's come first, most come last."""
    indices: Tensor
    (indices,) = [part for part in output if not part.is_floating_point()]
    return indices


class RouterCapture:
    """Records the experts of each forward while it is attached."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = routers_of(model)
        self._rows: list[Tensor] = []
        self._hooks = [router.register_forward_hook(self._record) for router in self._routers]

    @property
    def num_layers(self) -> int:
        """Layers that have a router."""
        return len(self._routers)

    def _record(self, _module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
        self._rows.append(chosen_of(output))

    def take(self, batch: int) -> Tensor:
        """The experts of the last forward, (B, T, L, K) int64; forgets them."""
        assert len(self._rows) == len(self._routers), "take() follows every forward"
        stacked_NLK = torch.stack(self._rows, 1)
        self._rows = []
        return stacked_NLK.reshape(batch, -1, *stacked_NLK.shape[1:])

    def close(self) -> None:
        """Detach the hooks; idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class Routes(NamedTuple):
    """The experts of a batch's tokens, on the model's device."""

    experts_BTLK: Tensor  # integers
    recorded_BT: Tensor  # bool; the live router chooses for all others


class Counted(dict[int, Tensor]):
    """Flips by layer in a replayed forward; a recomputed layer counts once."""

    @property
    def num_flips(self) -> int:
        """Recorded (token, layer) rows for which the live router would choose another set."""
        return int(torch.stack(list(self.values())).sum()) if self else 0


class RoutingReplay:
    """The routers of a model; outside of `replaying` they are the library's own."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = routers_of(model)
        config: Any = getattr(model, "config", None)
        self.num_layers = len(self._routers)  # with a router
        self.num_experts = 0  # in each of them
        if self._routers:
            self.num_experts = num_experts_of(config.get_text_config().to_dict())

    @contextmanager
    def replaying(self, routes: Routes | None) -> Iterator[Counted]:
        """Within it, forwards of one batch and their backward take these routes.

        The backward too, because recomputed layers choose again there.

        Args:
            routes: of the batch; None: the live routers choose.
        """
        counted = Counted()
        if routes is None:
            yield counted
            return
        experts_NLK = routes.experts_BTLK.flatten(0, 1)
        recorded_N = routes.recorded_BT.flatten()

        def route(layer: int, forward: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            choice = Forced(experts_NLK[:, layer].long(), recorded_N, self.num_experts)
            with choice:
                output = forward(*args, **kwargs)
            if choice.flips is not None:
                counted.setdefault(layer, choice.flips)
            return output

        for layer, router in enumerate(self._routers):
            router.forward = partial(route, layer, router.forward)
        try:
            yield counted
        finally:
            for router in self._routers:
                del router.forward  # the class's own is seen again


class Forced(TorchFunctionMode):
    """A mode in which a router's `topk` over all experts returns the recorded ones."""

    def __init__(self, forced_NK: Tensor, recorded_N: Tensor, num_experts: int) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._forced_NK = forced_NK
        self._recorded_N = recorded_N
        self.flips: Tensor | None = None

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401  (torch's own signature)
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        del types
        found = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return found
        scores: Tensor = args[0] if args else kwargs["input"]
        return self.answer(scores, found) if scores.dim() == 2 else found

    def answer(self, scores_NX: Tensor, found: Any) -> Any:  # noqa: ANN401
        """The result for a `topk` over experts, or over groups of experts: the recorded ones, and
        the live scores at them."""
        forced_NK, recorded_N1 = self._forced_NK, self._recorded_N[:, None]
        num_found = scores_NX.shape[-1]
        if num_found != self._num_experts:
            # A choice of groups that experts may come from: groups of the recorded experts are
            # added.
            groups_NK = forced_NK // (self._num_experts // num_found)
            groups_NK = torch.where(recorded_N1, groups_NK, found.indices[:, :1])
            indices = torch.cat([found.indices, groups_NK], -1)
        else:
            indices = torch.where(recorded_N1, forced_NK, found.indices)
            with torch.no_grad():
                is_other_NK = found.indices.sort(-1).values != forced_NK.sort(-1).values
                self.flips = (is_other_NK.any(-1) & self._recorded_N).sum()
        return torch.return_types.topk((scores_NX.gather(-1, indices), indices))

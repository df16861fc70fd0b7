"""Routing replay: a forward whose tokens take the experts that they took when they were sampled.

Every family of mixtures makes weights of its scores in its own way: softmax before the choice or
behind it, sigmoids with a bias, scaling. So no formula is written down here. What is replaced is
the one call in a router that chooses, `topk` over its experts: it answers the recorded experts and
the live scores *at them*, and the family's own code makes the weights, with their gradient. A
family that chooses in another way is refused: `routing_check.py` measures it at load.
Source: rollout routing replay (R3), https://arxiv.org/abs/2510.11370.
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

from rlstreams.workers.model.experts import routers_of
from rlstreams.workers.model.folder import num_experts_of

_TOPK = (torch.topk, Tensor.topk)


class Routes(NamedTuple):
    """The experts of a batch's tokens, on the model's device."""

    experts_BTLK: Tensor  # integers
    recorded_BT: Tensor  # bool; the live router chooses for all others


class Counted:
    """What a replayed forward found; a recomputed layer counts once."""

    def __init__(self, num_layers: int) -> None:
        self._flips: list[Tensor | None] = [None] * num_layers

    def add(self, layer: int, flips: Tensor) -> None:
        """Count a layer in, the first time that it is passed."""
        if self._flips[layer] is None:
            self._flips[layer] = flips

    @property
    def num_flips(self) -> int:
        """Recorded (token, layer) rows for which the live router would choose another set."""
        found = [flips for flips in self._flips if flips is not None]
        return int(torch.stack(found).sum()) if found else 0


class RoutingReplay:
    """The routers of a model. Outside of `replaying` they are the library's own."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = routers_of(model)
        self._num_experts = _num_experts(model) if self._routers else 0

    @property
    def num_layers(self) -> int:
        """Layers that have a router."""
        return len(self._routers)

    @property
    def num_experts(self) -> int:
        """In each of them."""
        return self._num_experts

    @contextmanager
    def replaying(self, routes: Routes | None) -> Iterator[Counted]:
        """Forwards of one batch, and their backward, in here take these routes.

        The backward too, for layers that are computed again there choose again.

        Args:
            routes: of the batch; None: the live routers choose.
        """
        counted = Counted(self.num_layers)
        if routes is None:
            yield counted
            return
        experts_NLK = routes.experts_BTLK.flatten(0, 1)
        recorded_N = routes.recorded_BT.flatten()

        def route(layer: int, forward: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            choice = _Forced(experts_NLK[:, layer].long(), recorded_N, self._num_experts)
            with choice:
                output = forward(*args, **kwargs)
            if choice.flips is not None:
                counted.add(layer, choice.flips)
            return output

        with self._instead(route):
            yield counted

    @contextmanager
    def watching(self) -> Iterator[list[Watched]]:
        """The live choices of one forward, by layer."""
        seen = [Watched(self._num_experts) for _ in self._routers]

        def route(layer: int, forward: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with seen[layer]:
                return forward(*args, **kwargs)

        with self._instead(route):
            yield seen

    @contextmanager
    def _instead(self, route: Any) -> Iterator[None]:  # noqa: ANN401
        for layer, router in enumerate(self._routers):
            router.forward = partial(route, layer, router.forward)
        try:
            yield
        finally:
            for router in self._routers:
                del router.forward  # the class's own is seen again


class Watched(TorchFunctionMode):
    """Inside, the choices of a router are remembered."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.chosen: list[Tensor] = []

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401  (torch's own signature)
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        del types
        found = func(*args, **(kwargs or {}))
        if func not in _TOPK or (scores := _scores(args, kwargs)).dim() != 2:
            return found
        return self.answer(scores, found)

    def answer(self, scores_NX: Tensor, found: Any) -> Any:  # noqa: ANN401
        """What a `topk` over experts, or over groups of them, gives."""
        if scores_NX.shape[-1] == self.num_experts:
            self.chosen.append(found.indices)
        return found


class _Forced(Watched):
    """Inside, a router's `topk` over all experts answers those that are recorded."""

    def __init__(self, forced_NK: Tensor, recorded_N: Tensor, num_experts: int) -> None:
        super().__init__(num_experts)
        self._forced_NK = forced_NK
        self._recorded_N = recorded_N
        self.flips: Tensor | None = None

    def answer(self, scores_NX: Tensor, found: Any) -> Any:  # noqa: ANN401
        """The recorded experts and the live scores at them."""
        forced_NK, recorded_N1 = self._forced_NK, self._recorded_N[:, None]
        num_found = scores_NX.shape[-1]
        if num_found != self.num_experts:
            # A choice of groups, from which experts may come: those of the recorded ones too.
            groups_NK = forced_NK // (self.num_experts // num_found)
            groups_NK = torch.where(recorded_N1, groups_NK, found.indices[:, :1])
            indices = torch.cat([found.indices, groups_NK], -1)
        else:
            indices = torch.where(recorded_N1, forced_NK, found.indices)
            with torch.no_grad():
                is_other_NK = found.indices.sort(-1).values != forced_NK.sort(-1).values
                self.flips = (is_other_NK.any(-1) & self._recorded_N).sum()
        return torch.return_types.topk((scores_NX.gather(-1, indices), indices))


def _scores(args: Any, kwargs: Any) -> Tensor:  # noqa: ANN401
    scores: Tensor = args[0] if args else kwargs["input"]
    return scores


def _num_experts(model: Any) -> int:  # noqa: ANN401  (an untyped library)
    return num_experts_of(model.config.get_text_config().to_dict())

"""Whether a model's routers follow given routes: measured when a model is loaded.

A few tokens pass along the model's own routes, which must give its own logits to the bit, and along
others, which must reach the experts (decision 0020). Axes: as in `model/routing.py`; `V`
vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlstreams.workers.model.base import REFUSALS, EngineError
from rlstreams.workers.model.routes import RouterShape
from rlstreams.workers.model.routing import RouterCapture, Routes, RoutingReplay

_PROBE = ((3, 5, 7, 4, 6), (6, 4, 2, 2, 5))


@torch.no_grad()
def check_replay(model: nn.Module, vocab_size: int) -> RouterShape:
    """Pass a few tokens along given routes, and compare.

    Raises:
        EngineError: the routers do not follow given routes; names family and reason.
    """
    replay = RoutingReplay(model)
    if not replay.num_layers:
        raise _refusal(model, "it has no router that is known here (a dense model has none at all)")
    try:
        problem, top_k = _compare(model, replay, vocab_size)
    except REFUSALS as err:
        problem, top_k = f"its routers are called in another way: {err}", 0
    if problem:
        raise _refusal(model, problem)
    return RouterShape(num_layers=replay.num_layers, top_k=top_k, num_experts=replay.num_experts)


def _compare(model: Any, replay: RoutingReplay, vocab_size: int) -> tuple[str, int]:  # noqa: ANN401
    """Problem with the model's replay, or ""; and experts per token."""
    ids_BT = torch.tensor(_PROBE, device=next(model.parameters()).device) % vocab_size
    everywhere = torch.ones_like(ids_BT, dtype=torch.bool)

    capture = RouterCapture(model)

    def passed(routes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with replay.replaying(None if routes is None else Routes(routes, everywhere)):
            found: Tensor = model(input_ids=ids_BT, use_cache=False).logits
        return found, capture.take(len(ids_BT))

    try:
        free_BTV, own_BTLK = passed()
        other_BTLK = (own_BTLK + 1) % replay.num_experts
        same_BTV, _ = passed(own_BTLK)
        turned_BTV, taken_BTLK = passed(other_BTLK)
    finally:
        capture.close()
    top_k = own_BTLK.shape[-1]
    if not torch.equal(same_BTV, free_BTV):
        return "its own routes, replayed, do not give its own logits", top_k
    if not torch.equal(taken_BTLK, other_BTLK) or not bool(turned_BTV.isfinite().all()):
        return "its routers do not hand on the experts that they are given", top_k
    # Where a token takes all experts, other routes are the same in another order.
    if top_k < replay.num_experts and torch.equal(turned_BTV, free_BTV):
        return "other routes do not change its logits", top_k
    return "", top_k


def _refusal(model: Any, why: str) -> EngineError:  # noqa: ANN401
    return EngineError(
        f"trainer.routing_replay is true, but a {model.config.model_type} cannot be given "
        f"experts to take: {why}; set it to false"
    )

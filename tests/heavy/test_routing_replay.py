"""Routing replay, family by family: own routes are the model's own bits, others are taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlstreams.workers.engines.routing_check import check_replay
from rlstreams.workers.engines.served.shape import read_shape
from rlstreams.workers.model.attention import attention_of
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.layers import recompute_activations
from rlstreams.workers.model.model import configure_torch, load_model, right_padded
from rlstreams.workers.model.routing import RouterCapture, Routes, RoutingReplay, routers_of
from rlstreams.workers.model.token_scores import TokenScorer
from tests import families

configure_torch(1)
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own

IDS_BT, REAL_BT = right_padded([[3, 5, 7, 4, 9, 30, 8, 2], [6, 20, 11], [4, 4, 5, 40, 41]], 0)
CHOSEN_BT = REAL_BT & (torch.arange(8) >= 1)
ONES_N = torch.ones(int(CHOSEN_BT.sum()))
UNTOLD = "PhimoeForCausalLM"  # chooses by maxima of its own, one after the other
REPLAYED = [name for name in families.MOE if name != UNTOLD]


def scorer_of(folder: Path, *, recomputed: bool = False, dtype: str = "float32") -> TokenScorer:
    model: Any = load_model(folder, dtype)
    if recomputed:
        recompute_activations(model)
    return TokenScorer(model.requires_grad_(True), attention_of(model).causal)


def passed(scorer: TokenScorer, routes: Routes | None) -> tuple[Any, dict[str, Any], int]:
    """Log-probs, gradients and flips."""
    scorer.model.zero_grad(set_to_none=True)
    with scorer.routing.replaying(routes) as counted:
        scores = scorer(IDS_BT, REAL_BT, CHOSEN_BT, ONES_N)
        (scores.logprobs_N * torch.linspace(-1, 1, len(ONES_N))).sum().backward()
    found = {n: p.grad.clone() for n, p in scorer.model.named_parameters() if p.grad is not None}
    return scores.logprobs_N.detach(), found, counted.num_flips


def own_routes(scorer: TokenScorer) -> torch.Tensor:
    capture = RouterCapture(scorer.model)
    with torch.no_grad():
        scorer(IDS_BT, REAL_BT, CHOSEN_BT, ONES_N)
    experts_BTLK = capture.take(len(IDS_BT))
    capture.close()
    return experts_BTLK.to(torch.uint8)


def are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("name", REPLAYED)
def test_own_routes_give_own_bits_and_others_are_taken(name: str, tmp_path: Path) -> None:
    """Log-probs and all gradients, the router's among them, also where layers are recomputed."""
    folder = families.make(name, tmp_path)
    scorer = scorer_of(folder)
    own = own_routes(scorer)
    free_N, free_gradients, _ = passed(scorer, None)
    routers = [n for n, m in scorer.model.named_modules() if m in routers_of(scorer.model)]
    for path in routers:
        of_router = [g for name, g in free_gradients.items() if name.startswith(f"{path}.")]
        assert any(bool(gradient.any()) for gradient in of_router)
    for recomputed in (False, True):
        scorer = scorer_of(folder, recomputed=recomputed)
        found_N, gradients, flips = passed(scorer, Routes(own, REAL_BT))
        assert torch.equal(found_N, free_N)
        assert are_equal(gradients, free_gradients)
        assert flips == 0
    other = (own + 1) % 4
    plain_N, plain_gradients, flips = passed(scorer_of(folder), Routes(other, REAL_BT))
    assert float((plain_N - free_N).abs().max()) > 1e-3
    assert 0 < flips <= int(REAL_BT.sum()) * len(routers)
    again_N, again_gradients, again = passed(scorer, Routes(other, REAL_BT))
    assert torch.equal(again_N, plain_N)
    assert are_equal(again_gradients, plain_gradients)
    assert again == flips  # a layer that is recomputed counts once


def test_rows_that_are_not_recorded_take_the_live_router_s_experts(tmp_path: Path) -> None:
    """Nonsense where nothing is recorded changes no bit."""
    scorer = scorer_of(families.make("Qwen3MoeForCausalLM", tmp_path))
    free_N, free_gradients, _ = passed(scorer, None)
    nonsense = torch.zeros_like(own_routes(scorer))
    found_N, gradients, flips = passed(scorer, Routes(nonsense, torch.zeros_like(REAL_BT)))
    assert torch.equal(found_N, free_N)
    assert are_equal(gradients, free_gradients)
    assert flips == 0


def test_an_expert_outside_of_the_live_groups_keeps_its_own_weight(tmp_path: Path) -> None:
    """DeepSeek V2 sets scores outside of the chosen groups to 0: not those that are recorded."""
    folder = families.make("DeepseekV2ForCausalLM", tmp_path, topk_method="group_limited_greedy")
    model: Any = load_model(folder)
    check_replay(model, families.VOCABULARY)
    own = own_routes(scorer_of(folder))
    (router,) = routers_of(model)
    outputs: list[Any] = []
    router.register_forward_hook(lambda *call: outputs.append(call[2]))
    scorer = TokenScorer(model, attention_of(model).causal)
    outputs.clear()
    routes = Routes((own + 2) % 4, REAL_BT)  # two groups of two
    with torch.no_grad(), scorer.routing.replaying(routes):
        scorer(IDS_BT, REAL_BT, CHOSEN_BT, ONES_N)
    ((logits, weights, _),) = outputs
    expected = logits.softmax(-1).gather(-1, routes.experts_BTLK[:, :, 0].flatten(0, 1).long())
    real = REAL_BT.flatten()
    torch.testing.assert_close(weights[real], expected[real] * router.routed_scaling_factor)
    assert bool((weights > 0).all())


def test_sixteen_bits_give_own_bits_too(tmp_path: Path) -> None:
    """As on a GPU."""
    scorer = scorer_of(families.make("Qwen3MoeForCausalLM", tmp_path), dtype="bfloat16")
    free_N, free_gradients, _ = passed(scorer, None)
    found_N, gradients, _ = passed(scorer, Routes(own_routes(scorer), REAL_BT))
    assert torch.equal(found_N, free_N)
    assert are_equal(gradients, free_gradients)


def test_the_routers_are_the_library_s_own_afterwards(tmp_path: Path) -> None:
    """Also behind a forward that failed."""
    scorer = scorer_of(families.make("Qwen3MoeForCausalLM", tmp_path))
    routes = Routes(own_routes(scorer)[:1], REAL_BT[:1])  # of another batch
    with pytest.raises(RuntimeError):
        passed(scorer, routes)
    assert all("forward" not in vars(router) for router in routers_of(scorer.model))


@pytest.mark.parametrize("name", families.MOE)
def test_a_server_s_rows_are_taken_for_the_layers_that_have_routers(
    name: str, tmp_path: Path
) -> None:
    """What `config.json` tells of layers and choices is what the loaded model has."""
    # Solar has experts in every layer, whatever it says; a real folder says 0.
    changes = {"first_k_dense_replace": 0} if name == "SolarOpenForCausalLM" else {}
    folder = families.make(name, tmp_path, **changes)
    model, shape = load_model(folder), read_shape(folder)
    routers = {id(router) for router in routers_of(model)}
    layers = [
        int(part)
        for path, module in model.named_modules()
        if id(module) in routers
        for part in path.split(".")
        if part.isdigit()
    ]
    assert list(shape.moe_layers) == layers
    assert shape.top_k == own_routes(scorer_of(folder)).shape[-1]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (UNTOLD, "do not hand on the experts"),
        ("LlamaForCausalLM", "no router that is known here"),
        *((name, "no router that is known here") for name in families.MOE_UNRECORDED),
    ],
)
def test_a_family_that_cannot_follow_routes_is_refused_by_name(
    name: str, why: str, tmp_path: Path
) -> None:
    """Measured when it is taken up."""
    model: Any = load_model(families.make(name, tmp_path))
    with pytest.raises(EngineError, match=rf"a {model.config.model_type} cannot be given .*{why}"):
        check_replay(model, families.VOCABULARY)


def test_a_router_that_drops_what_it_is_told_is_seen(tmp_path: Path) -> None:
    """One that chooses a second time, behind our back."""
    model: Any = load_model(families.make("Qwen3MoeForCausalLM", tmp_path))
    router = routers_of(model)[0]
    kind = type(router)

    class Deaf(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden: torch.Tensor) -> Any:
            logits, scores, indices = super().forward(hidden)
            return logits, scores, logits.sort(-1, descending=True).indices[:, : indices.shape[-1]]

    Deaf.__name__ = kind.__name__
    router.__class__ = Deaf
    assert RoutingReplay(model).num_layers == 2
    with pytest.raises(EngineError, match="do not hand on the experts"):
        check_replay(model, families.VOCABULARY)

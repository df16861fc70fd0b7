"""megatron-core on the CPU against Hugging Face in float32: log-probs, gradients, names, scorer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlstreams.workers.compute import group
from rlstreams.workers.compute.score import scorer_of
from rlstreams.workers.engines.base import TokenSequence
from rlstreams.workers.engines.folder_channel import FolderChannel
from rlstreams.workers.model.attention import attention_of
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.megatron.build import RankModel, end_ranks, join_alone, view_of
from rlstreams.workers.model.megatron.layout import Layout
from rlstreams.workers.model.megatron.score import MegatronScores
from rlstreams.workers.model.model import configure_torch, load_model, weights_of
from rlstreams.workers.model.routing import Routes
from rlstreams.workers.model.token_scores import TokenScorer
from rlstreams.workers.weights.channel import WeightError
from tests import families

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core needs Python 3.12"
)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", {}),
    "llama": ("LlamaForCausalLM", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mixture": ("Qwen3MoeForCausalLM", {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "unscaled": ("Qwen3MoeForCausalLM", {"norm_topk_prob": False}),
}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    configure_torch(1)
    join_alone("cpu")
    yield
    end_ranks()
    group.leave()


def make(kind: str, folder: Path) -> Path:
    name, extra = MODELS[kind]
    return families.make(name, folder, **extra)


@pytest.mark.parametrize(
    ("kind", "is_routed"),
    [("qwen3", False), ("llama", False), ("mixture", False), ("mixture", True), ("unscaled", True)],
)
def test_log_probs_and_gradients_are_those_of_hugging_face(
    kind: str, is_routed: bool, tmp_path: Path
) -> None:
    """To 1e-5; with recorded routes too, of which some rows are missing."""
    folder = make(kind, tmp_path)
    theirs = load_model(folder).requires_grad_(True)
    rank_model = RankModel(folder, Layout(), 0, "cpu", "float32")
    rank_model.read()
    published = {
        part.published or name: view_of(rank_model.tensors, part).reshape(part.shape)
        for name, part in rank_model.parts.items()
    }
    own = weights_of(theirs)
    assert published.keys() == own.keys()
    assert all(torch.equal(published[name], own[name]) for name in own)
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(3, 48, (3, 12), generator=generator)
    ids_BT[0, 4] = 0  # the padding token in the middle of a row: its embedding does not learn
    real_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    real_BT[1, 8:] = False
    chosen_BT = real_BT.clone()
    chosen_BT[:, 0] = False
    routes = None
    if is_routed:
        layers = rank_model.config.num_hidden_layers - len(rank_model.config.mlp_only_layers)
        rows = [torch.randperm(4, generator=generator)[:2] for _ in range(36 * layers)]
        recorded_BT = torch.rand(3, 12, generator=generator) > 0.2
        routes = Routes(torch.stack(rows).view(3, 12, layers, 2), recorded_BT)
    temperature_N = torch.full((int(chosen_BT.sum()),), 0.7)
    found = []
    for scorer in (
        TokenScorer(theirs, attention_of(theirs).right_padded), MegatronScores(rank_model)
    ):  # fmt: skip
        with scorer.routing.replaying(routes) as counted:
            scores = scorer(ids_BT, real_BT, chosen_BT, temperature_N)
            scores.logprobs_N.square().sum().backward()
        found.append((scores, counted.num_flips))
    (expected, flips), (actual, own_flips) = found
    assert own_flips == flips
    assert (flips > 0) == is_routed
    assert torch.allclose(actual.logprobs_N, expected.logprobs_N, rtol=0, atol=1e-5)
    assert torch.allclose(actual.entropy_N, expected.entropy_N, rtol=0, atol=1e-5)
    gradients = {n: p.grad for n, p in rank_model.model.named_parameters() if p.grad is not None}
    for name, experts in rank_model.experts.items():
        gradients[name] = torch.stack([gradients[one] for one in experts])
    for name, parameter in theirs.named_parameters():
        part = rank_model.parts[name]
        gradient = view_of(gradients, part).reshape(part.shape)
        error = (gradient - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, name


def test_a_scorer_holds_versions_and_gives_the_log_probs_of_the_built_in_one(
    tmp_path: Path,
) -> None:
    folder = make("mixture", tmp_path)
    channel = FolderChannel(folder, "float32")
    rng = np.random.default_rng(2)
    sequences = [
        TokenSequence(
            token_ids=rng.integers(3, 48, length).astype(np.int32),
            routed_experts=np.stack([np.arange(2, dtype=np.uint8)] * (length - 1))[:, None],
        )
        for length in (9, 4, 12)
    ]
    scored = []
    for backend in ("builtin", "megatron"):
        scorer = scorer_of(folder, backend=backend, replay_routes=True)
        pulled = scorer.pull(channel.published, channel)
        again = scorer.score(sequences, pulled.policy_version, 0.9)
        scored.append(scorer.score(sequences, pulled.policy_version, 0.9))
        for one, other in zip(again, scored[-1], strict=True):
            assert one.logprobs.tobytes() == other.logprobs.tobytes()
        scorer.drop(pulled.policy_version)
        with pytest.raises(EngineError, match="is not held"):
            scorer.score(sequences, pulled.policy_version, 0.9)
    for expected, actual in zip(*scored, strict=True):
        np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=0, atol=1e-5)
        np.testing.assert_allclose(actual.entropy, expected.entropy, rtol=0, atol=1e-5)
    other = FolderChannel(make("qwen3", tmp_path / "other"), "float32")
    with pytest.raises(WeightError, match="do not fit the model"):
        scorer.pull(other.published, other)
    assert not scorer.versions

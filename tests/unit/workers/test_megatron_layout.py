"""Layouts of ranks that do not fit a model are refused with both numbers and what would fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.run import LogprobSection
from rlstreams.workers.config.trainer import (
    LayoutSection,
    LoraSection,
    ScorerLayoutSection,
    TrainerSection,
)
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.megatron.layout import Layout
from rlstreams.workers.model.megatron.tables import check_layout, parts_of

DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "hidden_size": 32,
    "intermediate_size": 48, "vocab_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "moe_intermediate_size": 24,
    "mlp_only_layers": [1], "decoder_sparse_step": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        (DENSE, {"ranks": 4, "tp": 4}, "num_key_value_heads, 2: it may be 1, 2"),
        (DENSE, {"ranks": 3, "pp": 3}, "num_hidden_layers, 4: it may be 1, 2, 4"),
        (DENSE | {"vocab_size": 49}, {"ranks": 2, "tp": 2}, "vocab_size, 49: it may be 1, 7, 49"),
        (DENSE, {"ranks": 3, "tp": 2}, "ranks is 3, which tp 2 x pp 1 = 2 .* do not divide: 2"),
        (DENSE, {"ranks": 2, "ep": 2}, "ep is 2, but the model has no experts"),
        (MIXTURE, {"ranks": 4, "ep": 4}, "num_experts, 6: it may be 1, 2, 3, 6"),
        (MIXTURE, {"ranks": 3, "ep": 2}, "ep is 2, which does not divide .*, 3: it may be 1, 3"),
        (MIXTURE, {"ranks": 2, "tp": 2}, "tp is 2, but a mixture of experts is cut by ep and pp"),
        (DENSE | {"tie_word_embeddings": True}, {"ranks": 2, "pp": 2}, "set pp to 1"),
        (DENSE | {"attention_bias": True}, {}, "attention_bias is True"),
        (DENSE | {"layer_types": ["sliding_attention"]}, {}, "'sliding_attention'"),
        (DENSE | {"rope_parameters": {"rope_type": "yarn"}}, {}, "rope_type is 'yarn'"),
        (DENSE | {"architectures": ["Gemma3ForCausalLM"]}, {}, "no table .* LlamaForCausalLM, Q"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: dict[str, Any], layout: dict[str, int], words: str
) -> None:
    with pytest.raises((ConfigError, EngineError), match=words):
        check_layout(SimpleNamespace(**model), Layout(**layout))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (DENSE, Layout(ranks=8, tp=2, pp=2)),
        (MIXTURE, Layout(ranks=12, pp=2, ep=3)),
        (MIXTURE, Layout(ranks=4, ep=2)),
    ],
)
def test_ranks_together_have_every_number_of_every_tensor(
    model: dict[str, Any], layout: Layout
) -> None:
    """Each share is held by as many ranks as add up its gradient, and by at least one."""
    config = SimpleNamespace(**model)
    check_layout(config, layout)
    for part in parts_of(config, layout):
        held: dict[tuple[slice, ...], list[int]] = {}
        for rank in range(layout.ranks):
            index = part.index(rank, layout)
            if index is not None:
                held.setdefault(index, []).append(rank)
        sizes = [[s.stop - s.start for s in index] for index in held]
        whole, together = 1, 0
        for size in part.shape:
            whole *= size
        for share in sizes:
            numbers = 1
            for size in share:
                numbers *= size
            together += numbers
        assert together == whole, part.name
        for ranks in held.values():
            peers = layout.peers(ranks[0], of_experts=part.by == "ep")
            same = {layout.tp_rank(rank) for rank in ranks}
            assert len(ranks) == len(peers) * (1 if part.by == "tp" else len(same)), part.name


def test_a_layout_without_its_backend_and_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.layout is .*tp=2.* set trainer\.backend"):
        TrainerSection(ranks=2, layout=LayoutSection(tp=2))
    with pytest.raises(
        ConfigError, match=r"layout\.cp is 2, which trainer\.backend is 'megatron' d"
    ):
        TrainerSection(ranks=2, backend="megatron", layout=LayoutSection(cp=2))
    with pytest.raises(
        ConfigError, match=r"cp is 4, but trainer\.ranks is 6, .* may be 1, 2, 3, 6"
    ):
        TrainerSection(ranks=6, layout=LayoutSection(cp=4))
    with pytest.raises(
        ConfigError, match=r"logprob\.layout is .*pp=2.*'builtin'.* set logprob\.backend"
    ):
        LogprobSection(ranks=2, layout=ScorerLayoutSection(pp=2))
    with pytest.raises(ConfigError, match=r"trainer\.lora\.rank is 4"):
        TrainerSection(backend="megatron", lora=LoraSection(rank=4))

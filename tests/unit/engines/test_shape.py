"""Facts of a model folder that answers are checked against, where families write them apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlstreams.workers.engines.served.shape import read_shape

CONFIG = {
    "model_type": "any", "architectures": ["Any"], "vocab_size": 64, "num_hidden_layers": 4,
}  # fmt: skip


def folder_of(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 5}, None, {5}),
        ({"eos_token_id": 5}, {"eos_token_id": [6, 7]}, {6, 7}),
        ({"eos_token_id": 5}, {"eos_token_id": None}, {5}),
        ({"eos_token_id": 5, "text_config": {"eos_token_id": 6}}, None, {6}),
        ({"eos_token_id": 5, "text_config": {"eos_token_id": None}}, None, {5}),
        ({"eos_token_id": 0}, {}, {0}),
        ({}, {}, set()),
    ],
)
def test_a_null_hides_no_token_that_ends_answers(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: set[int]
) -> None:
    """Without one, each answer goes on to its last token."""
    assert expected == read_shape(folder_of(tmp_path, config, generation)).eos_ids


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"moe_layer_freq": [0, 1, 1, 1]}, (1, 2, 3)),  # MiMo V2
        ({"moe_layer_freq": 1, "first_k_dense_replace": 1}, (1, 2, 3)),  # DeepSeek V3
        ({"moe_layer_freq": 2}, (0, 2)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),  # Qwen 3
    ],
)
def test_layers_with_experts_are_listed_or_counted(
    tmp_path: Path, fields: dict[str, Any], expected: tuple[int, ...]
) -> None:
    config = {"num_experts": 8, "num_experts_per_tok": 2, **fields}
    assert expected == read_shape(folder_of(tmp_path, config, None)).moe_layers

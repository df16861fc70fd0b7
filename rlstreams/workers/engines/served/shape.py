"""Shape of a model's answers, from its folder: vocabulary, end tokens, layers with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.folder import eos_ids_of, num_experts_of, read_config, text_fields

_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Facts of a model that an answer is checked against."""

    vocab_size: int
    eos_ids: frozenset[int]
    num_layers: int
    moe_layers: tuple[int, ...]  # layers that have a router
    num_experts: int  # 0: a dense model
    top_k: int


def read_shape(folder: Path) -> ModelShape:
    """The shape that `config.json` of `folder` describes.

    Raises:
        EngineError: the folder cannot be read, or a field is missing.
    """
    config = text_fields(read_config(folder))
    num_experts = num_experts_of(config)
    try:
        return ModelShape(
            vocab_size=int(config["vocab_size"]),
            eos_ids=eos_ids_of(folder),
            num_layers=int(config["num_hidden_layers"]),
            moe_layers=moe_layers(config) if num_experts else (),
            num_experts=num_experts,
            top_k=_top_k(config) if num_experts else 0,
        )
    except KeyError as err:
        raise EngineError(f"{folder / 'config.json'}: field {err} is missing") from err


def longest_sequence(folder: Path) -> int:
    """`max_position_embeddings`: the most that a server of this model may serve.

    Raises:
        EngineError: the folder cannot be read, or lacks the field.
    """
    found = text_fields(read_config(folder)).get("max_position_embeddings")
    if not found:
        raise EngineError(f"{folder / 'config.json'}: field max_position_embeddings is missing")
    return int(found)


def _top_k(config: Mapping[str, Any]) -> int:
    """Experts per token; Ernie and HunYuan name the field in their own way."""
    found = config.get("moe_k") or config.get("moe_topk") or config["num_experts_per_tok"]
    return int(found[0] if isinstance(found, list) else found)


def moe_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers that have experts, by the fields of Qwen, DeepSeek, AFMoE, Ernie and MiMo models."""
    if isinstance(by_layer := config.get("moe_layer_freq"), list):  # MiMo and MiniMax: 0 or 1 each
        return tuple(layer for layer, has_experts in enumerate(by_layer) if has_experts)
    dense = set(config.get("mlp_only_layers") or ())
    first = max(int(config.get(field) or 0) for field in _FIRST)
    # Qwen and Ernie count layers from one where they take every n-th, DeepSeek from zero.
    from_one = config.get("decoder_sparse_step") or config.get("moe_layer_interval")
    every = int(from_one or config.get("moe_layer_freq") or 1)
    offset = 1 if from_one else 0
    return tuple(
        layer
        for layer in range(int(config["num_hidden_layers"]))
        if layer >= first and layer not in dense and (layer + offset) % every == 0
    )

"""What a model's folder promises about its answers: vocabulary, end tokens, layers with experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.engines.base import EngineError
from workers.engines.model import eos_ids_of, num_experts_of, read_config
from workers.engines.served.answer import ModelShape


def read_shape(folder: Path) -> ModelShape:
    """The shape that `config.json` of `folder` describes.

    Raises:
        EngineError: the folder cannot be read, or a field is missing.
    """
    whole = read_config(folder)
    config = {**whole, **(whole.get("text_config") or {})}
    try:
        num_experts = num_experts_of(config)
        return ModelShape(
            vocab_size=int(config["vocab_size"]),
            eos_ids=eos_ids_of(folder),
            num_layers=int(config["num_hidden_layers"]),
            moe_layers=moe_layers(config) if num_experts else (),
            num_experts=num_experts,
            top_k=int(config["num_experts_per_tok"]) if num_experts else 0,
        )
    except KeyError as err:
        raise EngineError(f"{folder / 'config.json'}: field {err} is missing") from err


def longest_sequence(folder: Path) -> int:
    """`max_position_embeddings`: the most that a server of this model may serve.

    Raises:
        EngineError: the folder cannot be read, or does not say.
    """
    whole = read_config(folder)
    found = {**whole, **(whole.get("text_config") or {})}.get("max_position_embeddings")
    if not found:
        raise EngineError(f"{folder / 'config.json'}: field max_position_embeddings is missing")
    return int(found)


def moe_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers that have experts, by the fields that Qwen and DeepSeek models use."""
    dense = set(config.get("mlp_only_layers") or ())
    first = int(config.get("first_k_dense_replace") or 0)
    every = int(config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1)
    # Qwen counts layers from one where it takes every n-th, DeepSeek from zero.
    offset = 1 if config.get("decoder_sparse_step") else 0
    return tuple(
        layer
        for layer in range(int(config["num_hidden_layers"]))
        if layer >= first and layer not in dense and (layer + offset) % every == 0
    )

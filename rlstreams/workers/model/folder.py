"""Facts of a model folder's small files, read without torch and without the weights.

Families write the same fact under different names; this is the one module that knows them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.model.base import EngineError

# Longest sequence: most families; GPT-2; GPT-J and older ones; DBRX and MPT.
_LONGEST = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NO_LIMIT = 1 << 20  # where a folder names no limit: relative positions; memory ends it before


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` as it stands.

    Raises:
        EngineError: no such file, not JSON, or without `model_type` and `architectures`.
    """
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise EngineError(f"model folder {str(folder)!r}: cannot read config.json: {err}") from err
    for key in ("model_type", "architectures"):
        if not isinstance(config, dict) or not config.get(key):
            raise EngineError(f"{path}: field {key!r} is missing")
    return config


def text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the language model; a model that also sees pictures has them one level down."""
    return {**config, **(config.get("text_config") or {})}


def module_name(config: Mapping[str, Any]) -> tuple[str, str]:
    """The module of transformers that has the model, and its class there.

    A language model that was cut out of a larger one (`gemma3_text`) is in that one's module.
    """
    kind = str(config["model_type"]).replace("-", "_").removesuffix("_text")
    return f"transformers.models.{kind}.modeling_{kind}", str(config["architectures"][0])


def vocab_size_of(config: Mapping[str, Any]) -> int:
    """Rows of the embedding: token ids are below it.

    Raises:
        EngineError: the folder does not name it.
    """
    size = text_fields(config).get("vocab_size")
    if not size:
        raise EngineError(f"config.json of a {config.get('model_type')} has no vocab_size")
    return int(size)


def max_tokens_of(config: Mapping[str, Any]) -> int | None:
    """Longest sequence that the model was made for; None where the folder names none."""
    fields = text_fields(config)
    return next((int(fields[key]) for key in _LONGEST if fields.get(key)), None)


def token_limit(config: Mapping[str, Any]) -> int:
    """`max_tokens_of`, or a million where there is no limit."""
    return max_tokens_of(config) or _NO_LIMIT


def num_experts_of(config: Mapping[str, Any]) -> int:
    """Experts per layer; 0 for a dense model. Names differ between models and library versions."""
    fields = text_fields(config)
    nested = fields.get("ffn_config") or {}  # DBRX
    found = (place.get(key) for place in (fields, nested) for key in _EXPERTS)
    return next((int(number) for number in found if number), 0)


def check_heads(config: Mapping[str, Any], cp: int, asked_by: str) -> None:
    """Check that `layout.cp` divides a model's heads; those of keys may be repeated.

    Raises:
        ConfigError: names the numbers and what would fit.
    """
    fields = text_fields(config)
    heads = int(fields.get("num_attention_heads") or 0)
    of_keys = int(fields.get("num_key_value_heads") or heads)
    fits = [n for n in range(1, heads + 1) if not heads % n and not (of_keys % n and n % of_keys)]
    if heads and cp not in fits:
        raise ConfigError(
            f"{asked_by}.layout.cp is {cp}, which does not fit the model's num_attention_heads, "
            f"{heads}, and num_key_value_heads, {of_keys}: it may be {', '.join(map(str, fits))}"
        )


def eos_ids_of(folder: Path) -> frozenset[int]:
    """Tokens that end an answer; `generation_config.json` goes before `config.json`, and in that
    the language model's before the whole model's. Null says nothing."""
    path, config = folder / "generation_config.json", read_config(folder)
    chosen = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for fields in (chosen, config.get("text_config") or {}, config):
        if (found := fields.get("eos_token_id")) is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()

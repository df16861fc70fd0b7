"""A model folder without weights: enough for a server that starts with `--load-format dummy`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.gpu.model_rows import Shape


def write_model(folder: Path, shape: Shape) -> Path:
    """`config.json` of a Qwen3-MoE of this shape, or of a Qwen3 if it has no experts."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if shape.experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if shape.experts else "qwen3",
        "attention_bias": False,
        "bos_token_id": 1,
        "decoder_sparse_step": 1,
        "eos_token_id": 2,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": 4 * shape.expert_width if shape.experts else shape.expert_width,
        "max_position_embeddings": 16384,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.expert_width,
        "norm_topk_prob": True,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": 8,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder

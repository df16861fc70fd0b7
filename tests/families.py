"""Tiny models with random weights, one of each family of causal language models.

Small numbers everywhere; windows shorter than the sequences of the tests, so that a mask that
forgets them is seen. `make` saves a folder as a user would have it, without a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 48
_SMALL: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,  # far from uniform, so that errors are far from rounding
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_TIED_GEMMA = {"initializer_range": 0.12}  # tied and scaled up: else it only repeats its input

# Class of the model -> what its configuration has beyond the small numbers.
DENSE: Mapping[str, Mapping[str, Any]] = {
    "ApertusForCausalLM": {},
    "Cohere2ForCausalLM": _HEADS | _MIXED | {"logit_scale": 1.0},
    "CohereForCausalLM": {"logit_scale": 1.0},
    "Ernie4_5ForCausalLM": {},
    "Exaone4ForCausalLM": _MIXED,
    "FalconForCausalLM": {},
    "GPT2LMHeadModel": _GPT2,
    "GPTJForCausalLM": _GPT2 | {"rotary_dim": 4},
    "GPTNeoXForCausalLM": {},
    "Gemma2ForCausalLM": _HEADS
    | _MIXED
    | {"attn_logit_softcapping": 5.0, "initializer_range": 0.25},
    "Gemma3ForCausalLM": _HEADS | _MIXED | _TIED_GEMMA,
    "GemmaForCausalLM": _HEADS,
    "Glm4ForCausalLM": _HEADS,
    "GraniteForCausalLM": {},
    "HunYuanDenseV1ForCausalLM": _HEADS,
    "LlamaForCausalLM": {},
    "Ministral3ForCausalLM": _HEADS,
    "MinistralForCausalLM": _HEADS | _MIXED,
    "MistralForCausalLM": {"sliding_window": 5},
    "MptForCausalLM": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "NemotronForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": _MIXED,
    "Phi3ForCausalLM": {"sliding_window": 5},
    "PhiForCausalLM": {},
    "Qwen2ForCausalLM": {"tie_word_embeddings": True, "initializer_range": 0.2},
    "Qwen3ForCausalLM": _HEADS,
    "SeedOssForCausalLM": _HEADS,
    "SmolLM3ForCausalLM": {},
    "StableLmForCausalLM": {},
    "Starcoder2ForCausalLM": {"sliding_window": 5},
}
MOE: Mapping[str, Mapping[str, Any]] = {
    "AfmoeForCausalLM": _EXPERTS | _MIXED | _HEADS,
    "DeepseekV2ForCausalLM": _DEEPSEEK | {"topk_method": "greedy"},
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Dots1ForCausalLM": _DEEPSEEK | _HEADS,
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_layer_start_index": 0,
    },
    "FlexOlmoForCausalLM": _EXPERTS,
    "Glm4MoeForCausalLM": _DEEPSEEK | _HEADS | {"num_key_value_heads": 2},
    "Glm4MoeLiteForCausalLM": _DEEPSEEK,
    "GptOssForCausalLM": _HEADS | _LOCAL_EXPERTS | _MIXED,
    "GraniteMoeForCausalLM": _LOCAL_EXPERTS,
    "HunYuanMoEV1ForCausalLM": _HEADS | _EXPERTS,
    "MiniMaxM2ForCausalLM": _HEADS | _LOCAL_EXPERTS,
    "MixtralForCausalLM": _LOCAL_EXPERTS | {"sliding_window": 5},
    "OlmoeForCausalLM": _EXPERTS,
    "PhimoeForCausalLM": _LOCAL_EXPERTS,
    "Qwen2MoeForCausalLM": _EXPERTS | {"shared_expert_intermediate_size": 24},
    "Qwen3MoeForCausalLM": _HEADS | _EXPERTS,
    "SolarOpenForCausalLM": _DEEPSEEK | _HEADS,
}
# A mixture whose router tells its choices in a way of its own: it runs, nothing is recorded.
MOE_UNRECORDED: Mapping[str, Mapping[str, Any]] = {
    "JetMoeForCausalLM": {"kv_channels": 8} | _LOCAL_EXPERTS,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Layers with a state: scored and trained, not sampled by the built-in engine.
STATEFUL: Mapping[str, Mapping[str, Any]] = {
    "Qwen3NextForCausalLM": _HEADS | _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 24},
    "Qwen3_5ForCausalLM": _HEADS | _LINEAR,
}
# Not sampled by the built-in engine, each for another reason.
REFUSED: Mapping[str, Mapping[str, Any]] = {
    "BloomForCausalLM": {"n_head": 4, "n_layer": 2},  # positions follow from a mask of its own
    "FalconH1ForCausalLM": {},  # layers of a kind that is not known
    "RwkvForCausalLM": {},  # runs, and gives other numbers
}
SAMPLED = {**DENSE, **MOE, **MOE_UNRECORDED}
ALL = {**SAMPLED, **STATEFUL, **REFUSED}


def make(name: str, folder: Path, **changes: object) -> Path:
    """A folder with config and weights of a random model; returns it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kinds = [k for k, v in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if v == name]
    # `gpt2`, not `gpt-sw3`, which is the same class; `qwen3_5_text`, not the one with pictures.
    kind = max((k for k in kinds if "-" not in k), key=lambda k: k.endswith("_text"))
    config = CONFIG_MAPPING[kind](**{**_SMALL, **ALL[name], **changes})
    base = kind.removesuffix("_text").replace("-", "_")
    cls = getattr(import_module(f"transformers.models.{base}.modeling_{base}"), name)
    torch.manual_seed(7)
    cls(config).save_pretrained(folder)
    return folder

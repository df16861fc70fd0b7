"""Names, dtypes and shapes of a Qwen3-MoE: as the trainer holds it, and as a vLLM server does."""

from __future__ import annotations

from dataclasses import dataclass, replace

Row = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the rows follow from."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int  # 0: a dense model, whose width is `expert_width`
    expert_width: int
    vocabulary: int


SHAPES = {
    # As published for Qwen3-30B-A3B: 61.06 GB in bfloat16.
    "30b-a3b": Shape(
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        experts=128,
        expert_width=768,
        vocabulary=151936,
    ),
    "small": Shape(
        layers=4,
        hidden=256,
        heads=8,
        kv_heads=2,
        head_dim=64,  # SGLang caches keys of 16 bits of 64, 128, 256 or 512 only
        experts=16,
        expert_width=128,
        vocabulary=4096,
    ),
}
SHAPES["16gb"] = replace(SHAPES["30b-a3b"], layers=12)  # as many bytes as 8B weights have


def trainer_rows(shape: Shape) -> list[Row]:
    """Hugging Face names, experts fused."""
    experts = {
        "gate.weight": (shape.experts, shape.hidden),
        "experts.gate_up_proj": (shape.experts, 2 * shape.expert_width, shape.hidden),
        "experts.down_proj": (shape.experts, shape.hidden, shape.expert_width),
    }
    return _rows(shape, _attention(shape), experts)


def dense_rows(shape: Shape) -> list[Row]:
    """Hugging Face names of a Qwen3 without experts."""
    mlp = {
        "gate_proj.weight": (shape.expert_width, shape.hidden),
        "up_proj.weight": (shape.expert_width, shape.hidden),
        "down_proj.weight": (shape.hidden, shape.expert_width),
    }
    return _rows(shape, _attention(shape), mlp)


def server_rows(shape: Shape) -> list[Row]:
    """As vLLM names them: q, k and v in one, experts stacked."""
    num_rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    experts = {
        "gate.weight": (shape.experts, shape.hidden),
        "experts.routed_experts.w13_weight": (shape.experts, 2 * shape.expert_width, shape.hidden),
        "experts.routed_experts.w2_weight": (shape.experts, shape.hidden, shape.expert_width),
    }
    return _rows(shape, {"qkv_proj": (num_rows, shape.hidden)}, experts)


def _attention(shape: Shape) -> dict[str, tuple[int, ...]]:
    return {
        "q_proj": (shape.heads * shape.head_dim, shape.hidden),
        "k_proj": (shape.kv_heads * shape.head_dim, shape.hidden),
        "v_proj": (shape.kv_heads * shape.head_dim, shape.hidden),
    }


def _rows(
    shape: Shape, attention: dict[str, tuple[int, ...]], mlp: dict[str, tuple[int, ...]]
) -> list[Row]:
    rows: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocabulary, shape.hidden),
        "model.norm.weight": (shape.hidden,),
        "lm_head.weight": (shape.vocabulary, shape.hidden),
    }
    for layer in range(shape.layers):
        head = f"model.layers.{layer}"
        rows |= {f"{head}.self_attn.{n}.weight": s for n, s in attention.items()}
        rows |= {f"{head}.mlp.{n}": s for n, s in mlp.items()}
        rows |= {
            f"{head}.self_attn.o_proj.weight": (shape.hidden, shape.heads * shape.head_dim),
            f"{head}.self_attn.q_norm.weight": (shape.head_dim,),
            f"{head}.self_attn.k_norm.weight": (shape.head_dim,),
            f"{head}.input_layernorm.weight": (shape.hidden,),
            f"{head}.post_attention_layernorm.weight": (shape.hidden,),
        }
    return [(name, "bfloat16", rows[name]) for name in sorted(rows)]

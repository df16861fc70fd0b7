"""Tables of names, by family: the place of each Hugging Face tensor in a megatron-core model.

Each tensor of the folder is a `TensorPart`: rows or columns of one parameter of the other model,
each rank with its share. Queries, keys and values of a group of heads lie together there, gate and
up in one matrix. Reading, publishing, gradients and checkpoints all go through these parts, so that
no module outside of this folder knows another name than Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.folder import num_experts_of
from rlstreams.workers.model.megatron.layout import Layout

EXPERTS = "mlp.experts."  # in names of parameters that hold all experts of a rank (`build.py`)
_ROPE = ("default", "linear", "llama3")  # frequencies that do not change with the length


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """A tensor of the folder, and the place of one rank's share of it."""

    name: str
    shape: tuple[int, ...]  # whole
    parameter: str  # of the rank's module
    axis: int = 0  # axis along which it is cut ...
    by: str = ""  # ... `tp` or `ep`; "": every rank of the stage has all of it
    groups: int = 1  # the parameter has so many blocks of rows, and each block has
    start: int = 0  # ... from this row on
    rows: int = 0  # ... so many of this tensor; 0: the parameter is this tensor alone
    stage: int = 0
    is_summed: bool = False  # tensor ranks have different gradients of it
    published: str = ""  # if another than `name`: for tied weights, the published name

    def index(self, rank: int, layout: Layout) -> tuple[slice, ...] | None:
        """Slices of the whole that a rank has; None: it is of another stage."""
        if layout.stage(rank) != self.stage:
            return None
        found = [slice(0, size) for size in self.shape]
        if self.by:
            number = layout.tp_rank(rank) if self.by == "tp" else layout.ep_rank(rank)
            share = self.shape[self.axis] // int(getattr(layout, self.by))
            found[self.axis] = slice(number * share, (number + 1) * share)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Family:
    """Parts of a family's layers beside those that all families have."""

    heads_have_norms: bool = False
    has_experts: bool = False


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(),
    "Qwen3ForCausalLM": Family(heads_have_norms=True),
    "Qwen3MoeForCausalLM": Family(heads_have_norms=True, has_experts=True),
}


def family_of(config: Any) -> Family:  # noqa: ANN401  (a configuration of an untyped library)
    """
    Raises:
        EngineError: a family without a table, or a member with a feature beyond it.
    """
    name = (config.architectures or ["?"])[0]
    if name not in FAMILIES:
        raise EngineError(
            f"backend megatron has no table of names for a {name}; it has those of "
            f"{', '.join(FAMILIES)}: use another backend"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    beyond = {
        "hidden_act": config.hidden_act if config.hidden_act != "silu" else "",
        "rope_type": rope if rope not in _ROPE else "",
        "layer_types": ", ".join(sorted(layers)),
        "attention_bias": getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
    }
    for field, value in beyond.items():
        if value:
            raise EngineError(
                f"backend megatron: {field} is {value!r} in config.json, for which the table of "
                f"{name} has no place: use another backend"
            )
    return FAMILIES[name]


def mixed_layers(config: Any) -> list[bool]:  # noqa: ANN401
    """Whether each layer is a mixture of experts, by layer."""
    if not family_of(config).has_experts:
        return [False] * config.num_hidden_layers
    only, every = config.mlp_only_layers, config.decoder_sparse_step
    return [n not in only and (n + 1) % every == 0 for n in range(config.num_hidden_layers)]


def plain_config(fields: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Fields of a `config.json` for `check_layout`, without the library that would read it."""
    known = {name: value for name, value in fields.items() if value is not None}
    usual: dict[str, Any] = {
        "architectures": None,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "num_key_value_heads": known.get("num_attention_heads"),
        "num_experts": num_experts_of(known),
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }
    return SimpleNamespace(**usual | known)


def check_layout(config: Any, layout: Layout) -> None:  # noqa: ANN401
    """
    Raises:
        ConfigError: a part of the layout does not divide the model.
        EngineError: see `family_of`.
    """
    experts = config.num_experts if any(mixed_layers(config)) else 0
    facts = [
        ("num_attention_heads", config.num_attention_heads, "tp"),
        ("num_key_value_heads", config.num_key_value_heads, "tp"),
        ("intermediate_size", config.intermediate_size, "tp"),
        ("vocab_size", config.vocab_size, "tp"),
        ("num_hidden_layers", config.num_hidden_layers, "pp"),
    ]
    layout.check(facts + ([("num_experts", experts, "ep")] if experts else []), experts)
    if config.tie_word_embeddings and layout.pp > 1:
        raise EngineError(
            f"{layout.asked_by}.layout.pp is {layout.pp}, but embedding and head of this model are "
            "one tensor (tie_word_embeddings), which two stages cannot both have: set pp to 1"
        )


def parts_of(config: Any, layout: Layout) -> list[TensorPart]:  # noqa: ANN401
    """All tensors of the model, in any order."""
    size, words = config.hidden_size, config.vocab_size
    table: dict[str, Any] = {"shape": (words, size), "by": "tp"}
    last = layout.pp - 1
    embedding = "embedding.word_embeddings.weight"
    tied = "lm_head.weight" if config.tie_word_embeddings else ""
    found = [
        TensorPart(name="model.embed_tokens.weight", parameter=embedding, published=tied, **table),
        TensorPart(
            name="model.norm.weight",
            shape=(size,),
            parameter="decoder.final_layernorm.weight",
            stage=last,
        ),
    ]
    if not tied:
        head = "output_layer.weight"
        found.append(TensorPart(name="lm_head.weight", parameter=head, stage=last, **table))
    depth = config.num_hidden_layers // layout.pp
    for layer, is_mixed in enumerate(mixed_layers(config)):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer % depth}."
        for kwargs in (
            *_attention(config, layout),
            *(_experts(config) if is_mixed else _mlp(config, layout)),
        ):
            name, parameter = theirs + kwargs.pop("name"), ours + kwargs.pop("parameter")
            found.append(TensorPart(name=name, parameter=parameter, stage=layer // depth, **kwargs))
    return found


def _attention(config: Any, layout: Layout) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    size, heads, groups = (
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    )  # fmt: skip
    width = head_width(config)
    of_group = heads // groups * width
    start = 0
    for letter, rows in (("q", of_group), ("k", width), ("v", width)):
        yield {
            "name": f"self_attn.{letter}_proj.weight",
            "shape": (groups * rows, size),
            "parameter": "self_attention.linear_qkv.weight",
            "by": "tp",
            "groups": groups // layout.tp,
            "start": start,
            "rows": rows,
        }
        start += rows
    yield {
        "name": "self_attn.o_proj.weight",
        "shape": (size, heads * width),
        "parameter": "self_attention.linear_proj.weight",
        "axis": 1,
        "by": "tp",
    }
    if family_of(config).heads_have_norms:
        for letter in "qk":
            yield {
                "name": f"self_attn.{letter}_norm.weight",
                "shape": (width,),
                "parameter": f"self_attention.{letter}_layernorm.weight",
                "is_summed": True,  # tensor ranks have other heads
            }
    norms = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"}
    for name, parameter in norms.items():
        yield {"name": f"{name}.weight", "shape": (size,), "parameter": f"{parameter}.weight"}


def _mlp(config: Any, layout: Layout) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    size, inner = config.hidden_size, config.intermediate_size
    rows = inner // layout.tp
    for number, name in enumerate(("gate", "up")):
        yield {
            "name": f"mlp.{name}_proj.weight",
            "shape": (inner, size),
            "parameter": "mlp.linear_fc1.weight",
            "by": "tp",
            "start": number * rows,
            "rows": rows,
        }
    yield {
        "name": "mlp.down_proj.weight",
        "shape": (size, inner),
        "parameter": "mlp.linear_fc2.weight",
        "axis": 1,
        "by": "tp",
    }


def _experts(config: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    size, inner, number = config.hidden_size, config.moe_intermediate_size, config.num_experts
    yield {"name": "mlp.gate.weight", "shape": (number, size), "parameter": "mlp.router.weight"}
    shapes = {"gate_up_proj": (2 * inner, size), "down_proj": (size, inner)}
    for (name, shape), layer in zip(shapes.items(), ("linear_fc1", "linear_fc2"), strict=True):
        yield {
            "name": f"mlp.experts.{name}",
            "shape": (number, *shape),
            "parameter": f"{EXPERTS}{layer}",
            "by": "ep",
        }


def head_width(config: Any) -> int:  # noqa: ANN401
    """Width of one head."""
    width: int = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return width

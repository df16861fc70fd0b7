"""The map between two layouts: the trainer's tensors that make up a server's parameter. Pure.

The trainer holds a Hugging Face state dict. Servers fuse q, k and v by rows, gate and up by rows,
and stack experts; one of several ranks holds a shard. Every rule is one of shapes, so a parameter
that no rule explains is never filled by guess: it goes through the model's own loader, or is
refused by name. Sources for the names: vLLM's and SGLang's Qwen3-MoE and Llama model files.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from .errors import PullError
from .pieces import SIZES, Piece
from .shards import Part, parts_of, split
from .target import Row

if TYPE_CHECKING:
    import torch

_SHOWN = 3
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
_OUTPUT = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
# Modules that a server's loader does not keep as the folder has them, though shapes are equal:
# heads in another order (GPT-NeoX, Falcon), or transposed (GPT-2), or copied once more into what
# attention computes with (latent attention, DeepSeek: SGLang's `w_kc` and `w_vc`).
_ARRANGED = frozenset({"query_key_value", "c_attn", "c_proj", "c_fc", "kv_b_proj"})
# Fused by the trainer's library too (Phi-3, GLM-4, MPT, linear attention, Granite's shared expert,
# towers for images): a rank has its share of each part, not a run of rows.
_FUSED_THERE = frozenset(
    {*FUSED, "Wqkv", "qkv", "conv1d", "in_proj", "in_proj_qkv", "in_proj_qkvz", "input_linear"}
)
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
# Pieces in sending order, each with the sender's part that fills it.
Plan: TypeAlias = list[tuple[Piece, Part]]
Held: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]


def make_plan(
    sources: Sequence[Row], targets: Sequence[Row], *, mode: str, rank: int = 0, ranks: int = 1
) -> Plan:
    """Map the trainer's tensors to a receiver's parameters.

    Args:
        mode: `in_place`; `checkpoint`: nothing in place, all through the loader; `auto`: in place,
            and the rest through the loader.

    Raises:
        PullError: `layout`, naming tensors without a counterpart, or those that cannot be sent.
    """
    if not 0 <= rank < ranks:
        raise PullError(
            "layout", f"rank {rank} of {ranks}: stages of a pipeline cannot be distinguished"
        )
    if odd := [f"{name} {dtype}" for name, dtype, _ in sources if dtype not in SIZES]:
        raise PullError("layout", f"tensors of a type that is not sent: {few(odd)}")
    held = {name: (dtype, tuple(shape)) for name, dtype, shape in sources}
    if mode == "checkpoint":
        return [_loaded(name, held, targets) for name in held]
    rows = [(name, dtype, tuple(shape)) for name, dtype, shape in targets]
    is_own = mode == "in_place"  # the built-in engine's parameters are those of the trainer
    found = {row: _placed(row, held, rank, ranks, is_own=is_own) for row in rows}
    unmapped = [row for row, pieces in found.items() if pieces is None]
    # A loader makes a module anew from the tensors that it gets: then it must get all of the
    # module's.
    loaded = {_module(row) for row in unmapped}
    by_loader = {row[0] for row in found if _module(row) in loaded}
    placed: Plan = []
    used: set[str] = set()
    for row, pieces in found.items():
        if pieces is not None and _module(row) not in loaded:
            placed += pieces
            used |= {part.name for _, part in pieces}
    theirs = {row[0] for row in rows}
    is_lacking = any(not source_names(name, held) for name, _, _ in unmapped)
    left = [
        name
        for name in held
        if name not in used
        and (is_lacking or not _may_be_tied(name) or loader_name(name, held, theirs) in by_loader)
    ]
    if (unmapped or left) and (mode == "in_place" or not left):
        raise PullError("layout", _difference(unmapped, left, held))
    return [*placed, *(_loaded(name, held, targets) for name in left)]


def _module(row: Row) -> str:
    return row[0].rpartition(".")[0]


def _loaded(name: str, held: Held, targets: Sequence[Row]) -> tuple[Piece, Part]:
    dtype, shape = held[name]
    theirs = {row[0] for row in targets}
    return Piece("load", loader_name(name, held, theirs), dtype, 0, shape), Part(name, shape)


def loader_name(name: str, held: Container[str], theirs: Collection[str]) -> str:
    """The name under which a server's loader takes a tensor of the trainer's: of tied weights the
    embedding's, for it passes over an output layer that the model's configuration ties.

    Args:
        theirs: names of the server's parameters, or of the tensors in the model's folder.
    """
    if name != _OUTPUT:
        return name
    lacking = [other for other in theirs if other.endswith(_EMBEDDINGS) and other not in held]
    return lacking[0] if len(lacking) == 1 else name


def _may_be_tied(name: str) -> bool:
    return name == _OUTPUT or name.endswith(_EMBEDDINGS)


def _placed(row: Row, held: Held, rank: int, ranks: int, *, is_own: bool) -> Plan | None:
    """The pieces of one parameter; None if no rule explains it."""
    name, dtype, shape = row
    module = _module(row).rpartition(".")[2]
    if name in held and (
        (module in _ARRANGED and not is_own) or (module in _FUSED_THERE and ranks > 1)
    ):
        return None
    names = source_names(name, held)
    if not names or not all(_castable(held[source][0], dtype) for source in names):
        return None
    parts = split(parts_of(names, held), tuple(shape), rank, ranks)
    if parts is None:
        return None
    placed, start = [], 0
    for part in parts:
        placed.append((Piece("parameter", name, dtype, start, part.shape), part))
        start += math.prod(part.shape)
    return placed


def source_names(name: str, held: Mapping[str, object]) -> tuple[str, ...]:
    """The trainer's tensors that make up a parameter, in row order; empty if none do."""
    if name in held:
        return (name,)
    if _may_be_tied(name):
        return tuple(other for other in held if _may_be_tied(other))[:1]
    head, _, last = name.rpartition(".")
    if last in EXPERTS:
        experts = head.removesuffix(".routed_experts")
        return _present((f"{experts}.{EXPERTS[last]}",), held)
    head, _, module = head.rpartition(".")
    return _present(tuple(f"{head}.{part}.{last}" for part in FUSED.get(module, ())), held)


def _present(names: tuple[str, ...], held: Mapping[str, object]) -> tuple[str, ...]:
    return names if all(name in held for name in names) else ()


def _castable(source: str, target: str) -> bool:
    return source == target or {source, target} <= _FLOATS


def _difference(unmapped: Sequence[Row], left: Sequence[str], held: Held) -> str:
    theirs = [f"{name} {dtype} {list(shape)}" for name, dtype, shape in unmapped]
    ours = [f"{name} {held[name][0]} {list(held[name][1])}" for name in left]
    return (
        f"the server's parameters without a source: {few(theirs)}; "
        f"the trainer's tensors without a place: {few(ours)}"
    )


def few(names: Sequence[str]) -> str:
    """The first of these names, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "none") + more


def each_expert(
    tensors: Iterable[tuple[str, torch.Tensor]], names: Container[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and views: an expert's matrices under the names of model folders, others unchanged.

    `mlp.experts.gate_up_proj` (experts, 2 x width, hidden) holds gate above up;
    `mlp.experts.down_proj` is (experts, hidden, width). Experts with a bias are those of gpt-oss,
    which are otherwise laid out, and fused in its folders too.

    Args:
        names: of all tensors of the version.
    """
    for name, tensor in tensors:
        stem, _, leaf = name.rpartition(".")
        is_fused = stem.endswith(".experts") and leaf in ("gate_up_proj", "down_proj")
        if not is_fused or f"{name}_bias" in names:
            yield name, tensor
            continue
        for expert, matrix in enumerate(tensor):
            if leaf == "down_proj":
                yield f"{stem}.{expert}.down_proj.weight", matrix
                continue
            gate, up = matrix.chunk(2)
            yield f"{stem}.{expert}.gate_proj.weight", gate
            yield f"{stem}.{expert}.up_proj.weight", up

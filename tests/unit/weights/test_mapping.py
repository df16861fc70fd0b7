"""The map between a trainer's layout and a server's: fused, stacked, sharded, cast, or refused."""

from __future__ import annotations

import math

import pytest
import torch

from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.mapping import Plan, make_plan
from rlstreams.workers.weights.link.target import FreshTensors, Row, run_of

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, WIDTH, VOCABULARY = 16, 8, 2, 4, 4, 8, 128
LAYER = "model.layers.0"
CPU = torch.device("cpu")

TRAINER: list[Row] = [
    (f"{LAYER}.mlp.experts.down_proj", "float32", (EXPERTS, HIDDEN, WIDTH)),
    (f"{LAYER}.mlp.experts.gate_up_proj", "float32", (EXPERTS, 2 * WIDTH, HIDDEN)),
    (f"{LAYER}.mlp.gate.weight", "float32", (EXPERTS, HIDDEN)),
    (f"{LAYER}.self_attn.k_proj.weight", "float32", (KV_HEADS * HEAD_DIM, HIDDEN)),
    (f"{LAYER}.self_attn.o_proj.weight", "float32", (HIDDEN, HEADS * HEAD_DIM)),
    (f"{LAYER}.self_attn.q_proj.weight", "float32", (HEADS * HEAD_DIM, HIDDEN)),
    (f"{LAYER}.self_attn.v_proj.weight", "float32", (KV_HEADS * HEAD_DIM, HIDDEN)),
    ("model.embed_tokens.weight", "float32", (VOCABULARY, HIDDEN)),
    ("model.norm.weight", "float32", (HIDDEN,)),
]
WEIGHTS = {name: torch.randn(shape) for name, _, shape in TRAINER}


def server(ranks: int, rank: int, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """What a rank of a server must hold: cut as vLLM's layers cut when they load a checkpoint."""
    q, k, v = (WEIGHTS[f"{LAYER}.self_attn.{x}_proj.weight"] for x in "qkv")
    gate, up = WEIGHTS[f"{LAYER}.mlp.experts.gate_up_proj"].chunk(2, 1)
    copies = max(1, ranks // KV_HEADS)  # of a key-value head
    heads = max(1, KV_HEADS // ranks) * HEAD_DIM
    place = rank // copies * heads
    held = {
        f"{LAYER}.mlp.experts.w13_weight": torch.cat(
            [gate.chunk(ranks, 1)[rank], up.chunk(ranks, 1)[rank]], 1
        ),
        f"{LAYER}.mlp.experts.w2_weight": WEIGHTS[f"{LAYER}.mlp.experts.down_proj"].chunk(ranks, 2)[
            rank
        ],
        f"{LAYER}.mlp.gate.weight": WEIGHTS[f"{LAYER}.mlp.gate.weight"],
        f"{LAYER}.self_attn.o_proj.weight": WEIGHTS[f"{LAYER}.self_attn.o_proj.weight"].chunk(
            ranks, 1
        )[rank],
        f"{LAYER}.self_attn.qkv_proj.weight": torch.cat(
            [q.chunk(ranks)[rank], k[place : place + heads], v[place : place + heads]]
        ),
        "model.embed_tokens.weight": WEIGHTS["model.embed_tokens.weight"].chunk(ranks)[rank],
        "model.norm.weight": WEIGHTS["model.norm.weight"],
    }
    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in held.items()}


def rows(tensors: dict[str, torch.Tensor]) -> list[Row]:
    return [
        (name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()
    ]


def carry_out(plan: Plan, targets: list[Row]) -> dict[str, torch.Tensor]:
    """Move every piece, as the two ends do."""
    fresh = FreshTensors(targets, CPU)
    for tensor in fresh.tensors.values():
        tensor.fill_(math.nan)
    for piece, part in plan:
        made = part.cut(WEIGHTS[part.name]).to(getattr(torch, piece.dtype)).contiguous()
        run_of(fresh.tensors, piece).copy_(made.view(-1).view(torch.uint8))
    return fresh.tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_gets_what_its_layers_would_cut(ranks: int, dtype: str) -> None:
    """Fused rows, inner splits, shared key-value heads and casts, byte for byte."""
    for rank in range(ranks):
        expected = server(ranks, rank, dtype)
        plan = make_plan(TRAINER, rows(expected), mode="in_place", rank=rank, ranks=ranks)
        found = carry_out(plan, rows(expected))
        for name, tensor in expected.items():
            assert torch.equal(tensor, found[name]), f"{name}, rank {rank} of {ranks}"


def test_experts_dealt_out_in_runs() -> None:
    """Expert parallel: a rank holds whole experts."""
    name = f"{LAYER}.mlp.experts.w2_weight"
    whole = WEIGHTS[f"{LAYER}.mlp.experts.down_proj"]
    source = [row for row in TRAINER if row[0].endswith("down_proj")]
    target = [(name, "float32", (2, HIDDEN, WIDTH))]
    plan = make_plan(source, target, mode="in_place", rank=1, ranks=2)
    assert torch.equal(whole[2:], carry_out(plan, target)[name])


def test_a_padded_vocabulary_keeps_its_padding() -> None:
    """Rows behind the last token are the server's own."""
    target = [("model.embed_tokens.weight", "float32", (VOCABULARY + 32, HIDDEN))]
    source = [row for row in TRAINER if "embed" in row[0]]
    found = carry_out(make_plan(source, target, mode="in_place"), target)[target[0][0]]
    assert torch.equal(WEIGHTS["model.embed_tokens.weight"], found[:VOCABULARY])
    assert bool(found[VOCABULARY:].isnan().all())


EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_tied_weights_go_by_either_name(embedding: str) -> None:
    """The trainer sends a tied tensor once, under the name that sorts first."""
    source = [("lm_head.weight", "float32", (VOCABULARY, HIDDEN))]
    target = [(embedding, "float32", (VOCABULARY, HIDDEN))]
    ((_, part),) = make_plan(source, target, mode="in_place")
    assert part.name == "lm_head.weight"


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_a_loader_gets_tied_weights_as_the_embedding(embedding: str) -> None:
    """vLLM's and SGLang's loaders pass over `lm_head.weight` of a model that ties it."""
    source = [("lm_head.weight", "float32", (VOCABULARY, HIDDEN))]
    target = [(embedding, "float8_e4m3fn", (VOCABULARY, HIDDEN))]
    ((piece, part),) = plan = make_plan(source, target, mode="checkpoint")
    assert (piece.place, piece.name) == ("load", embedding)
    assert part.name == "lm_head.weight"
    assert plan == make_plan(source, target, mode="auto")
    both = [("lm_head.weight", "bfloat16", (VOCABULARY, HIDDEN)), *target]  # packed apart, on a CPU
    assert plan == make_plan(source, both, mode="checkpoint")


def test_an_output_layer_of_its_own_keeps_its_name() -> None:
    """Whatever the embedding is called, and though a server has the layer under another name."""
    source: list[Row] = [
        ("lm_head.weight", "float32", (VOCABULARY, HIDDEN)),
        ("transformer.wte.weight", "float32", (VOCABULARY, HIDDEN)),
    ]
    whole = make_plan(source, source, mode="checkpoint")
    assert [piece.name for piece, _ in whole] == [name for name, _, _ in source]
    target = [("embed_out.weight", "float32", (VOCABULARY, HIDDEN)), source[1]]
    found = places(make_plan(source, target, mode="auto"))
    assert found == {"lm_head.weight": "load", "transformer.wte.weight": "parameter"}


def test_what_cannot_be_mapped_is_refused_by_name_of_both_sides() -> None:
    """In place means all in place."""
    target = rows(server(1, 0))
    target[4] = (target[4][0], "float32", (3, 3))
    with pytest.raises(PullError) as caught:
        make_plan(TRAINER, target, mode="in_place")
    assert caught.value.kind == "layout"
    assert "qkv_proj.weight float32 [3, 3]" in str(caught.value)
    assert "q_proj.weight float32 [32, 16]" in str(caught.value)


def test_what_cannot_be_mapped_goes_through_the_loader() -> None:
    """`auto` sends the sources of a quantised parameter by checkpoint name, the rest in place."""
    target = rows(server(1, 0))
    target[4] = (target[4][0], "float8_e4m3fn", target[4][2])
    plan = make_plan(TRAINER, target, mode="auto")
    loaded = {piece.name for piece, _ in plan if piece.place == "load"}
    assert loaded == {f"{LAYER}.self_attn.{x}_proj.weight" for x in "qkv"}
    assert len(plan) == 3 + 6


def places(plan: Plan) -> dict[str, str]:
    return {piece.name: piece.place for piece, _ in plan}


@pytest.mark.parametrize(
    "module",
    [
        "self_attn.qkv_proj",
        "mlp.gate_up_proj",
        "attn.Wqkv",
        "linear_attn.conv1d",
        "shared_mlp.input_linear",
        "attn.qkv",
    ],
)
def test_what_the_folder_has_fused_is_not_cut_straight_through(module: str) -> None:
    """A rank holds its share of q, of k and of v, which no shape tells apart."""
    source: list[Row] = [
        (f"{LAYER}.{module}.bias", "float32", (48,)),
        (f"{LAYER}.{module}.weight", "float32", (48, HIDDEN)),
        ("model.norm.weight", "float32", (HIDDEN,)),
    ]
    whole = make_plan(source, source, mode="auto")
    assert set(places(whole).values()) == {"parameter"}
    half = [(name, dtype, (24, *shape[1:])) for name, dtype, shape in source[:2]] + source[2:]
    found = places(make_plan(source, half, mode="auto", rank=1, ranks=2))
    assert found == {source[0][0]: "load", source[1][0]: "load", "model.norm.weight": "parameter"}


@pytest.mark.parametrize(
    "module",
    [
        "attention.query_key_value",
        "attn.c_attn",
        "attn.c_proj",
        "mlp.c_fc",
        "self_attn.kv_b_proj",
    ],
)
def test_what_a_loader_arranges_anew_goes_through_it(module: str) -> None:
    """Equal shapes say nothing of the order of heads, of a square matrix that is transposed, or of
    a second copy that the loader makes."""
    source: list[Row] = [
        (f"{LAYER}.{module}.weight", "float32", (HIDDEN, HIDDEN)),
        ("model.norm.weight", "float32", (HIDDEN,)),
    ]
    assert places(make_plan(source, source, mode="auto"))[source[0][0]] == "load"
    # The built-in engine has the model itself.
    assert places(make_plan(source, source, mode="in_place"))[source[0][0]] == "parameter"


def test_only_a_vocabulary_is_padded() -> None:
    """Fewer key-value heads than ranks: a shard of what goes with them is no padded run of rows."""
    source: list[Row] = [
        (f"{LAYER}.self_attn.k_norm.weight", "float32", (128,)),
        ("model.norm.weight", "float32", (HIDDEN,)),
    ]
    target = [(source[0][0], "float32", (64,)), source[1]]
    for rank in range(4):
        plan = make_plan(source, target, mode="auto", rank=rank, ranks=4)
        assert places(plan)[source[0][0]] == "load"


def test_a_bias_follows_its_quantised_weight_through_the_loader() -> None:
    """A loader makes the whole module anew: what it is not given would be left undefined."""
    biases: list[Row] = [
        (f"{LAYER}.self_attn.{x}_proj.bias", "float32", (heads * HEAD_DIM,))
        for x, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    ]
    num_rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    target = [row for row in rows(server(1, 0)) if "qkv" not in row[0]]
    target += [
        (f"{LAYER}.self_attn.qkv_proj.weight", "float8_e4m3fn", (HIDDEN, num_rows)),
        (f"{LAYER}.self_attn.qkv_proj.weight_scale", "float32", (1,)),
        (f"{LAYER}.self_attn.qkv_proj.bias", "float32", (num_rows,)),
    ]
    plan = make_plan(sorted([*TRAINER, *biases]), target, mode="auto")
    loaded = {piece.name for piece, _ in plan if piece.place == "load"}
    parts = ("weight", "bias")
    assert loaded == {f"{LAYER}.self_attn.{x}_proj.{part}" for x in "qkv" for part in parts}


def test_a_quantised_output_layer_goes_through_the_loader() -> None:
    """Though it may be tied, and a server without one lacks nothing."""
    source: list[Row] = [
        ("lm_head.weight", "float32", (VOCABULARY, HIDDEN)),
        ("model.embed_tokens.weight", "float32", (VOCABULARY, HIDDEN)),
    ]
    target = [("lm_head.weight", "float8_e4m3fn", (VOCABULARY, HIDDEN)), source[1]]
    found = places(make_plan(source, target, mode="auto"))
    assert found == {"lm_head.weight": "load", "model.embed_tokens.weight": "parameter"}


def test_a_parameter_of_the_servers_own_is_refused() -> None:
    """Nothing is left as it was by chance."""
    target = [*rows(server(1, 0)), ("model.extra.weight", "float32", (2,))]
    with pytest.raises(PullError, match=r"without a source: model.extra.weight float32 \[2\]"):
        make_plan(TRAINER, target, mode="auto")

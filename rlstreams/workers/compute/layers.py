"""A folder's model as one rank computes it: layers of Hugging Face or of megatron-core, on a mesh.

Learner and scorer get their layers here; no other module knows which layers there are, how they
are cut and whether they are compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.compute.mesh import Mesh
from rlstreams.workers.compute.shards import ShardedModel, Whole, plan_of
from rlstreams.workers.compute.spec import Layers, ModelSpec
from rlstreams.workers.config.trainer import MEGATRON, LoraSection
from rlstreams.workers.engines.selfcheck import load_scorer
from rlstreams.workers.model.base import CPU
from rlstreams.workers.model.bins import (
    EAGER_IF_PADDED,
    Reasons,
    compile_for_bins,
    take_documents,
    use_bins,
)
from rlstreams.workers.model.layers import TryingRanks, recompute_activations
from rlstreams.workers.model.token_scores import TokenScorer, ValueHead
from rlstreams.workers.trainer.learn.trainable import trainable_of


def layers_of(spec: ModelSpec, mesh: Mesh, scorer: TokenScorer | None = None) -> Layers:
    """Layers of the model of `spec`; all ranks call it together.

    Args:
        scorer: of the whole model, loaded already: on the mesh's device if that is one rank, else
            on the CPU. None: each rank loads it.

    Raises:
        ConfigError, EngineError: a model that cannot be computed so.
    """
    if spec.backend == MEGATRON:
        from rlstreams.workers.compute.megatron_shards import megatron_layers

        return megatron_layers(spec, mesh)
    routers = None
    if scorer is None:
        # Head and body can be separated only while the model is whole.
        place = mesh.device if mesh.size == 1 else CPU
        scorer, routers = load_scorer(
            spec.folder, spec.dtype, place, replay_routes=spec.replay_routes
        )
    trainable = trainable_of(scorer.model, spec.lora) if spec.learns else None
    if spec.has_values:
        scorer.value_head = _value_head(scorer, mesh.device)
    plan = plan_of(scorer.model, trainable, scorer.value_head)
    shards, why_not = (_alone if mesh.size == 1 else _shared)(spec, mesh, scorer)
    if scorer.value_head is not None:
        shards.add_head(scorer.value_head)
    scorer.head.holds_logits = spec.learns and not (why_not.why_padded or spec.recomputes)
    if spec.recomputes:
        recompute_activations(scorer.model)
    shards.reshard()
    return Layers(plan=plan, shards=shards, routers=routers, **why_not._asdict())


def _alone(spec: ModelSpec, mesh: Mesh, scorer: TokenScorer) -> tuple[ShardedModel, Reasons]:
    tokens, learns, shares = spec.bin_tokens, spec.learns, spec.shares
    why_not = use_bins(scorer, mesh.device, tokens, learns=learns, shares=shares)
    return Whole(scorer.model, scorer), why_not


def _shared(spec: ModelSpec, mesh: Mesh, scorer: TokenScorer) -> tuple[ShardedModel, Reasons]:
    # torch.distributed's tensors and FSDP2: five seconds, which one rank need not wait for.
    from rlstreams.workers.compute.fsdp2 import NOTHING_HELD, HeldWhole, Shards
    from rlstreams.workers.model.context import SlicedScores, apart, check_slices

    assert mesh.devices is not None, "ranks have met before"
    cp, tokens, learns = spec.layout.cp, spec.bin_tokens, spec.learns
    sliced = SlicedScores(scorer, cp, spec.asked_by) if cp > 1 else None
    held = HeldWhole.of(scorer.model, mesh) if learns else NOTHING_HELD
    shards = Shards(sliced or scorer, mesh.devices, f"{spec.asked_by}.ranks", cp=cp, held=held)
    root = shards.root
    if sliced is None:
        ranks = TryingRanks(mesh.gathered)
        return shards, use_bins(
            scorer, mesh.device, tokens, learns=learns, shares=spec.shares, root=root, ranks=ranks
        )
    why_padded = take_documents(scorer, mesh.device, root)
    check_slices(sliced, root, shards.device)
    why_eager = EAGER_IF_PADDED if why_padded else ""
    if not why_padded:
        ranks = TryingRanks(mesh.gathered, apart)
        why_eager = compile_for_bins(scorer, tokens, learns=learns, root=root, ranks=ranks)
    return shards, Reasons(why_padded, why_eager, "ranks share each row")


def _value_head(scorer: TokenScorer, device: str) -> ValueHead:
    """The head that computes values from the last hidden states of `scorer`'s model.

    Raises:
        ConfigError: a model whose last hidden states cannot be separated from its head.
    """
    if not scorer.gives_states:
        raise ConfigError(
            f"trainer.loss.advantage is 'gae', but a {type(scorer.model).__name__} does not show "
            "its last hidden states, which values are computed from: set another advantage"
        )
    config: Any = scorer.model.config
    return ValueHead(config.get_text_config().hidden_size, device)


def whole_layers(
    model: nn.Module, scorer: TokenScorer, *, lora: LoraSection, why_padded: str, why_unshared: str
) -> Layers:
    """Layers of a model that this process has whole and has loaded already."""
    plan = plan_of(model, trainable_of(model.eval(), lora))
    assert torch.is_grad_enabled(), "it learns"
    return Layers(
        plan=plan,
        shards=Whole(model, scorer),
        routers=None,
        why_padded=why_padded,
        why_eager="not asked for",
        why_unshared=why_unshared,
    )

"""A megatron-core GPT or mixture of experts of one rank, from a Hugging Face folder.

Layers are the library's local ones, without Transformer Engine. Attention is torch's own kernel, as
in every other model here, and experts are computed one by one. The call that makes the model needs
the process group of all ranks; each reads from the folder's files what it holds.
Axes: `S` token of a row, `B` row, `h` head, `D` of a head, as the library has them: (S, B, h, D).
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from rlstreams.workers.model.base import CPU, EngineError
from rlstreams.workers.model.megatron.files import FolderFiles
from rlstreams.workers.model.megatron.layout import Layout
from rlstreams.workers.model.megatron.shims import use_megatron
from rlstreams.workers.model.megatron.tables import (
    EXPERTS,
    TensorPart,
    check_layout,
    family_of,
    head_width,
    mixed_layers,
    parts_of,
)
from rlstreams.workers.model.model import model_class
from rlstreams.workers.model.routes import RouterShape


def read_model_config(folder: Path) -> Any:  # noqa: ANN401  (of an untyped library)
    """The folder's configuration as transformers reads it.

    Raises:
        EngineError: a model that transformers does not have, or that has no table here.
    """
    config = model_class(folder).config_class.from_pretrained(folder, local_files_only=True)
    family_of(config)
    return config


def shape_of(folder: Path) -> nn.Module:
    """The model as Hugging Face has it, without memory: parameters on the device `meta`."""
    with torch.device("meta"):
        found: nn.Module = model_class(folder)(read_model_config(folder))
    return found


def routers_of(folder: Path) -> RouterShape:
    """Shape of the model's routers.

    Raises:
        EngineError: it has none, or no table.
    """
    config = read_model_config(folder)
    if not any(mixed := mixed_layers(config)):
        raise EngineError(
            f"trainer.routing_replay is true, but a {config.model_type} has no router: set it to "
            "false"
        )
    return RouterShape(
        num_layers=sum(mixed), top_k=config.num_experts_per_tok, num_experts=config.num_experts
    )


def begin_ranks(layout: Layout, device: str) -> None:
    """Make the library's groups within the process group that all ranks have joined."""
    use_megatron()
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    if device == CPU and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # as the group of all ranks
    if layout.tp > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # the library asks for it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            expert_model_parallel_size=layout.ep,
            create_gloo_process_groups=False,
        )


def end_ranks() -> None:
    """Destroy the library's groups."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def join_alone(device: str) -> None:
    """Make a process group of this process alone: the library asks for one."""
    if not dist.is_initialized():
        backend = "gloo" if device == CPU else "nccl"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    begin_ranks(Layout(), device)


def leave_alone() -> None:
    """Destroy the process group, if it is that of this process alone."""
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()


class RankModel:
    """The part of a model that one rank holds.

    `parts` are those of this rank, `tensors` its parameters by the library's names (all experts of
    a layer are one), `model` the module.
    """

    def __init__(self, folder: Path, layout: Layout, rank: int, device: str, dtype: str) -> None:
        """
        Raises:
            ConfigError: the layout does not fit the model.
            EngineError: a family without a table, or a folder that lacks a tensor.
        """
        self.config = read_model_config(folder)
        check_layout(self.config, layout)
        self.layout, self.rank, self.folder = layout, rank, folder
        self.every = parts_of(self.config, layout)
        self.parts = {p.name: p for p in self.every if p.index(rank, layout) is not None}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library warns of its own defaults
            self.model = _module(self.config, layout, rank, device, getattr(torch, dtype))
        self.tensors, self.experts = _joined(self.model)
        self._check()
        self.model.rotary_pos_emb.inv_freq = _frequencies(folder, self.config).to(device)

    def read(self) -> None:
        """Read this rank's share of each tensor from the folder."""
        files = FolderFiles(self.folder)
        with torch.no_grad():
            for name, part in self.parts.items():
                share = files.read(name, self.index(part))
                if share is None:
                    raise EngineError(f"model folder {str(self.folder)!r} has no tensor {name}")
                fill(view_of(self.tensors, part), share)

    def index(self, part: TensorPart) -> tuple[slice, ...]:
        """This rank's share of one of its parts."""
        found = part.index(self.rank, self.layout)
        assert found is not None, "of this rank"
        return found

    def by_parameter(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename tensors, named as `tensors` is, to the names of the module's own parameters."""
        found = {name: tensor for name, tensor in tensors.items() if name not in self.experts}
        for name, own in self.experts.items():
            found |= dict(zip(own, tensors[name], strict=True))
        return found

    def _check(self) -> None:
        """Check that the table covers each number of the module once."""
        known: dict[str, int] = {}
        for part in self.parts.values():
            known[part.parameter] = (
                known.get(part.parameter, 0) + view_of(self.tensors, part).numel()
            )
        found = {name: tensor.numel() for name, tensor in self.tensors.items()}
        if known != found:
            odd = sorted({k for k in known | found if known.get(k) != found.get(k)})[0]
            raise EngineError(
                f"the table of {self.config.architectures[0]} has {known.get(odd, 0)} numbers of "
                f"{odd}, the model of megatron-core {found.get(odd, 0)}"
            )


def view_of(tensors: Mapping[str, Tensor], part: TensorPart) -> Tensor:
    """A part as a view into its parameter; in blocks it has more axes than the share."""
    tensor = tensors[part.parameter]
    if not part.rows:
        return tensor
    blocks = tensor.view(part.groups, -1, *tensor.shape[1:])
    return blocks.narrow(1, part.start, part.rows)


def fill(view: Tensor, share: Tensor) -> None:
    """Copy a share of a whole tensor into the view of its part."""
    view.copy_(share.reshape(view.shape))


def _joined(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Parameters by name, a layer's experts as one tensor; and the experts' own names."""
    plain: dict[str, Tensor] = {}
    experts: dict[str, list[str]] = {}
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if EXPERTS not in name:
            plain[name] = parameter.data
            continue
        before, _, rest = name.partition(EXPERTS)  # rest: local_experts.7.linear_fc1.weight
        layer = rest.split(".")[2]
        experts.setdefault(f"{before}{EXPERTS}{layer}", []).append(name)
    for joined, names in experts.items():
        plain[joined] = torch.stack([parameters[name].data for name in names])
        for name, rows in zip(names, plain[joined], strict=True):
            parameters[name].data = rows
    return plain, experts


def _module(config: Any, layout: Layout, rank: int, device: str, dtype: torch.dtype) -> Any:  # noqa: ANN401
    use_megatron()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    ours = _transformer_config(config, layout, device, dtype)
    stage = layout.stage(rank)
    spec = get_gpt_decoder_block_spec(
        ours, use_transformer_engine=False, normalization="RMSNorm", pp_rank=stage
    )
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = WholeRowAttention
    forget_replays()
    model = GPTModel(
        config=ours,
        transformer_layer_spec=spec,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        pre_process=stage == 0,
        post_process=stage == layout.pp - 1,
    )
    forget_replays()  # the routers keep theirs; the library's list would keep models alive
    return model.to(device=device, dtype=dtype).eval()


def forget_replays() -> None:
    """Empty the library's list of all routers' replays, which would keep models alive."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_router_replay_instances()


def _transformer_config(config: Any, layout: Layout, device: str, dtype: torch.dtype) -> Any:  # noqa: ANN401
    from megatron.core.transformer.transformer_config import TransformerConfig

    mixed = mixed_layers(config)
    options: dict[str, Any] = {}
    if any(mixed):
        options = {
            "num_moe_experts": config.num_experts,
            "moe_layer_freq": [int(is_mixed) for is_mixed in mixed],
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_topk": config.num_experts_per_tok,
            # As Hugging Face's softmax over all experts: weights of the chosen unscaled, or scaled
            # to sum 1, which is the softmax over the chosen.
            "moe_router_pre_softmax": not config.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
            "moe_enable_routing_replay": True,
        }
    return TransformerConfig(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device == CPU,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        **_layer_options(config),
        **options,
    )


def _layer_options(config: Any) -> dict[str, Any]:  # noqa: ANN401
    fusions = (
        "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion",
        "gradient_accumulation_fusion", "masked_softmax_fusion", "persist_layer_norm",
    )  # fmt: skip
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_width(config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "qk_layernorm": family_of(config).heads_have_norms,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "perform_initialization": False,  # weights come from files
        **dict.fromkeys(fusions, False),
    }


def _frequencies(folder: Path, config: Any) -> Tensor:  # noqa: ANN401
    """Frequencies of the rotary embedding, made by the family's own class."""
    module = importlib.import_module(model_class(folder).__module__)
    name = config.architectures[0].removesuffix("ForCausalLM")
    found: Tensor = getattr(module, f"{name}RotaryEmbedding")(config).inv_freq
    return found.detach().clone()


class WholeRowAttention(nn.Module):
    """Causal attention of whole rows by torch's kernel, in the place of the library's own."""

    def __init__(self, **_: Any) -> None:  # noqa: ANN401  (options of the library's own class)
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **_: Any,  # noqa: ANN401
    ) -> Tensor:
        """(S, B, h x D). A row's padding lies at its end, so no real token sees it."""
        assert attention_mask is None, "rows are padded at their end"
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        is_grouped = query.shape[1] != key.shape[1]
        found = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=is_grouped
        )
        return found.permute(2, 0, 1, 3).flatten(2)

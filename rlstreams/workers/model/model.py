"""A Hugging Face folder as a module: the one module that knows how models are loaded and fed.

Engine, scorer and trainer load, mask and name weights alike, so that their numbers agree.
Axes: `B` sequence, `T` token, `V` vocabulary.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstreams.workers.model import one_order
from rlstreams.workers.model.attention import Attention
from rlstreams.workers.model.base import CPU, EngineError
from rlstreams.workers.model.families import SDPA, chosen_attention, library_model
from rlstreams.workers.model.folder import module_name, num_experts_of, read_config
from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.layout import layout_difference, layout_of

FLOAT32 = "float32"
EXPERTS = "grouped_mm"  # kernel of the experts: part of a step's bit-equality


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Facts that the last bit of a result depends on; recorded with a run."""

    threads: int
    cpu_capability: str
    device: str = CPU
    attention: str = SDPA
    experts: str = EXPERTS
    in_one_order: bool = True  # gradients are summed in one order, also on a GPU
    ranks: int = 1  # several ranks sum in another order
    compiled: bool = False  # the layers, and the head's element-wise part
    backend: str = ""  # library, its version and the layout, if not Hugging Face's alone


def configure_torch(
    threads: int, device: str = CPU, *, fused: bool = False, in_one_order: bool = True
) -> Numerics:
    """Fix thread count and deterministic kernels for this process.

    Args:
        fused: on a GPU, allow the fused attention kernels; without them attention holds the square
            of the length.
        in_one_order: on a GPU, `one_order.backward` adds up gradients in one order.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    one_order.ask(in_one_order and device != CPU)  # the CPU always does
    if device != CPU:
        _configure_cuda(fused)
    # Would first write NaN into every new tensor: an eighth of a decode step, without a use here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return Numerics(
        threads=threads,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        device=CPU if device == CPU else torch.cuda.get_device_name(),
        in_one_order=in_one_order or device == CPU,
    )


def _configure_cuda(fused: bool) -> None:
    """Ask for determinism where a GPU does not have it by default."""
    # cuBLAS reads it when its first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # A cumulative sum has no deterministic kernel: ours are over integers, which sum alike in any
    # order, or draw a token. So an operation without such a kernel is warned of, not refused.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(fused)
    torch.backends.cuda.enable_mem_efficient_sdp(fused)
    torch.backends.cuda.enable_cudnn_sdp(False)


def import_library() -> None:
    """Import the common imports of all models' modules: most of the cost of the first model."""
    import transformers.modeling_layers
    import transformers.modeling_utils  # noqa: F401

    if torch.cuda.is_available():  # layers are compiled there; `preload` has this ask NVML
        importlib.import_module("torch._inductor.compile_fx")


def model_class(folder: Path) -> Any:  # noqa: ANN401  (a class of an untyped library)
    """The model's class, from its own module: the `Auto` classes import much that nothing uses.

    Raises:
        EngineError: a model that transformers does not have.
    """
    config = read_config(folder)
    place, name = module_name(config)
    try:
        module = importlib.import_module(place)
        return getattr(module, name)
    except (ImportError, AttributeError) as err:
        library = library_model(config)
        sought = "" if library is None or library.has_class else f" ({library.sought})"
        raise EngineError(f"model folder {str(folder)!r}: no class {name}: {err}{sought}") from err


def load_model(folder: Path | str, dtype: str = FLOAT32) -> torch.nn.Module:
    """The model of a folder, in eval mode, on the CPU.

    Raises:
        EngineError: the folder is no model that can be loaded; names folder and reason.
    """
    folder = Path(folder)
    cls = model_class(folder)
    config = read_config(folder)
    has_experts = num_experts_of(config) and cls._can_set_experts_implementation()
    extra = {"experts_implementation": EXPERTS} if has_experts else {}
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, info = cls.from_pretrained(
            folder,
            output_loading_info=True,
            dtype=getattr(torch, dtype),
            attn_implementation=chosen_attention(config, has_sdpa=bool(cls._supports_sdpa)),
            local_files_only=True,
            **extra,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as err:
        raise EngineError(f"model folder {str(folder)!r} cannot be loaded: {err}") from err
    if missing := sorted(info["missing_keys"]):  # transformers draws them at random
        raise EngineError(
            f"model folder {str(folder)!r} lacks {len(missing)} of the weights that its "
            f"config.json asks for, first {missing[0]}: they do not belong together"
        )
    module: torch.nn.Module = model.eval()
    return module.requires_grad_(False)


def numerics_of(model: torch.nn.Module, configured: Numerics) -> Numerics:
    """`configured`, with the kernels chosen for this model."""
    config: Any = model.config
    return replace(configured, attention=str(config.get_text_config()._attn_implementation))


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's weights under the names used between our processes, in name order.

    These are `state_dict()`'s names (experts fused, not those of the folder's file), each storage
    once: tied weights go by the first name. The tensors are the model's own, not copies.
    """
    seen: set[int] = set()
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            weights[name] = tensor.detach()
    return weights


def load_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy `weights` into the model in place; all fit, or none is touched.

    Raises:
        WeightError: names, shapes or dtypes differ; names the first differences.
    """
    own = weights_of(model)
    difference = layout_difference(expected=layout_of(own), found=layout_of(weights))
    if difference:
        raise WeightError(f"weights do not fit the model: {difference}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def right_padded(
    sequences: Sequence[Sequence[int] | np.ndarray[Any, Any]], pad_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, T) int64 with padding at the end, and which of them are real (B, T) bool."""
    lengths = np.array([len(sequence) for sequence in sequences])
    real = np.arange(lengths.max(initial=0)) < lengths[:, None]
    ids = np.full(real.shape, pad_id, np.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(ids), torch.from_numpy(real)


def causal_mask(real_BT: torch.Tensor) -> torch.Tensor:
    """(B, 1, T, T) bool, True where a token may attend: for models whose layers see everything."""
    mask = Attention().causal(real_BT)
    assert isinstance(mask, torch.Tensor)
    return mask

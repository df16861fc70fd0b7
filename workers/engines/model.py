"""A Hugging Face folder as a module: the one place that knows how models are loaded and fed.

Engine, scorer and trainer load, mask and name weights alike, so that their numbers agree.
Axes: `B` sequence, `T` token, `V` vocabulary.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workers.engines.base import EngineError
from workers.weights.channel import WeightError
from workers.weights.layout import layout_difference, layout_of

# Both are part of what makes a step bit-equal. Boolean masks are right with sdpa only: the eager
# implementation adds them to the scores.
ATTENTION = "sdpa"
EXPERTS = "grouped_mm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What the last bit of a result depends on; recorded with a run."""

    torch_version: str
    threads: int
    cpu_capability: str
    attention: str = ATTENTION
    experts: str = EXPERTS


def configure_torch(threads: int) -> Numerics:
    """Fix thread count and deterministic kernels for this process."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # It would write NaN into every new tensor first: an eighth of a decode step, to no effect here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return Numerics(
        torch_version=torch.__version__,
        threads=threads,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
    )


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
        if not config.get(key):
            raise EngineError(f"{path}: field {key!r} is missing")
    return config


def import_library() -> None:
    """Import what every model's module imports: most of the cost of the first model."""
    import transformers.modeling_layers
    import transformers.modeling_utils  # noqa: F401


def model_class(folder: Path) -> Any:  # noqa: ANN401  (a class of an untyped library)
    """The model's class, imported from its own module.

    The `Auto` classes import generation and mappings that nothing here uses.

    Raises:
        EngineError: a model that transformers does not have.
    """
    config = read_config(folder)
    kind, name = str(config["model_type"]).replace("-", "_"), str(config["architectures"][0])
    try:
        module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        return getattr(module, name)
    except (ImportError, AttributeError) as err:
        raise EngineError(f"model folder {str(folder)!r}: no class {name} ({kind}): {err}") from err


def load_model(folder: Path | str, dtype: str = "float32") -> torch.nn.Module:
    """The model of a folder, in eval mode, on the CPU.

    Raises:
        EngineError: the folder is no model that can be loaded; names folder and reason.
    """
    folder = Path(folder)
    cls = model_class(folder)
    is_moe = num_experts_of(read_config(folder)) > 0
    extra = {"experts_implementation": EXPERTS} if is_moe else {}
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = cls.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation=ATTENTION,
            local_files_only=True,
            **extra,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as err:
        raise EngineError(f"model folder {str(folder)!r} cannot be loaded: {err}") from err
    module: torch.nn.Module = model.eval()
    return module.requires_grad_(False)


def num_experts_of(config: Mapping[str, Any]) -> int:
    """Experts per layer; 0 for a dense model. Names differ between models and library versions."""
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            return int(config[key])
    return 0


def eos_ids_of(folder: Path) -> frozenset[int]:
    """Tokens that end an answer; `generation_config.json` goes before `config.json`."""
    path = folder / "generation_config.json"
    chosen = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = chosen.get("eos_token_id", read_config(folder).get("eos_token_id"))
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's weights under the names that travel between our processes, in name order.

    These are `state_dict()`'s names (experts fused, not those of the folder's file), each storage
    once: of tied weights the first name stays. The tensors are the model's own, not copies.
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
    """(B, 1, T, T) bool, True where a token may attend.

    Padding attends to itself: a row without any entry would be NaN and spread.
    """
    num_tokens = real_BT.shape[1]
    ones = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=real_BT.device)
    itself = torch.eye(num_tokens, dtype=torch.bool, device=real_BT.device)
    return (ones.tril()[None, None] & real_BT[:, None, None, :]) | itself

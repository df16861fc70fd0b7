"""Cost of a step: floating-point operations, memory that runs short, waiting before it.

MFU (model FLOPs utilisation, Chowdhery et al., https://arxiv.org/abs/2204.02311, appendix B) is
FLOPs / (seconds of the step * GPUs * peak). FLOPs are those of the mathematics, without padding and
recomputation: for each weight of a layer and token that goes through it 6 (2 forward, 4
backward; 4 where adapters are trained, for frozen weights need no gradient); for each weight of the
head and token of the loss as many; for each pair of tokens of which one attends to the other,
n (n + 1) / 2 in a sequence of n, 12 * width of all heads. Tokens that sequences of a bin share go
through layers once, and attend once. Experts count by the chosen share. Layers without attention
have no pairs in truth: for hybrids the count is a little too high.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlstreams.schemas.events import ScoredTrajectory
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.model.base import CPU

# Dense bfloat16, from the vendor's data sheets, by a part of the device's name.
PEAKS = {"H100": 989.4e12, "H200": 989.4e12, "GH200": 989.4e12, "A100": 312e12}
_CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """FLOPs of one step, by the numbers of a model."""

    token: float  # for each token of a sample
    learnt: float  # in addition, for each token of the loss
    pair: float  # in addition, for each pair of tokens that attend

    @classmethod
    def of(cls, model: nn.Module, *, has_adapters: bool) -> ModelFlops:
        """The FLOPs of a whole model, before it is cut."""
        text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        chosen, experts = (_first(text, names) for names in (_CHOSEN, _EXPERTS))
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        outside = tables | {id(p) for p in head.parameters()}
        weights = 0.0
        for name, parameter in model.named_parameters():
            if id(parameter) not in outside and parameter.dim() > 1:
                share = chosen / experts if experts and ".experts." in f"{name}." else 1.0
                weights += parameter.numel() * share
        each = 4 if has_adapters else 6
        heads = getattr(text, "num_attention_heads", 0)
        width = getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1)
        return cls(
            token=each * weights,
            learnt=each * head.weight.numel(),
            pair=12 * text.num_hidden_layers * heads * width,
        )

    def step(self, spans: Sequence[tuple[int, int]], num_learnt: float) -> float:
        """FLOPs of a batch; see `Batch.spans`."""
        tokens = sum(length - taken for length, taken in spans)
        pairs = sum((n * (n + 1) - taken * (taken + 1)) / 2 for n, taken in spans)
        return self.token * tokens + self.learnt * num_learnt + self.pair * pairs


def _first(text: object, names: Sequence[str]) -> float:
    found = (getattr(text, name, None) for name in names)
    return float(next((value for value in found if value), 0))


class StepCost:
    """Figures of each step of one trainer; memory is rank 0's."""

    def __init__(self, model: nn.Module, device: str, dtype: str, section: TrainerSection) -> None:
        """
        Args:
            model: the whole model.
            device: the GPU's name, or `cpu`.
        """
        known = (peak for name, peak in PEAKS.items() if name in device)
        self._peak = section.ranks * next(known, 0.0) if dtype == "bfloat16" else 0.0
        has_adapters = section.lora.rank > 0
        self._flops = ModelFlops.of(model, has_adapters=has_adapters) if self._peak else None
        self._has_gpu = device != CPU
        self._num_retries = 0

    def figures(
        self, spans: Sequence[tuple[int, int]], num_learnt: int, seconds: float
    ) -> dict[str, float]:
        """`mfu` where the peak is known; on a GPU `gpu_free_gb`, available to torch or others, and
        `gpu_alloc_retries`: how often memory had to be freed and requested again."""
        found = {}
        if self._flops is not None:
            found["mfu"] = self._flops.step(spans, num_learnt) / (seconds * self._peak)
        if self._has_gpu:
            stats = torch.cuda.memory_stats()
            idle = stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"]
            before, self._num_retries = self._num_retries, int(stats["num_alloc_retries"])
            found["gpu_free_gb"] = (torch.cuda.mem_get_info()[0] + idle) / 1e9
            found["gpu_alloc_retries"] = float(self._num_retries - before)
        return found


def waits(idle_ms: int, planned_ms: int, samples: Sequence[ScoredTrajectory]) -> dict[str, float]:
    """Time that the trainer stood still before a step, by cause: for samples until the last-scored
    sample was sampled, from then on for scores.

    Args:
        idle_ms: time at which it became idle.
        planned_ms: time at which the step could begin.
    """
    last = max(samples, key=lambda scored: scored.scored_at_ms)
    sampled_ms = min(max(last.trajectory.finished_at_ms, idle_ms), planned_ms)
    return {
        "wait_samples_s": (sampled_ms - idle_ms) / 1000,
        "wait_scores_s": (planned_ms - sampled_ms) / 1000,
    }

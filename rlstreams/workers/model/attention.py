"""Attention masks for every kind of layer that a family mixes.

The library's own masks know neither our padding nor our cache, so we make them: engine, scorer and
trainer alike. A mask that is handed over counts as it is, so the window of a sliding layer must be
in it. Boolean masks are right with sdpa only; the eager implementation adds the mask to the scores.
Axes: `B` sequence, `T` token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.families import FULL, KNOWN_LAYERS, LINEAR, SDPA, SLIDING

Mask = torch.Tensor | dict[str, torch.Tensor]
_Seen = Callable[[int | None], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Kinds of attention in a model, with their windows."""

    implementation: str = SDPA
    windows: Mapping[str, int | None] = field(default_factory=lambda: {FULL: None})
    """Kind of layer -> number of tokens that it sees, its own included; None: all before it."""
    needs_mask_on_gpu: bool = False
    """True in float32, where heads that share keys have a fused kernel only with a mask."""

    def causal(self, real_BT: torch.Tensor) -> Mask:
        """Every token attends to the real ones before it; (B, 1, T, T), or one such mask per kind.

        Real tokens of a row lie side by side, padding at one end. A token attends to itself: a row
        without any entry would be NaN and spread.
        """
        num_tokens = real_BT.shape[1]
        ones = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=real_BT.device)
        itself = torch.eye(num_tokens, dtype=torch.bool, device=real_BT.device)

        def seen(window: int | None) -> torch.Tensor:
            before = ones.tril()
            if window is not None:
                before = before.triu(1 - window)
            return (before[None, None] & real_BT[:, None, None, :]) | itself

        masks = self._by_kind(seen)
        return self._with_states(masks, real_BT) if self.has_states else masks

    def right_padded(self, real_BT: torch.Tensor) -> Mask | None:
        """As `causal`, for padding at the end; None where the library needs no mask.

        A real token sees only tokens before it, and those are real; the results of padding are not
        used. So plain causality will do, which the kernels know without a mask of T x T, unless a
        layer's window ends within the rows or carries a state.
        """
        num_tokens = real_BT.shape[1]
        if real_BT.is_cuda and self.needs_mask_on_gpu:
            return self.causal(real_BT)
        is_plain = all(w is None or w >= num_tokens for w in self.windows.values())
        if is_plain and self.implementation == SDPA and not self.has_states:
            return None
        return self.causal(real_BT)

    @property
    def has_states(self) -> bool:
        """Whether layers carry a state from token to token that no cache of keys can hold."""
        return LINEAR in self.windows

    def newest(self, real_BT: torch.Tensor) -> Mask:
        """Mask of the last column's tokens; (B, 1, 1, T), or one such mask per kind."""
        num_tokens = real_BT.shape[1]
        ago_T = num_tokens - 1 - torch.arange(num_tokens, device=real_BT.device)

        def seen(window: int | None) -> torch.Tensor:
            in_reach_BT = real_BT if window is None else real_BT & (ago_T < window)
            return in_reach_BT[:, None, None, :]

        return self._by_kind(seen)

    def _by_kind(self, seen: _Seen) -> Mask:
        masks = {kind: self._given(seen(window)) for kind, window in self.windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _with_states(self, masks: Mask, real_BT: torch.Tensor) -> Mask:
        """Add the mask of real tokens for layers with states; they ignore padding at the end."""
        if isinstance(masks, torch.Tensor):
            return real_BT
        return {**masks, LINEAR: real_BT}

    def _given(self, seen: torch.Tensor) -> torch.Tensor:
        if self.implementation == SDPA:
            return seen
        lowest = torch.finfo(torch.float32).min
        return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, lowest)


def attention_of(model: torch.nn.Module) -> Attention:
    """Attention of a loaded model, from its configuration.

    Raises:
        EngineError: it has layers of an unknown kind.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if foreign := sorted(kinds - KNOWN_LAYERS):
        raise EngineError(
            f"a {config.model_type} has layers of kind {', '.join(foreign)}; "
            f"known are {', '.join(sorted(KNOWN_LAYERS))}"
        )
    if SLIDING in kinds and window is None:
        raise EngineError(f"a {config.model_type} has sliding layers and no sliding_window")
    if not kinds:  # all layers are alike
        kinds = {FULL if window is None else SLIDING}
    windows = {kind: window if kind == SLIDING else None for kind in sorted(kinds)}
    heads = config.num_attention_heads
    is_grouped = (getattr(config, "num_key_value_heads", None) or heads) != heads
    is_float32 = next(model.parameters()).dtype == torch.float32
    return Attention(
        implementation=config._attn_implementation,
        windows=windows,
        needs_mask_on_gpu=is_grouped and is_float32,
    )

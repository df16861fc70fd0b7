"""AdamW over parameters of 32 or 16 bits: one optimizer a parameter, always on float32 numbers.

A 16-bit parameter is the upper half of its float32 number, rounded to nearest; the lower half is
kept here, and for the moment of its update both are one number again. So small updates add up that
16 bits alone would round away, for 2 bytes a weight instead of the 4 of a second copy. Gradients of
micro-batches are summed in float32. Parameter by parameter, nothing of the model's size is copied.
AdamW: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101, as torch computes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlstreams.workers.config.trainer import OptimizerSection

LOW = "low"  # lower halves, among the optimizer's tensors
_HALF = 1 << 15


def lr_at(step: int, section: OptimizerSection) -> float:
    """Learning rate of step `step` (the first is 1): linear warm-up, then as `schedule` says."""
    if section.schedule == "constant" or step <= section.warmup_steps:
        return section.lr * min(1.0, step / max(section.warmup_steps, 1))
    share = min(1.0, (step - section.warmup_steps) / (section.decay_steps - section.warmup_steps))
    left = 1 - share if section.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return section.lr_end + (section.lr - section.lr_end) * left


def joined(high: Tensor, low: Tensor) -> Tensor:
    """The float32 numbers of which `high` is the bfloat16 rounding and `low` the int16 rest."""
    bits = high.view(torch.int16).to(torch.int32) << 16
    return (bits + low).view(torch.float32)


def halves(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest bfloat16 (ties away from zero) and the int16 rest; `joined` gives `whole` again."""
    bits = whole.view(torch.int32)
    high = (bits + _HALF) >> 16
    low = (bits - (high << 16)).to(torch.int16)
    return high.to(torch.int16).view(torch.bfloat16), low


class _Slot:
    """One parameter of 32 bits, its gradient and moments."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self._adam = self._adam_of(parameter)

    @staticmethod
    def _adam_of(parameter: nn.Parameter) -> torch.optim.AdamW:
        # A GPU's default would update all at once, by copies as large as they are. The fused one
        # takes no rows that lie apart.
        is_fused = parameter.is_cuda and parameter.is_contiguous()
        return torch.optim.AdamW([parameter], fused=True if is_fused else None)

    @property
    def gradient(self) -> Tensor | None:
        """Of all micro-batches since `clear`, float32."""
        return self.parameter.grad

    def take(self, gradient: Tensor) -> None:
        """Add what no backward put there; it may be kept."""
        kept = self.parameter.grad
        self.parameter.grad = gradient if kept is None else kept.add_(gradient)

    def clear(self) -> None:
        """Forget the gradient."""
        self.parameter.grad = None

    def configure(self, **options: Any) -> None:  # noqa: ANN401  (the library's own)
        """Options of AdamW, for the next update."""
        self._adam.param_groups[0].update(options)

    def update(self) -> None:
        """One step of AdamW; a parameter without gradient stays."""
        self._adam.step()

    def tensors(self) -> dict[str, Tensor]:
        """What the next update depends on, beside parameter and options."""
        states = self._adam.state_dict()["state"]
        return {key: tensor.detach() for key, tensor in states.get(0, {}).items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """What `tensors` gave."""
        state = {0: {key: tensor.clone() for key, tensor in tensors.items()}} if tensors else {}
        groups = self._adam.state_dict()["param_groups"]
        self._adam.load_state_dict({"state": state, "param_groups": groups})


class _SplitSlot(_Slot):
    """One parameter in bfloat16."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._whole = nn.Parameter(parameter.new_empty(0, dtype=torch.float32))
        super().__init__(self._whole)
        self._high = parameter
        self._low = torch.zeros_like(parameter, dtype=torch.int16)
        self._gradient: Tensor | None = None
        parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def _take(self, parameter: Tensor) -> None:
        assert parameter.grad is not None, "called behind a gradient"
        self.take(parameter.grad)
        parameter.grad = None

    def take(self, gradient: Tensor) -> None:
        if self._gradient is None:
            self._gradient = gradient.float()
        else:
            self._gradient += gradient

    @property
    def gradient(self) -> Tensor | None:
        return self._gradient

    def clear(self) -> None:
        self._gradient = self._high.grad = None  # the latter of a backward that broke off

    @torch.no_grad()
    def update(self) -> None:
        if self._gradient is None:
            return
        self._whole.data = joined(self._high, self._low)
        self._whole.grad = self._gradient
        super().update()
        high, self._low = halves(self._whole.data)
        self._high.copy_(high)
        self._whole.grad = None
        self._whole.data = self._whole.new_empty(0)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {LOW: self._low}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        super().load({key: tensor for key, tensor in tensors.items() if key != LOW})
        low = tensors.get(LOW)
        self._low = torch.zeros_like(self._low) if low is None else low.to(self._low.device).clone()


class Adam:
    """AdamW over named parameters."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._slots = {
            name: (_SplitSlot if parameter.dtype == torch.bfloat16 else _Slot)(parameter)
            for name, parameter in parameters.items()
        }

    @property
    def names(self) -> list[str]:
        """Of the parameters."""
        return list(self._slots)

    def configure(self, section: OptimizerSection) -> None:
        """From the next update on; moments stay."""
        for slot in self._slots.values():
            slot.configure(
                betas=(section.beta1, section.beta2),
                eps=section.eps,
                weight_decay=section.weight_decay,
            )

    def clear(self) -> None:
        """Forget gradients."""
        for slot in self._slots.values():
            slot.clear()

    def take(self, name: str, gradient: Tensor) -> None:
        """Add to a parameter's gradient what no backward put there; it may be kept."""
        self._slots[name].take(gradient)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Those that there are, in the parameters' order."""
        slots = self._slots.items()
        return {name: s.gradient for name, s in slots if s.gradient is not None}

    @torch.no_grad()
    def clip(self, max_norm: float) -> float:
        """Scale gradients down to this norm, all together; returns the norm before."""
        gradients = list(self.gradients.values())
        norm = nn.utils.get_total_norm(gradients)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        return float(norm)

    def keep(self, prefix: str) -> None:
        """Forget gradients but those of parameters whose names begin so."""
        for name, slot in self._slots.items():
            if not name.startswith(prefix):
                slot.clear()

    def update(self, lr: float, prefix: str = "", own_lr: float = 0.0) -> None:
        """Change every parameter that has a gradient, and forget gradients.

        Args:
            prefix: of names of parameters that learn at `own_lr`; "": none do.
        """
        for name, slot in self._slots.items():
            slot.configure(lr=own_lr if prefix and name.startswith(prefix) else lr)
            slot.update()
            slot.clear()

    def tensors(self) -> dict[str, Tensor]:
        """The state, flat: `{parameter}:{exp_avg | exp_avg_sq | step | low}`.

        Before the first update there is at most `low`: of parameters of 16 bits.
        """
        return {
            f"{name}:{key}": tensor
            for name, slot in self._slots.items()
            for key, tensor in slot.tensors().items()
        }

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take the state; what is not named begins anew.

        Args:
            tensors: parameter -> key -> tensor, all of known parameters.
        """
        for name, slot in self._slots.items():
            slot.load(tensors.get(name, {}))

"""AdamW, or a function of the user's, over parameters of 32 or 16 bits: parameter by parameter,
always on float32 numbers.

A 16-bit parameter is the upper half of its float32 number, rounded to nearest; the lower half is
kept here, and during its update both are one number again. So small updates add up that 16 bits
alone would round away, for 2 bytes a weight instead of the 4 of a second copy. Gradients of
micro-batches are summed in float32. So nothing of the model's size is copied.
AdamW: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101, as torch computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from rlstreams.workers.config.trainer import OptimizerSection
from rlstreams.workers.model.base import CPU

MOMENTS, STEP = ("exp_avg", "exp_avg_sq"), "step"  # keys of the optimizer's tensors
LOW = "low"  # key of the lower halves
PARAMETER = "parameter"  # key of a parameter in copies
Copies = dict[str, dict[str, Tensor]]  # parameter -> key of its state, or `PARAMETER` -> copy
Updated = tuple[Tensor, Mapping[str, Tensor]]  # new numbers, and the state for the next update


def lr_at(step: int, section: OptimizerSection) -> float:
    """Learning rate of step `step` (the first is 1): linear warm-up, then by `schedule`."""
    if section.schedule == "constant" or step <= section.warmup_steps:
        return section.lr * min(1.0, step / max(section.warmup_steps, 1))
    share = min(1.0, (step - section.warmup_steps) / (section.decay_steps - section.warmup_steps))
    left = 1 - share if section.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return section.lr_end + (section.lr - section.lr_end) * left


def joined(high: Tensor, low: Tensor) -> Tensor:
    """The float32 numbers of which `high` is the bfloat16 rounding and `low` the int16 rest."""
    bits = low.to(torch.int32)
    return bits.add_(high.view(torch.int16), alpha=1 << 16).view(torch.float32)


def halves(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest bfloat16 (ties away from zero) and the int16 rest; `joined` gives `whole` again."""
    pairs = whole.unsqueeze(-1).view(torch.int16)  # the lower half lies first
    low = pairs[..., 0].clone()
    # A rest below 0 is that of a number rounded up.
    return (pairs[..., 1] - (low >> 15)).view(torch.bfloat16), low


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter at an update, as an optimizer sees it. All tensors are float32 and may be
    changed in place."""

    name: str
    values: Tensor
    gradient: Tensor  # of the loss, clipped
    state: Mapping[str, Tensor]  # as its last update returned it; empty before the first
    lr: float
    section: OptimizerSection
    is_fused: bool = False

    def adamw(self) -> Updated:
        """AdamW under `trainer.optimizer`; begins anew where the state has no moments."""
        values, by, state = self.values, self.section, dict(self.state)
        if not state.keys() >= {STEP, *MOMENTS}:
            state = {STEP: torch.zeros((), device=values.device if self.is_fused else CPU)}
            state |= {key: torch.zeros_like(values) for key in MOMENTS}
        mean, square = ([state[key]] for key in MOMENTS)
        adamw(
            [values], [self.gradient], mean, square, [], [state[STEP]],
            fused=self.is_fused or None, amsgrad=False, maximize=False, lr=self.lr, beta1=by.beta1,
            beta2=by.beta2, eps=by.eps, weight_decay=by.weight_decay,
        )  # fmt: skip
        return values, {key: state[key] for key in (STEP, *MOMENTS)}


Update = Callable[[Parameter], Updated]


class _Slot:
    """One parameter, its gradient over micro-batches and the optimizer's state.

    A parameter of 16 bits has its lower half among the state.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.gradient: Tensor | None = None  # of all micro-batches since it was cleared, float32
        self.state: dict[str, Tensor] = {}
        self._is_split = parameter.dtype == torch.bfloat16
        # A GPU's default would make copies of their size; the fused kernel takes no rows that are
        # not contiguous.
        self._is_fused = parameter.is_cuda and (self._is_split or parameter.is_contiguous())
        self._step_device = parameter.device if self._is_fused else CPU
        self.load({})
        parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def _take(self, parameter: Tensor) -> None:
        assert parameter.grad is not None, "called behind a gradient"
        self.take(parameter.grad)
        parameter.grad = None

    def take(self, gradient: Tensor) -> None:
        """Add to the gradient; the given tensor may be kept."""
        if self.gradient is None:
            self.gradient = gradient.float()
        else:
            self.gradient += gradient

    def clear(self) -> None:
        """Forget the gradient."""
        self.gradient = self.parameter.grad = None  # `grad` is left of a backward that broke off

    @torch.no_grad()
    def update(self, lr: float, section: OptimizerSection, by: Update) -> None:
        """One step of an optimizer; a parameter without gradient stays."""
        if self.gradient is None:
            return
        low = self.state.pop(LOW, None)
        whole = self.parameter.detach() if low is None else joined(self.parameter, low)
        given = Parameter(
            name=self.name, values=whole, gradient=self.gradient, state=self.state, lr=lr,
            section=section, is_fused=self._is_fused,
        )  # fmt: skip
        values, state = by(given)
        self.state = dict(state)
        if low is not None:
            high, self.state[LOW] = halves(values)
            self.parameter.copy_(high)
        elif values is not whole:
            self.parameter.copy_(values)

    def load(self, tensors: Mapping[str, Tensor], *, copies: bool = True) -> None:
        """Load a state; without `LOW` the lower halves are zero."""
        device = self.parameter.device
        ours = dict.fromkeys((*MOMENTS, LOW), device) | {STEP: self._step_device}
        self.state = {
            key: tensor.to(device if tensor.dim() else ours.get(key, CPU), copy=copies)
            for key, tensor in tensors.items()
        }
        if self._is_split and LOW not in tensors:
            self.state[LOW] = torch.zeros_like(self.parameter, dtype=torch.int16)


class Adam:
    """AdamW, or a function of the user's, over named parameters."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._slots = {name: _Slot(name, parameter) for name, parameter in parameters.items()}
        self._section = OptimizerSection()

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return list(self._slots)

    def configure(self, section: OptimizerSection) -> None:
        """Use these settings from the next update on; the state stays."""
        self._section = section

    def clear(self) -> None:
        """Clear all gradients."""
        for slot in self._slots.values():
            slot.clear()

    def take(self, name: str, gradient: Tensor) -> None:
        """Add a gradient that no backward put into the parameter; the tensor may be kept."""
        self._slots[name].take(gradient)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Gradients so far, in the parameters' order."""
        slots = self._slots.items()
        return {name: s.gradient for name, s in slots if s.gradient is not None}

    @torch.no_grad()
    def clip(self, max_norm: float, norm: Tensor) -> float:
        """Scale all gradients down to the norm `max_norm` together; returns `norm`, that before.

        Non-finite gradients stay as they are: no step is made of them.
        """
        if math.isfinite(float(norm)) and (gradients := list(self.gradients.values())):
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(gradients, float(scale))
        return float(norm)

    def keep(self, prefix: str) -> None:
        """Clear gradients, except those of parameters whose names begin with `prefix`."""
        for name, slot in self._slots.items():
            if not name.startswith(prefix):
                slot.clear()

    def update(
        self, lr: float, prefix: str = "", own_lr: float = 0.0, by: Update = Parameter.adamw
    ) -> None:
        """Update every parameter that has a gradient, and clear gradients.

        Args:
            prefix: of the names of parameters that learn at `own_lr`, by AdamW; "": none do.
            by: the optimizer of the others.

        If `by` raises, some parameters are updated and others are not.
        """
        for name, slot in self._slots.items():
            if prefix and name.startswith(prefix):
                slot.update(own_lr, self._section, Parameter.adamw)
            else:
                slot.update(lr, self._section, by)
            slot.clear()

    def tensors(self) -> dict[str, Tensor]:
        """The state, flat: `{parameter}:{exp_avg | exp_avg_sq | step | low}`, or with names of a
        function of the user's.

        Before the first update there is at most `low`: of parameters of 16 bits.
        """
        return {
            f"{name}:{key}": tensor
            for name, slot in self._slots.items()
            for key, tensor in slot.state.items()
        }

    @property
    def num_bytes(self) -> int:
        """Size of parameters and state, bytes."""
        found = (
            tensor.numel() * tensor.element_size()
            for slot in self._slots.values()
            for tensor in (slot.parameter, *slot.state.values())
        )
        return sum(found)

    @torch.no_grad()
    def copied(self, place: torch.device, into: Copies) -> Copies:
        """Copies of parameters and state on a device, for `restore`.

        Args:
            into: copies of an earlier call, overwritten where they fit.
        """
        found: Copies = {}
        for name, slot in self._slots.items():
            old = into.get(name, {})
            own = {PARAMETER: slot.parameter.detach(), **slot.state}
            found[name] = {k: _copied(tensor, place, old.get(k)) for k, tensor in own.items()}
        return found

    @torch.no_grad()
    def restore(self, copies: Copies) -> None:
        """Go back to these copies; gradients are cleared."""
        for name, slot in self._slots.items():
            own = dict(copies[name])
            slot.parameter.copy_(own.pop(PARAMETER))
            slot.load(own)
            slot.clear()

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], *, copies: bool = True) -> None:
        """Load the state; parameters without one begin anew.

        Args:
            tensors: parameter -> key -> tensor, all of known parameters.
            copies: False: tensors on the device are handed over, and become the state.
        """
        for name, slot in self._slots.items():
            slot.load(tensors.get(name, {}), copies=copies)


def _copied(tensor: Tensor, place: torch.device, into: Tensor | None) -> Tensor:
    """A copy on a device, in `into` if that fits: pinning is slower than filling."""
    if into is None or (into.shape, into.dtype, into.device) != (tensor.shape, tensor.dtype, place):
        pins = tensor.is_cuda and place.type == CPU
        into = torch.empty(tensor.shape, dtype=tensor.dtype, device=place, pin_memory=pins)
    return into.copy_(tensor)

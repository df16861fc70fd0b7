"""The sections of a configuration about learning."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from streams.errors import ConfigError
from workers.config.checks import device, not_negative, positive
from workers.config.loss import LossSection


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """AdamW."""

    lr: float = 1e-5
    """Learning rate after warm-up."""
    warmup_steps: int = 5
    """Linear warm-up, steps."""
    beta1: float = 0.9
    """First moment."""
    beta2: float = 0.95
    """Second moment."""
    eps: float = 1e-8
    """Denominator floor."""
    weight_decay: float = 0.0
    """Decoupled decay."""
    max_grad_norm: float = 1.0
    """Gradient norm is clipped here."""

    def __post_init__(self) -> None:
        positive("trainer.optimizer", lr=self.lr, eps=self.eps, max_grad_norm=self.max_grad_norm)
        not_negative(
            "trainer.optimizer", warmup_steps=self.warmup_steps, weight_decay=self.weight_decay
        )
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise ConfigError(f"trainer.optimizer.{name} must be in [0, 1), got {beta}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSection:
    """Low-rank adapters, merged into the weights that are published."""

    rank: int = 0
    """Of each adapter; 0: all weights learn."""
    alpha: float = 16.0
    """An adapter is scaled by this over the rank."""
    targets: str = ""
    """Regular expression found in the names of the linear layers that get one; empty: all but the
    output."""

    def __post_init__(self) -> None:
        not_negative("trainer.lora", rank=self.rank)
        positive("trainer.lora", alpha=self.alpha)
        try:
            re.compile(self.targets)
        except re.error as err:
            raise ConfigError(f"trainer.lora.targets: {self.targets!r}: {err}") from err


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSection:
    """Learning."""

    device: str = "cpu"
    """Where it learns: `cpu`, `cuda` or `cuda:N`. A step is redone to the bit on the same one."""
    steps: int = 100
    """Optimizer steps after which the run ends."""
    groups_per_step: int = 16
    """Groups in a batch."""
    max_staleness: int = 1
    """Bound on (version being trained - version that sampled), in versions."""
    on_stale: Literal["mask", "drop"] = "mask"
    """A segment above the bound is masked from the loss, or its group is dropped."""
    min_group_samples: int = 0
    """A group with fewer living samples is dropped; 0: all must live. Below the group's size,
    a sample that was set aside costs its siblings nothing: they are compared without it."""
    group_deadline_s: float = 1200.0
    """A group still incomplete this long after its first sample came is dropped. At least twice
    `rollout.sample_deadline_s`."""
    micro_batch_tokens: int = 16384
    """Tokens (padding included) of one forward and backward."""
    equal_rewards: Literal["keep", "drop"] = "keep"
    """A group whose samples all earned the same teaches nothing: it takes its place in the batch,
    or is dropped as `no_signal`, and another row's group comes in its stead (DAPO)."""
    buffer_mb: int = 1024
    """Payloads beyond this are read again from the log when their step is planned."""
    checkpoint_every: int = 20
    """Steps between checkpoints; one more is made at every drain."""
    checkpoints_kept: int = 2
    """Older ones are removed."""
    redo: Literal["exact", "tolerate"] = "exact"
    """A redone step with another hash stops the run, or gets a new version number."""
    control: Literal["none", "permuted"] = "none"
    """`permuted` deals each batch's rewards out at random: a control run, which must not learn."""
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    loss: LossSection = field(default_factory=LossSection)
    lora: LoraSection = field(default_factory=LoraSection)

    def __post_init__(self) -> None:
        positive(
            "trainer",
            steps=self.steps,
            groups_per_step=self.groups_per_step,
            group_deadline_s=self.group_deadline_s,
            micro_batch_tokens=self.micro_batch_tokens,
            buffer_mb=self.buffer_mb,
            checkpoint_every=self.checkpoint_every,
            checkpoints_kept=self.checkpoints_kept,
        )
        device("trainer.device", self.device)
        not_negative(
            "trainer",
            max_staleness=self.max_staleness,
            min_group_samples=self.min_group_samples,
        )

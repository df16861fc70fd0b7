"""The sections of a configuration about learning."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.checks import device, not_negative, positive
from rlstreams.workers.config.loss import LossSection

MEGATRON = "megatron"  # a backend


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """AdamW."""

    lr: float = 1e-5
    """Learning rate after warm-up."""
    warmup_steps: int = 5
    """Linear warm-up, steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or falling to `lr_end` by step `decay_steps`."""
    decay_steps: int = 0
    """Step from which a falling learning rate is `lr_end`; `trainer.steps` is usual."""
    lr_end: float = 0.0
    """Where a falling learning rate ends."""
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """The gradient norm is clipped to this."""

    def __post_init__(self) -> None:
        positive("trainer.optimizer", lr=self.lr, eps=self.eps, max_grad_norm=self.max_grad_norm)
        not_negative(
            "trainer.optimizer",
            warmup_steps=self.warmup_steps,
            decay_steps=self.decay_steps,
            lr_end=self.lr_end,
            weight_decay=self.weight_decay,
        )
        if (self.schedule == "constant") != (self.decay_steps == 0):
            raise ConfigError(
                f"trainer.optimizer.schedule is {self.schedule!r} with "
                f"trainer.optimizer.decay_steps {self.decay_steps}: the one needs the other"
            )
        if self.decay_steps and self.decay_steps <= self.warmup_steps:
            raise ConfigError(
                f"trainer.optimizer.decay_steps is {self.decay_steps}, but "
                f"trainer.optimizer.warmup_steps is {self.warmup_steps}: nothing is left to fall in"
            )
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise ConfigError(f"trainer.optimizer.{name} must be in [0, 1), got {beta}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSection:
    """Low-rank adapters, merged into the published weights."""

    rank: int = 0
    """Rank of each adapter; 0: no adapters, all weights are trained."""
    alpha: float = 16.0
    """An adapter is scaled by alpha / rank."""
    targets: str = ""
    """Regular expression searched in the names of linear layers; empty: all but the output."""

    def __post_init__(self) -> None:
        not_negative("trainer.lora", rank=self.rank)
        positive("trainer.lora", alpha=self.alpha)
        try:
            re.compile(self.targets)
        except re.error as err:
            raise ConfigError(f"trainer.lora.targets: {self.targets!r}: {err}") from err


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSection:
    """How `trainer.backend = "megatron"` cuts the model; what `tp` x `pp` leaves of `trainer.ranks`
    computes different rows."""

    tp: int = 1
    """Ranks that share each matrix; of dense models."""
    pp: int = 1
    """Stages, each of some layers; one micro-batch is under way at a time."""
    ep: int = 1
    """Ranks over which the experts of a layer are spread; they compute different rows."""

    def __post_init__(self) -> None:
        positive("trainer.layout", tp=self.tp, pp=self.pp, ep=self.ep)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSection:
    """Learning."""

    device: str = "cpu"
    """Device: `cpu`, `cuda` or `cuda:N`. A redone step is bit-identical only on the same device."""
    backend: Literal["fsdp2", "megatron"] = "fsdp2"
    """What computes: layers of Hugging Face, sharded by FSDP2 where there are several ranks, or of
    megatron-core (`rlstreams[megatron]`; Llama, Qwen3, Qwen3-MoE), cut by `trainer.layout`."""
    ranks: int = 1
    """Processes that train together on this machine, each with a share; rank R has GPU N + R.
    A redo needs the same number."""
    steps: int = 100
    """Optimizer steps after which the run ends."""
    groups_per_step: int = 16
    """Groups per batch."""
    minibatches: int = 1
    """Parts of a batch, by groups, each with an optimizer step; must divide `groups_per_step`."""
    batch_epochs: int = 1
    """Times that each batch is learnt from."""
    max_staleness: int = 1
    """Bound on (version being trained - version that sampled)."""
    on_stale: Literal["mask", "drop"] = "mask"
    """A segment beyond the bound is masked from the loss, or its whole group is dropped."""
    min_group_samples: int = 0
    """A group with fewer samples left (not dead-lettered) is dropped; 0: all are required."""
    group_deadline_s: float = 1200.0
    """A group still incomplete this long after its first sample is dropped; at least twice
    `rollout.sample_deadline_s`."""
    micro_batch_tokens: int = 16384
    """Tokens (padding included) per forward and backward pass: on a GPU of a bin, in which samples
    lie one behind another."""
    activation_checkpointing: bool = False
    """Keep each layer's input alone and compute the rest again: the same bits, a third more
    time."""
    routing_replay: bool = False
    """Scorer and trainer send each token to the experts that it took when it was sampled (R3)."""
    equal_rewards: Literal["keep", "drop"] = "keep"
    """A group whose rewards are all equal stays in the batch, or is dropped as `no_signal` and
    replaced (DAPO)."""
    buffer_mb: int = 1024
    """Payloads beyond this are read from the log again when their step is planned."""
    checkpoint_every: int = 20
    """Steps between checkpoints; a drain writes one more."""
    checkpoints_kept: int = 2
    """Number of newest checkpoints to keep."""
    redo: Literal["auto", "exact", "tolerate"] = "auto"
    """If a redone step has another hash: stop, or continue under a new version. `auto`: stop on
    the CPU only. `tolerate`: also add up gradients in any order."""
    on_expired: Literal["stop", "drop"] = "stop"
    """If retention has removed waiting samples: refuse to start, or close all open groups as
    `expired` and go on."""
    control: Literal["none", "permuted"] = "none"
    """`permuted` randomly permutes each batch's rewards: a control run, which must not learn."""
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    loss: LossSection = field(default_factory=LossSection)
    lora: LoraSection = field(default_factory=LoraSection)
    layout: LayoutSection = field(default_factory=LayoutSection)

    @property
    def is_redo_exact(self) -> bool:
        """`redo`, with `auto` resolved by the device."""
        return self.redo == "exact" or (self.redo == "auto" and self.device == "cpu")

    def __post_init__(self) -> None:
        positive(
            "trainer",
            ranks=self.ranks,
            steps=self.steps,
            groups_per_step=self.groups_per_step,
            minibatches=self.minibatches,
            batch_epochs=self.batch_epochs,
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
        if self.backend != MEGATRON and self.layout != LayoutSection():
            raise ConfigError(
                f"trainer.layout is {self.layout}, which trainer.backend {self.backend!r} does not "
                f"have: set trainer.backend to {MEGATRON!r}, or leave the layout out"
            )
        if self.backend == MEGATRON and self.lora.rank:
            raise ConfigError(
                f"trainer.lora.rank is {self.lora.rank}, but trainer.backend {MEGATRON!r} trains "
                "all weights: set trainer.backend to 'fsdp2', or trainer.lora.rank to 0"
            )
        if self.loss.advantage == "gae" and (self.ranks > 1 or self.backend == MEGATRON):
            raise ConfigError(
                f"trainer.loss.advantage is 'gae' with trainer.ranks {self.ranks} and "
                f"trainer.backend {self.backend!r}: a value head is trained on one rank, over "
                "'fsdp2'; set these, or another advantage"
            )
        if self.loss.distill_top_k and (self.ranks > 1 or self.backend == MEGATRON):
            raise ConfigError(
                f"trainer.loss.distill_top_k is {self.loss.distill_top_k} with trainer.ranks "
                f"{self.ranks} and trainer.backend {self.backend!r}: it is computed on one rank, "
                "over 'fsdp2'; set these, or it to 0"
            )
        if self.groups_per_step % self.minibatches:
            raise ConfigError(
                f"trainer.minibatches is {self.minibatches}, which does not divide "
                f"trainer.groups_per_step {self.groups_per_step}"
            )

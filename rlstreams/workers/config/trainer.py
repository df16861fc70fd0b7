"""The sections of a configuration about learning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlstreams.workers.config.checks import (
    DeviceName,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    ShareBelow1,
)
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.user_code import OPTIMIZER, Option, Own, ours_or_own

MEGATRON = "megatron"  # a backend
ADAMW = "adamw"  # an optimizer
_ADDRESS = re.compile(r"[\w.-]+:\d{1,5}")  # IPv4 or a name: NCCL's interface is found by it


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection(Section, section="trainer.optimizer"):
    """AdamW, or a function of yours."""

    kind: Annotated[str, ours_or_own([ADAMW])] = ADAMW
    """`adamw`; or your `file.py:function` or `module:function`, called in the trainer with
    (parameter)."""
    options: dict[str, Option] = field(default_factory=dict)
    """Keyword arguments for your optimizer. They are in the log as they are written here: no
    secrets."""
    lr: PositiveFloat = 1e-5
    """Learning rate after warm-up."""
    warmup_steps: NonNegativeInt = 5
    """Linear warm-up, steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or falling to `lr_end` by step `decay_steps`."""
    decay_steps: NonNegativeInt = 0
    """Step from which a falling learning rate is `lr_end`; `trainer.steps` is usual."""
    lr_end: NonNegativeFloat = 0.0
    """Last value of a falling learning rate."""
    beta1: ShareBelow1 = 0.9
    """Decay rate of the first moment."""
    beta2: ShareBelow1 = 0.95
    """Decay rate of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of every parameter, norms and biases too."""
    max_grad_norm: PositiveFloat = 1.0
    """The gradient norm is clipped to this."""

    @property
    def is_own(self) -> bool:
        """Whether the optimizer is a function of the user's."""
        return self.kind != ADAMW

    def own(self) -> Iterator[Own]:
        """The user's function, if `kind` names one."""
        if self.is_own:
            yield OPTIMIZER, self.kind, self.options

    def _problems(self) -> Iterator[str]:
        if (self.schedule == "constant") != (self.decay_steps == 0):
            yield "[schedule] and [decay_steps]: the one needs the other"
        if self.decay_steps and self.decay_steps <= self.warmup_steps:
            yield "[decay_steps], but [warmup_steps]: nothing is left to fall in"
        if self.options and not self.is_own:
            yield "[options], but [kind]: only a function of your own has options"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSection(Section, section="trainer.lora"):
    """Low-rank adapters, merged into the published weights."""

    rank: NonNegativeInt = 0
    """Rank of each adapter; 0: no adapters, all weights are trained."""
    alpha: PositiveFloat = 16.0
    """An adapter is scaled by alpha / rank."""
    targets: str = ""
    """Regular expression searched in the names of linear layers; empty: all but the output."""

    def _problems(self) -> Iterator[str]:
        try:
            re.compile(self.targets)
        except re.error as err:
            yield f"[targets]: {err}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSection(Section, section="trainer.layout"):
    """Split of a row and of the model over ranks: with backend `fsdp2` by `cp`, with `megatron` by
    the others. Ranks beyond `cp` x `tp` x `pp` compute different rows."""

    cp: PositiveInt = 1
    """Ranks that share each row, a slice of its tokens each, and in attention some heads."""
    tp: PositiveInt = 1
    """Ranks that share each matrix; of dense models."""
    pp: PositiveInt = 1
    """Stages, each of some layers; one micro-batch is under way at a time."""
    ep: PositiveInt = 1
    """Ranks over which the experts of a layer are spread; they compute different rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerLayoutSection(LayoutSection, section="logprob.layout"):
    """Split of a row and of the model over ranks of a scorer: as `trainer.layout`."""


def layout_problems(name: str, backend: str, ranks: int, layout: LayoutSection) -> Iterator[str]:
    """Why these ranks cannot share a model so.

    Args:
        name: of the section.
    """
    if backend != MEGATRON and layout.tp * layout.pp * layout.ep > 1:
        yield (
            f"[layout], of which {name}.backend {backend!r} has cp alone: set {name}.backend to "
            "'megatron', or leave the others out"
        )
    if backend == MEGATRON and layout.cp > 1:
        yield (
            f"[layout.cp], which [backend] does not have: set {name}.layout.cp to 1, or share "
            f"rows with another {name}.backend"
        )
    if ranks % layout.cp:
        fits = ", ".join(str(n) for n in range(1, ranks + 1) if not ranks % n)
        yield f"[layout.cp], but [ranks], which it does not divide: it may be {fits}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSection(Section, section="trainer"):
    """Learning."""

    device: DeviceName = "cpu"
    """Device: `cpu`, `cuda` or `cuda:N`. A redone step is bit-identical only on the same device."""
    backend: Literal["fsdp2", "megatron"] = "fsdp2"
    """Layers that compute: of Hugging Face, sharded by FSDP2, or of megatron-core
    (`rlstreams[megatron]`; Llama, Qwen3, Qwen3-MoE), cut by `trainer.layout`."""
    ranks: PositiveInt = 1
    """Processes that train together; rank R has GPU N + R of its host. A redo needs the same
    number."""
    hosts: tuple[str, ...] = ()
    """Other hosts that share `ranks` equally with the trainer's, each the `HOST:PORT` on which
    `rlstreams worker ranks` listens there; needs `weights.secret`."""
    steps: PositiveInt = 100
    """Optimizer steps after which the run ends."""
    groups_per_step: PositiveInt = 16
    """Groups per batch."""
    minibatches: PositiveInt = 1
    """Parts of a batch, by groups, each with an optimizer step; must divide `groups_per_step`."""
    batch_epochs: PositiveInt = 1
    """Times that each batch is learnt from."""
    max_staleness: NonNegativeInt = 1
    """Bound on (version being trained - version that sampled)."""
    on_stale: Literal["mask", "drop"] = "mask"
    """A segment beyond the bound is masked from the loss, or its whole group is dropped."""
    min_group_samples: NonNegativeInt = 0
    """A group with fewer samples left (not dead-lettered) is dropped; 0: all are required."""
    group_deadline_s: PositiveFloat = 1200.0
    """A group still incomplete this long after its first sample is dropped; at least twice
    `rollout.sample_deadline_s`."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens (padding included) per forward and backward pass."""
    shared_prefixes: bool = True
    """Tokens that several samples of a bin begin with, such as a group's prompt, are computed once;
    where bins are filled at all, and not with `layout.cp` or backend `megatron`."""
    activation_checkpointing: bool = False
    """Keep each layer's input alone and compute the rest again: a third more time."""
    routing_replay: bool = False
    """Scorer and trainer send each token to the experts that it took when it was sampled (R3)."""
    equal_rewards: Literal["keep", "drop"] = "keep"
    """A group whose rewards are all equal stays in the batch, or is dropped as `no_signal` and
    replaced (DAPO)."""
    buffer_mb: PositiveInt = 1024
    """Payloads beyond this are read from the log again when their step is planned."""
    checkpoint_every: PositiveInt = 20
    """Steps between checkpoints; a drain writes one more."""
    checkpoints_kept: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    redo: Literal["auto", "exact", "tolerate"] = "auto"
    """If a redone step has another hash: stop, or continue under a new version. `auto`: stop on
    the CPU only. `tolerate`: also add up gradients in any order."""
    on_expired: Literal["stop", "drop"] = "stop"
    """If retention has removed waiting samples: refuse to start, or close all open groups and go
    on."""
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

    @property
    def ranks_here(self) -> int:
        """Number of `ranks` on the trainer's own host, as on any other."""
        return self.ranks // (1 + len(self.hosts))

    @property
    def hands(self) -> int:
        """Micro-batches that are computed side by side: other ranks share one's rows or layers."""
        return self.ranks // (self.layout.cp * self.layout.tp * self.layout.pp)

    def own(self) -> Iterator[Own]:
        """The user's functions that the trainer runs."""
        yield from self.loss.own()
        yield from self.optimizer.own()

    def _problems(self) -> Iterator[str]:
        for address in self.hosts:
            if not _ADDRESS.fullmatch(address):
                yield f"trainer.hosts must be like host:port, got {address!r}"
        if len({*self.hosts}) < len(self.hosts):
            yield f"trainer.hosts names a host twice: {list(self.hosts)}"
        if self.ranks % (1 + len(self.hosts)):
            yield (
                f"[ranks], which {1 + len(self.hosts)} hosts (the trainer's, and trainer.hosts) do "
                "not share equally"
            )
        yield from layout_problems("trainer", self.backend, self.ranks, self.layout)
        if self.backend == MEGATRON and self.lora.rank:
            yield (
                "[lora.rank], but [backend], which trains all weights: set trainer.backend to "
                "'fsdp2', or trainer.lora.rank to 0"
            )
        if self.groups_per_step % self.minibatches:
            yield "[minibatches], which does not divide [groups_per_step]"

"""The configuration of a run: one frozen dataclass per component, a sentence under each field."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from streams.errors import ConfigError


def _positive(section: str, **values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ConfigError(f"{section}.{name} must be above 0, got {value}")


def _not_negative(section: str, **values: float) -> None:
    for name, value in values.items():
        if value < 0:
            raise ConfigError(f"{section}.{name} must be 0 or above, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """Identity of the run."""

    id: str = "run"
    """Prefix of every topic, group and transactional id: letters, digits, `-`, `_`."""
    seed: int = 0
    """Keys data order and sampling."""
    dir: str = "runs/{id}"
    """Folder for logs, checkpoints, weights, report and the embedded broker's data."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", self.id):
            raise ConfigError(
                f"run.id must be 1 to 100 letters, digits, `-` or `_`, got {self.id!r}"
            )
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"run.seed must be in [0, 2^63), got {self.seed}")
        if not self.dir or re.search(r"[{}]", self.dir.replace("{id}", "")):
            raise ConfigError(
                f"run.dir must be a path with no other braces than {{id}}, got {self.dir!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSection:
    """Where the log lives."""

    bootstrap: str = ""
    """`host:port[,host:port]`; empty: an embedded broker under the run's folder."""
    port: int = 0
    """Port of the embedded broker on loopback; 0: a free one."""
    jars_dir: str = ""
    """Folder of the pinned jars for machines without a registry; empty: fetch and cache."""
    heap_mb: int = 256
    """Heap of the embedded broker, MB."""
    replication: int = 1
    """Replicas of each topic."""
    partitions_per_worker: int = 2
    """Partitions of `prompts` and payload topics per worker that reads them."""
    options: dict[str, str] = field(default_factory=dict)
    """librdkafka properties, e.g. for TLS; `env:NAME` and `file:PATH` are resolved, not printed."""

    def __post_init__(self) -> None:
        _positive(
            "broker",
            heap_mb=self.heap_mb,
            replication=self.replication,
            partitions_per_worker=self.partitions_per_worker,
        )
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"broker.port must be in [0, 65535], got {self.port}")
        if self.replication > 1 and not self.bootstrap:
            raise ConfigError(
                f"broker.replication is {self.replication}, but broker.bootstrap is empty: "
                "the embedded broker is one node"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """Problems: JSON lines with `prompt` (text or chat messages), `answer`, free fields."""

    train: str = ""
    """File to learn from."""
    held_out: str = ""
    """File to evaluate on; empty: no evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The policy."""

    path: str = ""
    """Hugging Face folder: config, safetensors, tokenizer. It is version 0."""
    threads: int = 1
    """Threads of each process that computes; part of what makes redo bit-equal."""

    def __post_init__(self) -> None:
        _positive("model", threads=self.threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsSection:
    """Issuing samples."""

    group_size: int = 8
    """Samples per prompt."""
    evaluate_every: int = 0
    """Versions between evaluations; 0: only version 0 and the last."""
    evaluate_rows: int = 0
    """Held-out rows per evaluation, from the first; 0: all."""
    max_replacements: int = 3
    """How often a dropped group's row is issued again."""

    def __post_init__(self) -> None:
        _positive("prompts", group_size=self.group_size)
        _not_negative(
            "prompts",
            evaluate_every=self.evaluate_every,
            evaluate_rows=self.evaluate_rows,
            max_replacements=self.max_replacements,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection:
    """Sampling."""

    workers: int = 1
    """Processes started by `up`."""
    engine: Literal["builtin"] = "builtin"
    """What samples."""
    slots: int = 64
    """Sequences decoded together."""
    max_new_tokens: int = 16
    """Longest answer, tokens."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Nucleus; 1: off."""
    top_k: int = 0
    """0: off."""
    commit_interval_s: float = 0.1
    """Finished samples wait at most this long for their transaction."""
    max_attempts: int = 3
    """Tries of a sample before it is dead-lettered."""
    sample_deadline_s: float = 600.0
    """Longest time for one sample."""
    capture_experts: bool = True
    """Record routed experts where the model has them."""

    def __post_init__(self) -> None:
        _positive(
            "rollout",
            workers=self.workers,
            slots=self.slots,
            max_new_tokens=self.max_new_tokens,
            commit_interval_s=self.commit_interval_s,
            max_attempts=self.max_attempts,
            sample_deadline_s=self.sample_deadline_s,
        )
        _not_negative("rollout", temperature=self.temperature, top_k=self.top_k)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"rollout.top_p must be in (0, 1], got {self.top_p}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSection:
    """Judging answers."""

    verifier: str = "exact"
    """`exact`, `numeric`, or `file.py:function` called with (prompt, completion, answer, metadata)
    in a process of its own."""
    require_stop: bool = True
    """An answer cut at max_new_tokens earns 0."""
    timeout_s: float = 10.0
    """Longest time for one judgement by user code."""

    def __post_init__(self) -> None:
        _positive("reward", timeout_s=self.timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobSection:
    """Scoring."""

    workers: int = 1
    """Processes started by `up`."""
    token_budget: int = 16384
    """Tokens (padding included) of one forward; a window closes when it is full ..."""
    window_s: float = 0.1
    """... or this long after its first record."""
    versions_held: int = 2
    """Versions resident."""

    def __post_init__(self) -> None:
        _positive(
            "logprob",
            workers=self.workers,
            token_budget=self.token_budget,
            window_s=self.window_s,
            versions_held=self.versions_held,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSection:
    """Decoupled clipped policy loss, mean over tokens."""

    clip_low: float = 0.2
    """Ratio to the proximal policy is clipped at 1 - this."""
    clip_high: float = 0.28
    """... and at 1 + this."""
    weight_cap: float = 2.0
    """Cap of the importance weight proximal / behavior."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation."""

    def __post_init__(self) -> None:
        _positive("trainer.loss", weight_cap=self.weight_cap)
        _not_negative("trainer.loss", clip_low=self.clip_low, clip_high=self.clip_high)
        if self.clip_low >= 1:
            raise ConfigError(f"trainer.loss.clip_low must be below 1, got {self.clip_low}")


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
        _positive("trainer.optimizer", lr=self.lr, eps=self.eps, max_grad_norm=self.max_grad_norm)
        _not_negative(
            "trainer.optimizer", warmup_steps=self.warmup_steps, weight_decay=self.weight_decay
        )
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise ConfigError(f"trainer.optimizer.{name} must be in [0, 1), got {beta}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSection:
    """Learning."""

    steps: int = 100
    """Optimizer steps after which the run ends."""
    groups_per_step: int = 16
    """Groups in a batch."""
    max_staleness: int = 1
    """Bound on (version being trained - version that sampled), in versions."""
    on_stale: Literal["mask", "drop"] = "mask"
    """A segment above the bound is masked from the loss, or its group is dropped."""
    min_group_samples: int = 0
    """A group with fewer living samples is dropped; 0: all must live."""
    group_deadline_s: float = 600.0
    """A group still incomplete this long after its first sample came is dropped."""
    micro_batch_tokens: int = 16384
    """Tokens (padding included) of one forward and backward."""
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

    def __post_init__(self) -> None:
        _positive(
            "trainer",
            steps=self.steps,
            groups_per_step=self.groups_per_step,
            group_deadline_s=self.group_deadline_s,
            micro_batch_tokens=self.micro_batch_tokens,
            buffer_mb=self.buffer_mb,
            checkpoint_every=self.checkpoint_every,
            checkpoints_kept=self.checkpoints_kept,
        )
        _not_negative(
            "trainer",
            max_staleness=self.max_staleness,
            min_group_samples=self.min_group_samples,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSection:
    """Moving weights."""

    channel: Literal["file"] = "file"
    """`file`: safetensors under the run's folder."""
    versions_served: int = 4
    """Newest versions that can be pulled."""
    pull_deadline_s: float = 300.0
    """Longest time for one pull."""

    def __post_init__(self) -> None:
        _positive(
            "weights", versions_served=self.versions_served, pull_deadline_s=self.pull_deadline_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinesSection:
    """Waits of the system itself, seconds."""

    lease_s: float = 6.0
    """A starting trainer refuses if the newest owner wrote within this time."""
    commit_s: float = 30.0
    """A commit without an answer for this long ends the process."""
    stall_s: float = 120.0
    """At the end of a run the last evaluation may take this long."""
    drain_s: float = 30.0
    """Work unfinished this long after a drain began stays in flight."""

    def __post_init__(self) -> None:
        _positive(
            "deadlines",
            lease_s=self.lease_s,
            commit_s=self.commit_s,
            stall_s=self.stall_s,
            drain_s=self.drain_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A SIGKILL that `up` sends in front of the user."""

    role: Literal["rollout", "logprob", "trainer", "prompts"]
    """Whose first worker."""
    at: float
    """When, as a share of the steps."""

    def __post_init__(self) -> None:
        if not 0 <= self.at <= 1:
            raise ConfigError(f"demo.kills.at must be in [0, 1], got {self.at}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSection:
    """Only for demonstrations."""

    kills: tuple[Kill, ...] = ()
    """Processes to kill, and when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that a run is told."""

    run: RunSection = field(default_factory=RunSection)
    broker: BrokerSection = field(default_factory=BrokerSection)
    data: DataSection = field(default_factory=DataSection)
    model: ModelSection = field(default_factory=ModelSection)
    prompts: PromptsSection = field(default_factory=PromptsSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    reward: RewardSection = field(default_factory=RewardSection)
    logprob: LogprobSection = field(default_factory=LogprobSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    weights: WeightsSection = field(default_factory=WeightsSection)
    deadlines: DeadlinesSection = field(default_factory=DeadlinesSection)
    demo: DemoSection = field(default_factory=DemoSection)

    @property
    def folder(self) -> str:
        """The run's folder."""
        return self.run.dir.replace("{id}", self.run.id)

    @property
    def max_open_groups(self) -> int:
        """(S + 1) x P: what keeps every group trainable at staleness S, P groups a step."""
        return (self.trainer.max_staleness + 1) * self.trainer.groups_per_step

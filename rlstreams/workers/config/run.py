"""The configuration of a run: one frozen dataclass per component, a sentence under each field."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rlstreams.workers.config.agents import AgentSection, GatewaySection, OutcomeSection
from rlstreams.workers.config.checks import (
    AutoDeviceName,
    DeviceName,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
    every_interface,
)
from rlstreams.workers.config.data import DataSection
from rlstreams.workers.config.engine import EngineSection, Server
from rlstreams.workers.config.operation import (
    BrokerSection,
    DeadLettersSection,
    DeadlinesSection,
    DemoSection,
    Device,
    GuardSection,
    TrackSection,
)
from rlstreams.workers.config.reward import EnvironmentSection, JudgeSection, RewardSection
from rlstreams.workers.config.trainer import (
    ScorerLayoutSection,
    TrainerSection,
    layout_problems,
)

START = "start"  # a reference: the model that the run began with
AUTO = "auto"  # a device: where it costs least
BUILTIN = "builtin"  # an engine: a model in the worker's process, no server


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection(Section, section="run"):
    """Identity of the run."""

    id: str = "run"
    """Prefix of every topic, group and transactional id: letters, digits, `-`, `_`."""
    seed: int = 0
    """Seed of the data order and of sampling."""
    dir: str = "runs/{id}"
    """Folder for logs, checkpoints, weights, report and the embedded broker's data; a new run takes
    none that has other things in it."""
    on_changed_code: Literal["refuse", "record"] = "refuse"
    """Behavior of a role that starts in a living run with another reward, environment, judge's
    template or held-out file than the trainer claimed: end and name it, or go on with it."""

    def _problems(self) -> Iterator[str]:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", self.id):
            yield f"run.id must be 1 to 100 letters, digits, `-` or `_`, got {self.id!r}"
        if not 0 <= self.seed < 1 << 63:
            yield f"run.seed must be in [0, 2^63), got {self.seed}"
        if not self.dir or re.search(r"[{}]", self.dir.replace("{id}", "")):
            yield f"run.dir must be a path with no other braces than {{id}}, got {self.dir!r}"
        if self.dir.startswith("~"):  # a shell leaves it in `--run.dir=~/x`
            yield f"run.dir must be a path without `~`, which stays as it is, got {self.dir!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection(Section, section="model"):
    """The policy."""

    path: str = ""
    """Hugging Face folder: config, safetensors, tokenizer. It is version 0."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that weights are computed with and published in; `bfloat16`: the trainer keeps their
    lower halves, gradients and moments in float32."""
    threads: PositiveInt = 1
    """Threads of each compute process; a redo is bit-identical only with the same number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsSection(Section, section="prompts"):
    """Issuing samples."""

    group_size: PositiveInt = 8
    """Samples per prompt, at least 2: they are compared with each other."""
    evaluate_every: NonNegativeInt = 0
    """Versions between evaluations; 0: only version 0 and the last."""
    evaluate_rows: NonNegativeInt = 0
    """Held-out rows per evaluation, from the first; 0: all."""
    evaluate_samples: PositiveInt = 1
    """Answers to each held-out row; reported are their mean and the best of them."""
    evaluate_temperature: float = -1.0
    """Temperature of held-out answers; 0: the likeliest token. -1: as `rollout.temperature`."""
    evaluate_max_tokens: NonNegativeInt = 0
    """Longest held-out answer; 0: as `rollout.max_new_tokens`."""
    max_replacements: NonNegativeInt = 3
    """Most times that a dropped group's row is issued again."""

    def _problems(self) -> Iterator[str]:
        if self.evaluate_temperature < 0 and self.evaluate_temperature != -1:
            yield "[evaluate_temperature]: it must be 0 or above, or -1 for that of training"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection(Section, section="rollout"):
    """Sampling."""

    workers: PositiveInt = 1
    """Processes started by `up`."""
    engine: Literal["builtin", Server] = "builtin"
    """The sampler: a model in the worker's process, or servers (section `engine`)."""
    device: DeviceName = "cpu"
    """Device of the built-in engine: `cpu`, `cuda` or `cuda:N`; a server chooses its own."""
    slots: PositiveInt = 64
    """Sequences decoded together."""
    max_new_tokens: PositiveInt = 16
    """Maximum length of an answer, or of one turn, tokens."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature, not 0: greedy samples leave nothing to learn from."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling; 1: off. Below 1 the gradient is biased: a start warns of it."""
    top_k: NonNegativeInt = 0
    """Sample from the `top_k` likeliest tokens; 0: off. Biased as `top_p` is."""
    commit_interval_s: PositiveFloat = 0.1
    """Finished samples wait at most this long for their transaction."""
    max_attempts: PositiveInt = 3
    """Attempts at a sample before it is dead-lettered."""
    sample_deadline_s: PositiveFloat = 600.0
    """Time limit for one sample; at most half of `trainer.group_deadline_s`."""
    capture_experts: bool = True
    """Record routed experts where the model has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobSection(Section, section="logprob"):
    """Scoring."""

    place: Literal["separate", "trainer", "off"] = "separate"
    """Role that computes log-probs: a service of its own, under the version that sampled; the
    trainer, under its own weights; or none, and the sampler's stand in. The workers then hold no
    model, or that of `reference` alone."""
    workers: PositiveInt = 1
    """Replicas, each of which takes partitions of its own."""
    ranks: PositiveInt = 1
    """Processes of a replica, each with a share of the model, for one that fits no GPU."""
    device: AutoDeviceName = AUTO
    """Device: `cpu`, `cuda` or `cuda:N`. Further ranks, and with `up` further replicas, take the
    GPUs behind it. `auto`: GPUs that trainer and servers of this host leave; else the trainer's."""
    backend: Literal["builtin", "megatron"] = "builtin"
    """Layers that compute: of Hugging Face, or of megatron-core as in `trainer.backend`."""
    token_budget: PositiveInt = 16384
    """Tokens of a forward pass, of a bin or of padded rows; a window closes with so many ..."""
    window_s: PositiveFloat = 0.1
    """... or this long after its first record, once nothing else is being scored."""
    shared_prefixes: bool = True
    """Tokens that several samples of a bin begin with are computed once: as in `[trainer]`."""
    versions_held: NonNegativeInt = 0
    """Weight versions kept in memory; 0: all that may be in use, `trainer.max_staleness` + 1."""
    reference: str = START
    """Model to stay close to, with `trainer.loss.kl_coef`, or teacher, with `kind = "distill"`:
    `start`, or a folder or `hf:ORG/NAME` of the same tokenizer."""
    commit_interval_s: PositiveFloat = 0.1
    """Scored trajectories wait at most this long for their transaction."""
    layout: ScorerLayoutSection = field(default_factory=ScorerLayoutSection)

    def _problems(self) -> Iterator[str]:
        yield from layout_problems("logprob", self.backend, self.ranks, self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSection(Section, section="weights"):
    """Weight transfer."""

    channel: Literal["file", "gloo", "nccl", "store"] = "file"
    """`file`: safetensors under the run's folder; `gloo` (CPU), `nccl` (GPU): broadcast, on the
    trainer's own GPU by CUDA IPC; `store`: the weight store is followed, see `[store]`."""
    host: str = "127.0.0.1"
    """Address of the network interface on which the trainer serves weights."""
    secret: str = ""
    """Shared secret that pullers authenticate with; `env:NAME` or `file:PATH`. Empty: generated in
    the run's folder."""
    snapshot: Literal["auto", "device", "pinned"] = "auto"
    """Place of the copy that the trainer serves: beside the model, or in pinned host memory.
    `auto`: `device` if it fits and `trainer.ranks` is 1."""
    stall_deadline_s: PositiveFloat = 20.0
    """A broadcast without progress for this long is aborted; silent pullers are named in the
    log."""
    versions_served: PositiveInt = 4
    """Number of newest versions that can be pulled."""
    pull_deadline_s: PositiveFloat = 300.0
    """Time limit for one pull."""

    @property
    def is_link(self) -> bool:
        """Whether the trainer itself sends them, over the network."""
        return self.channel in ("gloo", "nccl")

    def _problems(self) -> Iterator[str]:
        if self.is_link:
            yield from every_interface(
                "host",
                self.host,
                "pullers are given this address, and anybody could ask; name that of the interface "
                "by which they reach the trainer",
            )
        if self.channel == "nccl" and ":" in self.host:
            yield f"weights.host must be an IPv4 address or a host name, got {self.host!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSection(Section, section="store"):
    """Every version, kept as anchors and lossless differences."""

    url: str = ""
    """Folder, or URL that fsspec opens (`s3://bucket/{id}`); `{id}` is the run's. Empty: none, or,
    where `weights.channel` is `store`, `store` in the run's folder."""
    anchor_every: PositiveInt = 20
    """Versions from one that is kept whole to the next; between them differences are kept."""
    keep: NonNegativeInt = 0
    """Newest whole versions that stay, with the differences behind them; 0: all."""
    deadline_s: PositiveFloat = 60.0
    """A version that is not written within this time is named on the screens; the run goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The whole configuration of a run."""

    run: RunSection = field(default_factory=RunSection)
    broker: BrokerSection = field(default_factory=BrokerSection)
    data: DataSection = field(default_factory=DataSection)
    model: ModelSection = field(default_factory=ModelSection)
    prompts: PromptsSection = field(default_factory=PromptsSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    engine: EngineSection = field(default_factory=EngineSection)
    environment: EnvironmentSection = field(default_factory=EnvironmentSection)
    reward: RewardSection = field(default_factory=RewardSection)
    judge: JudgeSection = field(default_factory=JudgeSection)
    outcome: OutcomeSection = field(default_factory=OutcomeSection)
    gateway: GatewaySection = field(default_factory=GatewaySection)
    logprob: LogprobSection = field(default_factory=LogprobSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    weights: WeightsSection = field(default_factory=WeightsSection)
    store: StoreSection = field(default_factory=StoreSection)
    deadlines: DeadlinesSection = field(default_factory=DeadlinesSection)
    guard: GuardSection = field(default_factory=GuardSection)
    dead_letters: DeadLettersSection = field(default_factory=DeadLettersSection)
    track: TrackSection = field(default_factory=TrackSection)
    demo: DemoSection = field(default_factory=DemoSection)
    devices: tuple[Device, ...] = ()
    """GPUs that roles share in shifts, one table `[[devices]]` each."""
    agent: tuple[AgentSection, ...] = ()
    """Agents, one table `[[agent]]` each: a sample is the session of one, and not one answer."""

    def shared_device(self, role: str) -> Device | None:
        """The device that `role` has in shifts; None: it has its own."""
        return next((device for device in self.devices if role in device.roles), None)

    @property
    def is_served(self) -> bool:
        """Whether model servers sample, and not the workers themselves."""
        return self.rollout.engine != BUILTIN

    def num_workers(self, role: str) -> int:
        """Processes of a role, over all hosts: `workers` of its section, else one. Model servers
        are counted by `num_servers`."""
        return int(getattr(getattr(self, role, None), "workers", 1))

    @property
    def num_servers(self) -> int:
        """Model servers that the run samples from."""
        if not self.is_served:
            return 0
        return len(self.engine.urls) or self.rollout.workers * self.engine.servers

    @property
    def num_started(self) -> int:
        """Model servers that the run starts to sample from."""
        return 0 if self.engine.urls else self.num_servers

    @property
    def folder(self) -> str:
        """The run's folder."""
        return self.run.dir.replace("{id}", self.run.id)

    @property
    def store_address(self) -> str:
        """Address of the weight store; empty: there is none."""
        if self.store.url:
            return self.store.url.replace("{id}", self.run.id)
        return f"{self.folder}/store" if self.weights.channel == "store" else ""

    @property
    def evaluation(self) -> RolloutSection:
        """`rollout` as it holds for held-out rows."""
        asked, usual = self.prompts, self.rollout
        has_own = asked.evaluate_temperature >= 0
        return replace(
            usual,
            temperature=asked.evaluate_temperature if has_own else usual.temperature,
            max_new_tokens=asked.evaluate_max_tokens or usual.max_new_tokens,
        )

    @property
    def num_turns(self) -> int:
        """Turns of the policy in one sample, at most."""
        if self.agent:
            return max(agent.max_calls for agent in self.agent)
        return self.environment.max_turns if self.environment.name else 1

    @property
    def has_scorer(self) -> bool:
        """Whether log-prob workers hold a model: policies, or the loss's reference alone."""
        return self.logprob.place == "separate" or bool(self.trainer.loss.why_compared)

    @property
    def versions_held(self) -> int:
        """Versions that the log-prob worker holds; with fewer it pulls the same ones repeatedly."""
        if self.logprob.place != "separate":
            return 0
        return self.logprob.versions_held or self.trainer.max_staleness + 1

    def scorer_on(self, gpus: Sequence[str]) -> tuple[str, str]:
        """`logprob.device` with `auto` decided, and why; "" where it was named.

        A free GPU is best. Else the trainer's: the two compute in turn there, and together they are
        as fast as their sum. A server does not wait for its shift: beside it both lose
        (infra/decisions/0069-the-log-prob-worker-on-the-trainers-gpu.md).

        Args:
            gpus: that this host's processes may use, as they are called outside of one.
        """
        wanted, shared = self.logprob.device, self.shared_device("logprob")
        if wanted != AUTO:
            return wanted, ""
        if shared is not None:
            first = f"cuda:{shared.gpus[0]}" if shared.gpus else "cpu"
            return first, f"it shares device {shared.name!r}"
        if self.trainer.device == "cpu":
            return "cpu", "the trainer computes there"
        num_wanted, used = self.logprob.ranks * self.logprob.workers, self._used_of(gpus)
        for start in range(len(gpus) - num_wanted + 1):
            if not used & {*range(start, start + num_wanted)}:
                return f"cuda:{start}", "no other role computes there"
        return self.trainer.device, "it is the trainer's: no other GPU is free"

    def _used_of(self, gpus: Sequence[str]) -> set[int]:
        """Indices of these GPUs that trainer and samplers have."""
        first = int(self.trainer.device.partition(":")[2] or 0)
        used = {*range(first, first + self.trainer.ranks_here)}
        if not self.is_served:
            kind, _, number = self.rollout.device.partition(":")
            return used | ({int(number or 0)} if kind != "cpu" else set())
        for server in range(self.num_started):
            named = self.engine.visible(server, self.num_started)
            names = list(gpus) if named is None else [n.strip() for n in named.split(",")]
            its = names[: self.engine.gpus_of_one]
            used |= {index for index, name in enumerate(gpus) if name in its}
        return used

    def of_replica(self, ordinal: int) -> RunConfig:
        """The configuration of one of several scorers on one host: its GPUs follow the others'."""
        kind, _, number = self.logprob.device.partition(":")
        if kind == "cpu" or not ordinal:
            return self
        first = int(number or 0) + ordinal * self.logprob.ranks
        return replace(self, logprob=replace(self.logprob, device=f"{kind}:{first}"))

    @property
    def max_open_groups(self) -> int:
        """(S + 1) x P: keeps every group trainable at staleness S with P groups per step."""
        return (self.trainer.max_staleness + 1) * self.trainer.groups_per_step

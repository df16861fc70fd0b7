"""Sections of a configuration about operation: broker, deadlines, trackers, devices, kills."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

from rlstreams.workers.config.checks import (
    Addresses,
    Ipv4,
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
    Share,
    every_interface,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSection(Section, section="broker"):
    """The Kafka broker that holds the log."""

    bootstrap: Addresses = ""
    """`host:port[,host:port]`; empty: an embedded broker under the run's folder."""
    host: Ipv4 = "127.0.0.1"
    """Address that the embedded broker listens on: loopback, or one private interface for roles on
    other hosts. They need the password in `broker/password` of the run's folder."""
    port: Port = 0
    """Port of the embedded broker; 0: any free port."""
    jars_dir: str = ""
    """Folder of the pinned jars, for machines without a registry; empty: download and cache."""
    heap_mb: PositiveInt = 256
    """Heap of the embedded broker, MB."""
    replication: PositiveInt = 1
    """Replicas of each topic."""
    partitions_per_worker: PositiveInt = 2
    """Partitions of `prompts` and of each payload topic, per worker that reads it."""
    headroom: PositiveInt = 8
    """Partitions of these topics at least: so many workers of a role find work, however few a run
    begins with. They are made at its start and never change."""
    payload_retention_hours: PositiveFloat = 168.0
    """Hours for which trajectories and scores are kept; a longer pause loses work under way."""
    payload_retention_bytes: int = 16 * 1024**3
    """Bytes of them that each partition keeps; the oldest are removed first. -1: no bound."""
    fsync: bool = False
    """Force each batch to disk before it is acknowledged, so that one node survives a power cut."""
    options: dict[str, str] = field(default_factory=dict)
    """librdkafka properties, e.g. for TLS; `env:NAME` and `file:PATH` are resolved, not printed."""

    def _problems(self) -> Iterator[str]:
        yield from every_interface(
            "host",
            self.host,
            "clients are given this address; name that of one interface that they reach",
        )
        if self.payload_retention_bytes < 1 and self.payload_retention_bytes != -1:
            yield "[payload_retention_bytes]: it must be positive, or -1 for no bound"
        if self.replication > 1 and not self.bootstrap:
            yield "[replication], but broker.bootstrap is empty: the embedded broker is one node"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinesSection(Section, section="deadlines"):
    """Internal deadlines, seconds."""

    lease_s: PositiveFloat = 6.0
    """A starting trainer refuses to run if the current owner has written within this time."""
    commit_s: PositiveFloat = 30.0
    """A commit that is not acknowledged within this time ends the process."""
    stall_s: NonNegativeFloat = 120.0
    """After so long without a step the run stops if a role has work and finished none; a window or
    step that takes longer ends its worker. 0: never."""
    drain_s: PositiveFloat = 30.0
    """Work still unfinished this long after a drain begins is left in flight."""
    checkpoint_s: PositiveFloat = 1800.0
    """Longest time for one checkpoint; a drain waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSection(Section, section="guard"):
    """Action if samplers and scorer disagree about log-probs under the same version."""

    action: Literal["pause", "warn", "off"] = "pause"
    """`pause`: the run pauses before the step, until `rlstreams control resume`."""
    limit: PositiveFloat = 0.1
    """Mean distance over a batch's tokens, nats, above which it is never taken for noise."""
    factor: PositiveFloat = 5.0
    """So many times the usual mean distance is taken for noise: that of the last eight steps, but
    within 1 and 3 times that of the first eight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLettersSection(Section, section="dead_letters"):
    """When a run has too many dead letters to continue."""

    max_share: PositiveShare = 0.5
    """The run stops if more than this share of a window's samples is dead-lettered; 1: never."""
    window_samples: NonNegativeInt = 0
    """Closed samples (trained, dropped or dead-lettered) per window; 0: three steps' worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSection:
    """Weights & Biases; `WANDB_API_KEY` or `wandb login` says who you are."""

    project: str = ""
    """Empty: not used."""
    entity: str = ""
    """User or team; empty: your default."""
    group: str = ""
    """Shown together with other runs of this name."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: files in the run's folder, for `wandb sync --append`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowSection(Section, section="track.mlflow"):
    """MLflow."""

    uri: str = ""
    """Address of the tracking server, without a password, or `file:PATH`; empty: not used."""
    experiment: str = ""
    """Empty: the run's id."""

    def _problems(self) -> Iterator[str]:
        if re.search(r"//[^/]*:[^/]*@", self.uri):  # the text of a refusal must not show it
            yield (
                "track.mlflow.uri holds a password, which the log would keep: set the environment "
                "variables MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackioSection:
    """Trackio, in its folder of this machine; `trackio sync` copies it to a Space."""

    project: str = ""
    """Empty: not used."""
    folder: str = ""
    """Empty: Trackio's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorboardSection:
    """TensorBoard's event files."""

    folder: str = ""
    """Folder of the files; `{id}` is the run's. Empty: not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackSection:
    """Trackers that `up` and `rlstreams metrics track` write to, each if its place is named: by the
    first field of its section."""

    wandb: WandbSection = field(default_factory=WandbSection)
    mlflow: MlflowSection = field(default_factory=MlflowSection)
    trackio: TrackioSection = field(default_factory=TrackioSection)
    tensorboard: TensorboardSection = field(default_factory=TensorboardSection)

    @property
    def used(self) -> Mapping[str, Mapping[str, str]]:
        """Settings of those that are used, by name."""
        settings = {own.name: asdict(getattr(self, own.name)) for own in fields(self)}
        return {name: given for name, given in settings.items() if next(iter(given.values()))}

    @property
    def places(self) -> Mapping[str, str]:
        """Full name of the field that names each tracker's place, by the tracker's name."""
        own = (field.name for field in fields(self))
        return {name: f"track.{name}.{fields(getattr(self, name))[0].name}" for name in own}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device(Section, section="devices"):
    """GPUs that roles share in shifts."""

    name: str
    """Name in events and messages."""
    roles: tuple[Literal["trainer", "rollout", "logprob", "judge"], ...]
    """Roles that share it, at least two, one worker each; one at a time has its memory there.
    `judge` is the server of `[judge]`."""
    gpus: tuple[int, ...] = ()
    """Numbers of its GPUs; empty: the roles compute on the CPU, and shifts save no memory."""
    turn_s: NonNegativeFloat = 2.0
    """Smallest shift: so long a role keeps the device while it has work."""
    longest_turn_s: PositiveFloat = 120.0
    """After this long the device goes to any other role with work."""
    change_s: PositiveFloat = 120.0
    """Time limit for a role to give its memory up, or to load it back; then it is killed."""

    @property
    def others_s(self) -> float:
        """Longest time that the other roles may have it, with taking it and giving it up."""
        return (len(self.roles) - 1) * (self.longest_turn_s + 2 * self.change_s)

    def _problems(self) -> Iterator[str]:
        if not self.name:
            yield "devices.name is empty: messages and events call the device by it"
        if len(set(self.roles)) != len(self.roles) or len(self.roles) < 2:
            yield (
                f"devices.roles of {self.name!r} is {list(self.roles)}: name at least two roles, "
                "each once"
            )
        if len(set(self.gpus)) != len(self.gpus) or min(self.gpus, default=0) < 0:
            yield (
                f"devices.gpus of {self.name!r} is {list(self.gpus)}: name each GPU once, by a "
                "number from 0"
            )
        if self.turn_s > self.longest_turn_s:
            yield f"[turn_s], but [longest_turn_s], of device {self.name!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(Section, section="demo.kills"):
    """A SIGKILL that `up` sends as a demonstration."""

    role: Literal["rollout", "server", "logprob", "trainer", "prompts"]
    """The role whose first worker is killed."""
    at: Share
    """When, as a fraction of the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSection:
    """Only for demonstrations."""

    kills: tuple[Kill, ...] = ()
    """Processes to kill, and when."""

"""The sections of a configuration about operation: deadlines, limits, trackers, demo kills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.checks import not_negative, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinesSection:
    """Internal deadlines, seconds."""

    lease_s: float = 6.0
    """A starting trainer refuses to run if the current owner has written within this time."""
    commit_s: float = 30.0
    """A commit that is not acknowledged within this time ends the process."""
    stall_s: float = 120.0
    """After so long without a step the run stops if a role has work and finished none of it; a
    window or step that takes longer ends its worker. 0: never."""
    fence_s: float = 35.0
    """Maximum wait for a predecessor's open transaction to be settled."""
    drain_s: float = 30.0
    """Work still unfinished this long after a drain begins is left in flight."""
    checkpoint_s: float = 1800.0
    """Longest time for one checkpoint; a drain waits for it."""

    def __post_init__(self) -> None:
        positive(
            "deadlines",
            lease_s=self.lease_s,
            commit_s=self.commit_s,
            fence_s=self.fence_s,
            drain_s=self.drain_s,
            checkpoint_s=self.checkpoint_s,
        )
        not_negative("deadlines", stall_s=self.stall_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLettersSection:
    """When a run has too many dead letters to continue."""

    max_share: float = 0.5
    """The run stops if more than this share of a window's samples is dead-lettered; 1: never."""
    window_samples: int = 0
    """Closed samples (trained, dropped or dead-lettered) per window; 0: three steps' worth."""

    def __post_init__(self) -> None:
        not_negative("dead_letters", window_samples=self.window_samples)
        if not 0 < self.max_share <= 1:
            raise ConfigError(f"dead_letters.max_share must be in (0, 1], got {self.max_share}")


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
class MlflowSection:
    """MLflow."""

    uri: str = ""
    """Of the tracking server, or `file:PATH`; empty: not used."""
    experiment: str = ""
    """Empty: the run's id."""


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
    """Where they lie; `{id}` is the run's. Empty: not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackSection:
    """Trackers that `up` and `rlstreams track` write to, each by what names its place."""

    wandb: WandbSection = field(default_factory=WandbSection)
    mlflow: MlflowSection = field(default_factory=MlflowSection)
    trackio: TrackioSection = field(default_factory=TrackioSection)
    tensorboard: TensorboardSection = field(default_factory=TensorboardSection)

    @property
    def used(self) -> Mapping[str, Mapping[str, str]]:
        """Settings of those that are used, by name."""
        on = {
            "wandb": self.wandb.project,
            "mlflow": self.mlflow.uri,
            "trackio": self.trackio.project,
            "tensorboard": self.tensorboard.folder,
        }
        return {name: asdict(getattr(self, name)) for name, place in on.items() if place}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A SIGKILL that `up` sends as a demonstration."""

    role: Literal["rollout", "logprob", "trainer", "prompts"]
    """The role whose first worker is killed."""
    at: float
    """When, as a fraction of the steps."""

    def __post_init__(self) -> None:
        if not 0 <= self.at <= 1:
            raise ConfigError(f"demo.kills.at must be in [0, 1], got {self.at}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSection:
    """Only for demonstrations."""

    kills: tuple[Kill, ...] = ()
    """Processes to kill, and when."""

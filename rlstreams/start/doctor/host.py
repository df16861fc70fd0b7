"""What is to run on this host: everything that `up` starts, or one worker of one role."""

from __future__ import annotations

from dataclasses import dataclass

from rlstreams.workers.config.run import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Which checks concern this host."""

    role: str = ""  # "": all of them, with `up`
    ordinal: int | None = None  # of the role's worker; None: any of them may run here

    def has(self, *roles: str) -> bool:
        """Whether a worker of one of these roles runs here."""
        return not self.role or self.role in roles

    @property
    def is_alone(self) -> bool:
        """Whether its role is started by itself, without `up`."""
        return bool(self.role)

    def ordinals(self, num_workers: int) -> tuple[int, ...]:
        """Of `num_workers` workers of the role those that may run here."""
        return tuple(range(num_workers)) if self.ordinal is None else (self.ordinal,)

    def num_processes(self, config: RunConfig) -> int:
        """Processes that compute here; of a role by itself one, or the trainer's ranks."""
        counts = {
            "rollout": config.rollout.workers,
            "logprob": config.logprob.workers,
            "trainer": config.trainer.ranks,
        }
        if not self.role:
            return sum(counts.values())
        return config.trainer.ranks if self.role == "trainer" else min(counts.get(self.role, 0), 1)


EVERYTHING = Host()

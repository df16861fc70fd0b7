"""The section of a configuration about samples of several turns: tools and environments."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.checks import not_negative, positive
from rlstreams.workers.config.user_code import Option


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSection:
    """What answers the policy between its turns."""

    name: str = ""
    """Your `file.py:Class` or `module:Class`, one object per sample, in a separate process; empty:
    a sample is one answer."""
    options: dict[str, Option] = field(default_factory=dict)
    """Keyword arguments for the class; secrets (`api_key`, `token`) as `env:NAME` or
    `file:PATH`."""
    max_turns: int = 8
    """Turns of the policy in one sample, at most."""
    role: str = "tool"
    """Role of the message that a text of the environment becomes, where the prompt is a chat."""
    timeout_s: float = 30.0
    """Time limit for one step."""
    processes: int = 2
    """Processes that hold environments, in each rollout worker."""
    concurrency: int = 32
    """Concurrent steps in each such process, if `step` is an `async def`; a plain one has one."""
    memory_mb: int = 4096
    """Memory limit of one such process, MB; a step that needs more fails. 0: no limit."""

    def __post_init__(self) -> None:
        positive(
            "environment",
            max_turns=self.max_turns,
            timeout_s=self.timeout_s,
            processes=self.processes,
            concurrency=self.concurrency,
        )
        not_negative("environment", memory_mb=self.memory_mb)
        if not self.role:
            raise ConfigError('environment.role must not be empty: "tool" or "user" are usual')
        if self.options and not self.name:
            raise ConfigError("environment.options are set, but environment.name is empty")

"""How many processes a run has."""

from __future__ import annotations

from rlstreams.workers.config.run import RunConfig


def num_workers(config: RunConfig) -> dict[str, int]:
    """Processes by role."""
    return {
        "prompts": 1,
        "rollout": config.rollout.workers,
        "logprob": config.logprob.workers,
        "trainer": 1,
    }

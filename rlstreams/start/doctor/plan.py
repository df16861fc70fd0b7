"""Numbers of a configuration that are each fine, and together not what can be meant. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rlstreams.start.doctor.check import Check, warn
from rlstreams.workers.config.run import RunConfig


def plan_checks(config: RunConfig) -> Iterator[Check]:
    """Only what is off; a run starts all the same."""
    trainer, steps = config.trainer, config.trainer.steps
    warmup = trainer.optimizer.warmup_steps
    if warmup >= steps:
        yield warn(
            "learning rate",
            f"trainer.optimizer.warmup_steps is {warmup} and trainer.steps is {steps}: "
            f"trainer.optimizer.lr = {trainer.optimizer.lr:g} is not reached before the run ends",
            "lower the one or raise the other",
        )
    if trainer.checkpoint_every > steps:
        yield warn(
            "checkpoints",
            f"trainer.checkpoint_every is {trainer.checkpoint_every} and trainer.steps is {steps}: "
            "until the run ends, a trainer that dies makes every step again from the log",
            "lower trainer.checkpoint_every",
        )
    kept_s = 3600 * config.broker.payload_retention_hours
    if kept_s < trainer.group_deadline_s:
        yield warn(
            "retention",
            f"broker.payload_retention_hours keeps samples for {kept_s:,.0f} s, but a group may be "
            f"open for trainer.group_deadline_s = {trainer.group_deadline_s:,.0f} s: its first "
            "samples may be gone before it is whole",
            "raise broker.payload_retention_hours, or lower trainer.group_deadline_s",
        )

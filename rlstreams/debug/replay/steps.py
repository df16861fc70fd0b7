"""What two accounts of one step say differently: the recorded one, and one made again. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlstreams.schemas.events import SampleRef, StepCompleted

# Where bytes lie and how long things took differ between any two runs of the same step.
TIMES = frozenset({"train_s"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """One field of one step."""

    field: str
    recorded: object
    again: object

    def __str__(self) -> str:
        return f"{self.field}: recorded {_brief(self.recorded)}, now {_brief(self.again)}"


def differences(recorded: StepCompleted, again: StepCompleted) -> list[StepDifference]:
    """In the order in which one follows from another: samples, batch, loss, weights."""
    return list(_differences(recorded, again))


def _differences(recorded: StepCompleted, again: StepCompleted) -> Iterator[StepDifference]:
    for number, (one, other) in enumerate(
        zip(recorded.samples, again.samples, strict=False), start=0
    ):
        if _said(one) != _said(other):
            yield StepDifference(
                field=f"sample {number} of the batch", recorded=_said(one), again=_said(other)
            )
            break
    if len(recorded.samples) != len(again.samples):
        yield StepDifference(
            field="samples", recorded=len(recorded.samples), again=len(again.samples)
        )
    for name in (
        "previous_hash",
        "masked",
        "absent",
        "micro_batches",
        "batch_hash",
        "staleness",
        "anchors",
        "loss",
        "weight_hash",
    ):
        one, other = getattr(recorded, name), getattr(again, name)
        if one != other:
            yield StepDifference(field=name, recorded=one, again=other)
    yield from _metrics(recorded.metrics, again.metrics)


def _metrics(recorded: Mapping[str, float], again: Mapping[str, float]) -> Iterator[StepDifference]:
    for name in sorted((recorded.keys() | again.keys()) - TIMES):
        if recorded.get(name) != again.get(name):
            yield StepDifference(
                field=f"metrics.{name}", recorded=recorded.get(name), again=again.get(name)
            )


def _said(ref: SampleRef) -> tuple[object, ...]:
    """A sample without where it lies."""
    return (
        f"{ref.group_id}/{ref.sample}",
        ref.num_tokens,
        ref.reward,
        ref.advantage,
        ref.oldest_policy_version,
    )


def _brief(value: object) -> str:
    text = value[:12] if isinstance(value, str) and len(value) == 64 else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

"""A recorded run as the views of it after each of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rlstreams.streams.views.evaluation import EvaluationPoint, EvaluationState
from rlstreams.streams.views.feed import ViewState
from rlstreams.streams.views.learning import hindrance
from rlstreams.streams.views.run import RunState, StepPoint
from tests import factories

METRICS = (
    "clip_fraction", "entropy", "equal_reward_groups", "kl", "response_tokens", "reward_std",
)  # fmt: skip
FIELDS = (
    "prompts.group_size",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "trainer.batch_epochs",
    "trainer.control",
    "trainer.groups_per_step",
    "trainer.loss.clip_high",
    "trainer.loss.clip_low",
    "trainer.max_staleness",
    "trainer.minibatches",
    "trainer.optimizer.lr",
    "trainer.optimizer.warmup_steps",
)  # those that the checks name
GROUP = 8  # samples, of every recorded run
LATE = 2  # steps until the answers of an evaluation are there


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        *sections, last = name.split(".")
        at = found
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value
    return found


def states(run: Mapping[str, Any]) -> Iterator[ViewState]:
    """The views after each step; an evaluation is known `LATE` steps later, or at the end."""
    claim = factories.trainer_started(config=msgspec.json.encode(_nested(run["config"])).decode())
    every = [point(run, number) for number in range(len(run["reward"]))]
    for num in range(1, len(every) + 1):
        late = 0 if num == len(every) else LATE
        curve = [_evaluation(*one, run) for one in run["held_out"] if one[0] + late <= num]
        yield ViewState(
            run=RunState(claims=(claim,), steps=tuple(every[:num])),
            evaluation=EvaluationState(points=tuple(curve)),
            cut={n + 1: share for n, share in enumerate(run["cut"][:num])},
        )


def said_of(run: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Sentences about the run, each time that its cause changes: (step, sentence)."""
    found: list[tuple[int, str]] = []
    for step, state in enumerate(states(run), 1):
        text = str(hindrance(state) or "")
        before = found[-1][1] if found else ""
        if text.partition(":")[0] != before.partition(":")[0]:
            found.append((step, text))
    return found


def point(run: Mapping[str, Any], number: int) -> StepPoint:
    """One step of a recorded run, from number 0."""
    mean = run["staleness"][number]
    whole = int(mean)
    tokens = {whole: round(1000 * (1 + whole - mean)), whole + 1: round(1000 * (mean - whole))}
    return StepPoint(
        step=number + 1, epoch=1, policy_version=number + 1, reward=run["reward"][number], loss=0.0,
        num_samples=run["num_samples"],
        num_groups=run.get("num_groups") or max(1, run["num_samples"] // GROUP), num_tokens=1,
        num_masked=0,
        metrics={name: values[number] for name, values in run["metrics"].items()},
        staleness=tokens, started_at_ms=0,
        finished_at_ms=1000 * number, num_dropped=run["dropped"][number],
    )  # fmt: skip


def _evaluation(version: int, accuracy: float, num: int, run: Mapping[str, Any]) -> EvaluationPoint:
    return EvaluationPoint(
        policy_version=version, accuracy=accuracy, best=accuracy, num_rows=num, num_samples=num,
        num_issued=num, num_dead=0, num_tokens=0, finished_at_ms=0,
        is_right_or_wrong=run["is_accuracy"],
    )  # fmt: skip

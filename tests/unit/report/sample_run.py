"""A made-up run of 60 steps, for the tests of what people look at."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from rlstreams.schemas.events import Segment, Tensor
from rlstreams.show.report.fold import RunFold
from rlstreams.show.report.page import ReportInput
from rlstreams.streams.audit.report import AuditReport
from rlstreams.streams.views.feed import ViewState
from rlstreams.words.screen import KillMark
from rlstreams.workers.config.load import resolved_json
from rlstreams.workers.config.run import RunConfig
from tests.factories import (
    NOW_MS,
    groups_dropped,
    heartbeat,
    policy_loaded,
    prompt,
    sample_ref,
    step_completed,
    trainer_started,
    trajectory,
    worker_report,
)

STEP_MS = 1500
WORDS = ["<pad>", "<eos>", "=", "+", ",", "~", *(str(n) for n in range(100))]


def decode(token_ids: object) -> str:
    return "".join(WORDS[int(token)] for token in token_ids)  # type: ignore[attr-defined]


def _ids(*words: str) -> Tensor:
    return Tensor.of(np.array([WORDS.index(word) for word in words], np.int32))


def accuracy_at(version: int) -> float:
    return 0.42 + 0.48 * (1 - math.exp(-version / 14))


def answers(views: RunFold, version: int, rows: int = 64) -> None:
    """One evaluation: row 0 is wrong until version 10, and spans two versions."""
    question = Segment(author="prompt", token_ids=_ids("7", "+", "8", "+", "3", "+", "9", "="))
    num_right = round(rows * accuracy_at(version))
    for row in range(rows):
        is_right = version >= 10 if row == 0 else row <= num_right
        words = [("15", ",", "18"), (",", "27")] if is_right else [("~",), ("24",)]
        segments = tuple(
            Segment(
                author="policy",
                token_ids=_ids(*part),
                policy_version=version + index,
                load_id="l",
                finish_reason="stop",
            )
            for index, part in enumerate(words)
        )
        views.apply(
            trajectory(
                group_id=f"e{version}-{row}",
                sample=0,
                purpose="evaluate",
                segments=(question, *segments),
                reward=float(is_right),
                finished_at_ms=NOW_MS + version * STEP_MS,
            )
        )


def steps(views: RunFold, num_steps: int, noise: np.random.Generator) -> None:
    """Steps whose reward follows the accuracy, with a claim and a drop among them."""
    views.apply(trainer_started(run="demo", step_target=60, config=resolved_json(RunConfig())))
    for step in range(1, num_steps + 1):
        reward = accuracy_at(step) + float(noise.normal(0, 0.04))
        end_ms = NOW_MS + step * STEP_MS
        views.apply(
            step_completed(
                step,
                samples=tuple(sample_ref("1", n, reward=reward) for n in range(128)),
                masked=(),
                staleness={"0": 300, "1": 500, "2": 40} if step > 2 else {"0": 840},
                anchors={"sampled": 800, "behavior": 40},
                metrics={
                    "entropy": 0.3 * math.exp(-step / 20) + 0.05,
                    "mismatch_mean": 1e-3 + 1e-4 * float(noise.random()),
                    "mismatch_max": 2e-2 + 1e-3 * float(noise.random()),
                    "ratio_max": 1.0 + 0.4 * float(noise.random()),
                    "lr": 2e-4,
                    "num_loss_tokens": 840.0,
                },
                started_at_ms=end_ms - 900,
                finished_at_ms=end_ms,
            )
        )
    views.apply(groups_dropped())
    views.apply(heartbeat())
    for sample in range(1200):  # wait for a rollout worker
        views.apply(prompt(group_id="70", sample=sample, group_size=1200))


def processes(views: RunFold, num_steps: int) -> None:
    """Reports of five workers, one of which was killed in the middle."""
    for second in range(num_steps * STEP_MS // 1000 + 1):
        at_ms = NOW_MS + second * 1000
        after_kill = second > num_steps * STEP_MS // 3000
        for worker, role, rate in (
            ("prompts-0", "prompts", {"samples": 85.0}),
            ("rollout-0", "rollout", {"tokens": 620.0, "samples": 80.0}),
            ("rollout-1", "rollout", {"tokens": 600.0, "samples": 78.0}),
            ("logprob-0", "logprob", {"tokens": 1190.0, "samples": 150.0}),
            ("trainer-0", "trainer", {"samples": 85.0}),
        ):
            was_killed = worker == "rollout-0" and after_kill
            views.apply(
                worker_report(
                    worker=worker,
                    role=role,
                    instance="second" if was_killed else "first",
                    state="waiting" if second % 4 == 0 else "working",
                    policy_version=-1 if role == "prompts" else second * 1000 // STEP_MS,
                    counters={name: value * second for name, value in rate.items()},
                    at_ms=at_ms,
                )
            )
    for worker in ("rollout-0", "rollout-1", "logprob-0"):
        views.apply(policy_loaded(num_steps, worker=worker, num_bytes=1_060_000, seconds=0.08))


@cache
def fold_at(num_steps: int) -> RunFold:
    """All that is shown of the run after so many steps."""
    fold = RunFold()
    for version in range(0, num_steps + 1, 5):
        answers(fold, version)
    answers(fold, num_steps + 1, rows=1)
    steps(fold, num_steps, np.random.default_rng(0))
    processes(fold, num_steps)
    return fold


def views_at(num_steps: int) -> ViewState:
    """The state of its views."""
    return fold_at(num_steps).state


class FoldOf(RunFold):
    """A fold whose views have the given state."""

    def __init__(self, state: ViewState) -> None:
        super().__init__()
        self.given = state

    @property
    def state(self) -> ViewState:
        return self.given


def audit_report(**changes: object) -> AuditReport:
    values = {
        "run": "demo",
        "steps": 60,
        "policy_version": 60,
        "issued": 9000,
        "trained": 7680,
        "evaluated": 1024,
        "dead_lettered": 0,
        "lost": 0,
        "dropped": {"stale": 8},
        "in_flight": {"trainer": 288},
        "staleness": {0: 100, 1: 300},
        "max_staleness": 1,
    }
    return AuditReport(**{**values, **changes})  # type: ignore[arg-type]


def report_input(views: ViewState | None = None, **changes: object) -> ReportInput:
    values = {
        "run": "demo",
        "fold": fold_at(20) if views is None else FoldOf(views),
        "audit": audit_report(),
        "kills": (KillMark(step=7, worker="rollout-0", killed_at_ms=NOW_MS),),
        "decode": decode,
    }
    return ReportInput(**{**values, **changes})  # type: ignore[arg-type]

"""A metric of a run by step, as the log has it; found by its name or by a common name."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlstreams.debug.blame.band import Point
from rlstreams.show.metrics.rows import EVALUATION, TOPICS, MetricRows
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.run.run_log import RunLog
from rlstreams.streams.views.pace import MEASURED
from rlstreams.workers.config.nearest import meant

HELD_OUT = "held_out"
"""Mean reward of the held-out rows, by the step that made the version."""
HELD_OUT_TOKENS = "held_out_tokens"
"""Mean number of sampled tokens of their answers."""
DEFAULT = "entropy"
"""The metric of a run that evaluates no held-out rows."""
SAMPLED = (HELD_OUT, HELD_OUT_TOKENS)
CALLED: Mapping[str, str] = {  # names of figures on screens
    "accuracy": HELD_OUT,
    "answer_length": "response_tokens",
    "gradient": "grad_norm",
    "gradient_norm": "grad_norm",
    "heldout": HELD_OUT,
    "length": "response_tokens",
    "mismatch": "mismatch_mean",
}
_NO_FIGURES = MEASURED | {"epoch", "policy_version", "publish_s", "seconds"}


def is_reward(name: str) -> bool:
    """Whether no value of it is too high."""
    return name in (HELD_OUT, "reward") or name.startswith("reward/")


def series(log: RunLog) -> Mapping[str, list[Point]]:
    """Return every metric that the log has, by name, in the order of steps.

    Raises:
        DeadlineError: a partition did not deliver up to its end.
    """
    view = MetricRows()
    for topic in TOPICS:
        for record in log.read_topic(topic, skip_unreadable=True):
            view.apply(record.event, record.position)
    found: dict[str, list[Point]] = {}
    for row in sorted(view.take(is_caught_up=True, is_last=True), key=lambda row: row.step):
        if row.kind != EVALUATION:
            for name, value in row.values.items():
                if name not in _NO_FIGURES:
                    found.setdefault(name, []).append(Point(step=row.step, value=value))
            continue
        num, reward = row.values["evaluation/samples"], row.values["evaluation/mean_reward"]
        point = Point(step=row.step, value=reward, error=error_of(reward, num))
        found.setdefault(HELD_OUT, []).append(point)
        tokens = row.values["evaluation/tokens"] / num if num else math.nan
        found.setdefault(HELD_OUT_TOKENS, []).append(Point(step=row.step, value=tokens))
    return found


def error_of(reward: float, num: float) -> float:
    """Return the standard error of a mean of `num` rewards between 0 and 1; of others 0: not known.

    It is at most that of right and wrong answers; for p = 0 and 1 too, by the rule of succession.
    """
    if not (0 <= reward <= 1 and num):
        return 0.0
    share = (reward * num + 1) / (num + 2)
    return math.sqrt(share * (1 - share) / num)


def named(name: str, found: Mapping[str, object]) -> str:
    """Return a metric's name in the log. Raises ConfigError: no such metric; names the nearest."""
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    for known in (name, plain, CALLED.get(plain, "")):
        if known in found:
            return known
    missing = CALLED.get(plain, plain)
    if missing in SAMPLED:
        raise ConfigError(
            f"--metric {name}: the log has no evaluation of held-out rows (data.held_out, "
            "prompts.evaluate_every); take reward, entropy or another metric of its steps"
        )
    raise ConfigError(
        f"--metric {name}: the log has no such metric{meant(plain, [*found, *CALLED])}; it has "
        f"{', '.join(sorted(found)) or 'no step'}"
    )

"""The cost of a run: its time and tokens by use, and the time that each death took. Pure.

All figures are from the log: a run that is over, or recorded, has the figures that it had live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from rlstreams.streams.samples.fold import Samples
from rlstreams.streams.views.run import RunState
from rlstreams.streams.workers import Death, Workers

DIED, UNFINISHED, OFF_PATH = "died", "unfinished", "off_path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comeback:
    """The deaths of one role."""

    deaths: int
    away: int  # deaths whose worker has not worked since
    median_s: float  # from the last report to the next work; NaN: no time is known
    worst_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostState:
    """Time, tokens and deaths so far."""

    training_s: float = 0.0  # sum over the steps that count
    wall_s: float = 0.0  # from the first step's begin to the last one's end, or to now
    sampled_tokens: int = 0  # counted by all processes; 0: no report is left
    in_vain: Mapping[str, int] = field(default_factory=dict)  # tokens, by cause
    deaths: tuple[Death, ...] = ()

    @property
    def training_share(self) -> float | None:
        """Share of the time that steps took; None before the first step."""
        return self.training_s / self.wall_s if self.wall_s else None

    @property
    def in_vain_share(self) -> float | None:
        """Share of the sampled tokens that no step trains; None: their number is not known."""
        spent = sum(self.in_vain.values())
        return spent / self.sampled_tokens if self.sampled_tokens else None

    @property
    def comebacks(self) -> Mapping[str, Comeback]:
        """Deaths and returns by role, for roles that had a death."""
        found = {}
        for role in sorted({death.role for death in self.deaths}):
            own = [death.seconds for death in self.deaths if death.role == role]
            back = [seconds for seconds in own if seconds is not None]
            known = [seconds for seconds in back if seconds >= 0]  # less: the clock was set back
            found[role] = Comeback(
                deaths=len(own),
                away=len(own) - len(back),
                median_s=median(known) if known else float("nan"),
                worst_s=max(known, default=float("nan")),
            )
        return found


def cost(run: RunState, samples: Samples, workers: Workers) -> CostState:
    """Return a snapshot of the run's cost."""
    begin_ms = run.steps[0].started_at_ms if run.steps else 0
    end_ms = run.steps[-1].finished_at_ms if run.steps else 0
    if run.steps and not 0 < run.step_target <= run.step:
        end_ms = max(end_ms, workers.now_ms)
    training_s = sum(step.finished_at_ms - step.started_at_ms for step in run.steps) / 1000
    return CostState(
        training_s=training_s,
        wall_s=max((end_ms - begin_ms) / 1000, training_s),  # less: the clock was set back
        sampled_tokens=int(workers.total("rollout", "sampled_tokens")),
        in_vain={name: num for name, num in _in_vain(samples, workers).items() if num > 0},
        deaths=tuple(workers.deaths),
    )


def _in_vain(samples: Samples, workers: Workers) -> Counter[str]:
    """Return the tokens that no step will train, by cause.

    `died`: tokens that a process had counted in its last report, at most a second before its death,
    and had not finished; without calls of agents that were answered from the log later.
    `unfinished`: likewise of a process that stopped: requests that were cut, given up, or failed.
    `off_path`: calls of agents that are not on the path that becomes their sample. Others: reasons
    for which the trainer did not take the sample, by `Group.why_untrained`.
    """
    found = samples.spent.in_vain
    dead = {death.instance for death in workers.deaths}
    for life in workers.lives:
        if life.role == "rollout":
            counts = life.counters
            left = int(counts.get("sampled_tokens", 0) - counts.get("tokens", 0))
            if life.instance in dead:
                found[DIED] += left
            elif life.state == "stopped":
                found[UNFINISHED] += left
    found[DIED] -= int(workers.total("rollout", "tokens_replayed"))
    found[OFF_PATH] += int(workers.total("rollout", "tokens_off_path"))
    return found

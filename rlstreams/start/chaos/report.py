"""What a run under faults came to: as text for people, as JSON for the record."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlstreams.streams.log.text import plain_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Times of one kind, seconds."""

    count: int
    median_s: float
    worst_s: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(
            count=len(values),
            median_s=round(statistics.median(values), 2),
            worst_s=round(max(values), 2),
        )

    def __str__(self) -> str:
        """Median, worst and how many."""
        return f"{self.median_s:.1f} s, worst {self.worst_s:.1f} s (of {self.count})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Zombies:
    """Processes that slept while a successor took over, and woke up."""

    woken: int = 0
    fenced: int = 0  # ended by themselves with status 75
    ended_otherwise: Mapping[str, int] = field(default_factory=dict)  # by status
    alive: int = 0  # had not noticed long after they woke up
    longest_end_s: float = 0.0  # from SIGCONT to their end
    longest_answered_s: float = 0.0  # the same, less the time in which the broker was down


@dataclass(frozen=True, slots=True, kw_only=True)
class Redone:
    """What restarted trainers executed again."""

    times: int = 0
    steps: int = 0
    equal: int = 0  # with the recorded weight hash


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosReport:
    """Everything; `problems` is empty if the run kept its promises under all faults asked for."""

    run: str
    seed: int
    machine: Mapping[str, object]
    seconds: float
    faults_asked: int
    faults: Mapping[str, Mapping[str, int]]  # by role, by kind
    processes_killed: int  # crash points and the broker included
    crash_points: Mapping[str, int]  # reached, by name
    crash_points_armed: int
    outcome: str
    steps: int
    step_target: int
    audit: Mapping[str, object]
    audit_line: str
    stale: int  # breaches of the staleness bound
    redone: Redone
    sampled_tokens: int
    unreported_tokens: int  # estimate, see `rlstreams.start.chaos.outputs.Tokens`
    useful_tokens: int
    regenerated_share: float
    back: Mapping[str, Spread]  # from the death to the successor's first commit, by role
    recovery: Mapping[str, Spread]  # ... to its first record of work; there may be none to do
    woken: Mapping[str, Spread]  # the same from SIGCONT, nobody having taken over
    detection: Mapping[str, Spread]  # from the death to its detection
    zombies: Zombies
    exits: Mapping[str, int]  # "{role} {status}", deaths by our own signals left out
    unexplained: Sequence[str]  # ends that no fault accounts for
    recomputed: str  # what came of redoing the run from its log; "" if not asked for
    problems: Sequence[str]

    @property
    def ok(self) -> bool:
        """Nothing broke."""
        return not self.problems

    @property
    def num_faults(self) -> int:
        """Faults that happened."""
        return sum(sum(kinds.values()) for kinds in self.faults.values())

    def to_json(self) -> str:
        """All of it as one JSON object."""
        return plain_json({"ok": self.ok, **asdict(self)}, indent=2, sort_keys=True)

    def lines(self) -> Sequence[str]:
        """For people."""
        redone, zombies = self.redone, self.zombies
        return (
            f"chaos, seed {self.seed}: {self.num_faults} of {self.faults_asked} faults in "
            f"{self.seconds:.0f} s, {self.processes_killed} processes killed",
            *(f"  {role:<8} {_counts(kinds)}" for role, kinds in self.faults.items()),
            *self._points(),
            f"steps {self.steps} of {self.step_target}; {redone.steps} done again from the log in "
            f"{redone.times} restarts of the trainer, {redone.equal} weight hashes equal",
            f"{self.audit_line}; too stale {self.stale}",
            f"regenerated {self.regenerated_share:.1%} of "
            f"{self.sampled_tokens + self.unreported_tokens:,} sampled tokens",
            *_spreads("from a kill to its detection", self.detection),
            *_spreads("from a kill to the successor's first commit", self.back),
            *_spreads("from a kill to its next committed work, if there is any", self.recovery),
            *_spreads("from SIGCONT to the next committed work", self.woken),
            f"zombies woken {zombies.woken}: fenced {zombies.fenced}, ended otherwise "
            f"{_counts(zombies.ended_otherwise) or 0}, alive {zombies.alive}; "
            f"the slowest ended after {zombies.longest_end_s:.1f} s, "
            f"{zombies.longest_answered_s:.1f} s with the broker up",
            *(f"unexplained: {line}" for line in self.unexplained),
            *((self.recomputed,) if self.recomputed else ()),
            *(f"PROBLEM: {problem}" for problem in self.problems),
            f"chaos: {'nothing broke' if self.ok else 'not what was promised'}",
        )

    def _points(self) -> Sequence[str]:
        if not self.crash_points_armed:
            return ()
        reached = sum(self.crash_points.values())
        return (
            f"  crash points reached {reached} of {self.crash_points_armed}: "
            f"{_counts(self.crash_points)}",
        )


def machine() -> dict[str, object]:
    """What the numbers were taken on."""
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (info.read_text("utf-8").splitlines() if info.is_file() else ())
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count() or 0,
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _spreads(what: str, spreads: Mapping[str, Spread]) -> Sequence[str]:
    if not spreads:
        return ()
    return (f"{what}, median:", *(f"  {role:<8} {spread}" for role, spread in spreads.items()))

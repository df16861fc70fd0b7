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
    outcome: str
    steps: int
    step_target: int
    audit: Mapping[str, object]
    audit_line: str
    redone: Redone
    recovery: Mapping[str, Spread]  # from the death to the next committed work, by role
    zombies: Zombies
    unexplained: Sequence[str]  # ends that no fault accounts for
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
        points, others = _counts(self.crash_points), _counts(zombies.ended_otherwise)
        return (
            f"chaos, seed {self.seed}: {self.num_faults} of {self.faults_asked} faults in "
            f"{self.seconds:.0f} s, {self.processes_killed} processes killed",
            *(f"  {role:<8} {_counts(kinds)}" for role, kinds in self.faults.items()),
            *([f"  crash points reached: {points}"] if points else []),
            f"steps {self.steps} of {self.step_target}; {redone.steps} done again from the log in "
            f"{redone.times} restarts of the trainer, {redone.equal} weight hashes equal",
            self.audit_line,
            *(["from a kill to the next committed work, median:"] if self.recovery else []),
            *(f"  {role:<8} {spread}" for role, spread in self.recovery.items()),
            f"zombies woken {zombies.woken}: fenced {zombies.fenced}, ended otherwise "
            f"{others or 0}, alive {zombies.alive}",
            *(f"unexplained: {line}" for line in self.unexplained),
            *(f"PROBLEM: {problem}" for problem in self.problems),
            f"chaos: {'nothing broke' if self.ok else 'not what was promised'}",
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

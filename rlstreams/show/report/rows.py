"""Samples of a run as rows of a table: small numbers of each, no tokens. Pure queries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rlstreams.streams.samples.fold import Samples
from rlstreams.streams.samples.life import Sample

SORTED_BY = (
    "reward", "tokens", "version", "staleness", "mismatch", "duration", "step", "at_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Filter and order of rows."""

    sort: str = "at_ms"
    ascending: bool = False
    purpose: str = ""
    ended: str = ""
    step: int | None = None
    version: int | None = None
    reward_max: float | None = None

    def fits(self, row: Sample) -> bool:
        """Whether a row is wanted."""
        is_sampled = row.is_rolled_out or row.step is not None or row.mismatch is not None
        return (
            is_sampled
            and (not self.purpose or row.purpose == self.purpose)
            and (not self.ended or row.ended == self.ended)
            and (self.step is None or row.step == self.step)
            and (self.version is None or row.version == self.version)
            and (
                self.reward_max is None
                or (row.reward is not None and row.reward <= self.reward_max)
            )
        )


def of_step(samples: Samples, step: int) -> list[Sample]:
    """The batch of a step, in its order."""
    return sorted((s for s in samples if s.step == step), key=lambda sample: sample.place)


def find(samples: Samples, wanted: Wanted) -> list[Sample]:
    """Samples that fit, sorted; those without a value come last."""
    name = wanted.sort if wanted.sort in SORTED_BY else "at_ms"
    fitting = [sample for sample in samples if wanted.fits(sample)]
    known = [sample for sample in fitting if getattr(sample, name) is not None]
    known.sort(key=lambda sample: getattr(sample, name), reverse=not wanted.ascending)
    return known + [sample for sample in fitting if getattr(sample, name) is None]


def siblings(samples: Samples, group_id: str) -> list[Sample]:
    """A group's samples that were sampled, by number."""
    group = samples.groups.get(group_id)
    known = [] if group is None else [s for _, s in sorted(group.samples.items())]
    return [sample for sample in known if Wanted().fits(sample)]


def picks(samples: Samples) -> list[tuple[str, Sample]]:
    """Samples that a report shows: the two best, worst, longest and newest wrong ones.

    Trained samples where there are any, else held-out ones; each once.
    """
    rows = [row for row in samples if row.reward is not None]
    trained = [row for row in rows if row.step is not None]
    rows = sorted(trained or rows, key=lambda row: row.at_ms, reverse=True)
    best = sorted(rows, key=lambda row: -(row.reward or 0.0))
    longest = sorted(rows, key=lambda row: -(row.tokens or 0))
    wrong = [row for row in rows if (row.reward or 0.0) < 0.5]
    shown: dict[str, tuple[str, Sample]] = {}
    kinds = (
        ("best", best),
        ("newest wrong", wrong),
        ("worst", best[::-1]),
        ("longest", longest),
    )
    for label, ranked in kinds:
        fresh = [row for row in ranked if row.name not in shown]
        shown |= {row.name: (label, row) for row in fresh[:2]}
    return list(shown.values())


def newest_group(samples: Samples) -> list[Sample]:
    """Samples of one group of the newest step: of one with unlike rewards, if there is one."""
    last = max((row.step for row in samples if row.step is not None), default=0)
    groups: dict[str, list[Sample]] = {}
    for row in of_step(samples, last):
        groups.setdefault(row.group.id, []).append(row)
    unlike = [rows for rows in groups.values() if len({row.reward for row in rows}) > 1]
    return next(iter([*unlike, *groups.values()]), [])


def histogram(samples: Samples, steps: Sequence[int]) -> list[tuple[float, int]]:
    """Rewards of the samples that these steps trained, and how many there are of each."""
    among = set(steps)
    rewards = Counter(
        round(row.reward, 3) for row in samples if row.step in among and row.reward is not None
    )
    return sorted(rewards.items())

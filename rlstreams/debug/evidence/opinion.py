"""Another grader's rewards for recorded answers, and places where the graders differ most.

A grader that is wrong by its code agrees with its own log; only another grader can contradict it.
The other grader may be wrong too, for some answers: so the evidence is not that they differ, but
that they differ more in one place than in all others.

    gain:       2 log of how much likelier k of n answers here and K of N elsewhere are with a
                share of their own each than with one share (a likelihood-ratio test)
    stands out: the share here is the larger one, of two answers or more, and
                gain > SURE + 2 log of the places tried
    begins:     the step from which on the share differs most from that before, if it stands out

An answer counts once in a group, however often it was sampled: a grader that is wrong about it is
wrong each time. Two rewards differ if their numbers do. Where that holds for most samples, the
graders have other scales, and only the order within a group counts: a sample differs if the two
graders order it and another sample of its group the opposite way.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

from rlstreams.debug.evidence.rewards import CLOSE
from rlstreams.debug.rejudge.rejudge import Decode, Grader, rejudge
from rlstreams.debug.rerun.rebuilt import RerunError
from rlstreams.schemas.calls import REWARD
from rlstreams.schemas.events import SampleRef, Trajectory
from rlstreams.streams.log.group_ids import SampleId
from rlstreams.streams.run.run_log import RunLog
from rlstreams.streams.segments import sampled_segments
from rlstreams.words.texts import short
from rlstreams.workers.config.trainer import TrainerSection

T = TypeVar("T", int, str)
SURE = 6.0  # beside the places' term: chance alone exceeds the sum in one of 200 searches
KINDS = ("worker", "judged by", "ended by")
NOT_THERE = "the log does not hold its answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One trained sample with both graders' rewards."""

    name: SampleId
    step: int
    was: float  # its reward
    said: float  # the other grader's
    advantage: float  # that it was trained with
    text: str  # its last answer
    made: Mapping[str, str]  # by kind: the worker, grader or end that made it


@dataclass(frozen=True, slots=True, kw_only=True)
class DisagreementPlace:
    """A group, a worker, or the steps from one on: differing answers here and elsewhere."""

    kind: str
    name: str
    num: int
    of: int
    num_others: int
    of_others: int

    @property
    def gain(self) -> float:
        """The gain of the module's docstring; 0 if the share is not larger than elsewhere."""
        here, there = _likelihood(self.num, self.of), _likelihood(self.num_others, self.of_others)
        if self.num * self.of_others <= self.num_others * self.of:
            return 0.0
        whole = _likelihood(self.num + self.num_others, self.of + self.of_others)
        return 2 * (here + there - whole)


def _likelihood(num: int, of: int) -> float:
    return sum(k * math.log(k / of) for k in (num, of - num) if k)


def _standing_out(places: Sequence[DisagreementPlace]) -> list[DisagreementPlace]:
    border = SURE + 2 * math.log(max(1, len(places)))
    found = [place for place in places if place.gain > border and place.num > 1]
    return sorted(found, key=lambda place: -place.gain)


@dataclass(frozen=True)
class Opinion:
    """Another grader's rewards for the samples of some steps."""

    grader: str
    hash: str
    judged: Sequence[Judged]
    unjudged: Counter[str]  # number of samples, by reason

    @cached_property
    def has_other_scale(self) -> bool:
        """Whether only the order within a group can be compared."""
        apart = sum(abs(one.was - one.said) > CLOSE for one in self.judged)
        return 2 * apart > len(self.judged)

    @cached_property
    def differing(self) -> Sequence[Judged]:
        """Samples on which the graders differ; those that moved the weights most come first."""
        if self.has_other_scale:
            found = [one for own in self._groups.values() for one in _reordered(own)]
        else:
            found = [one for one in self.judged if abs(one.was - one.said) > CLOSE]
        return sorted(found, key=lambda one: -abs(one.advantage))

    @cached_property
    def groups(self) -> Sequence[DisagreementPlace]:
        """Groups that stand out, the surest first."""
        return _standing_out(self._places("group", lambda one: one.name.group_id))

    @cached_property
    def makers(self) -> Sequence[DisagreementPlace]:
        """Workers, graders and ends that stand out."""
        return [
            place
            for kind in KINDS
            for place in _standing_out(self._places(kind, partial(_maker, kind)))
        ]

    @cached_property
    def begins(self) -> DisagreementPlace | None:
        """The step from which on they differ more than before; None: no step is sure."""
        of, num = self._answers(lambda one: one.step)
        steps = sorted(of)
        places = [
            DisagreementPlace(
                kind="step", name=str(step),
                num=sum(num[s] for s in steps[at:]), of=sum(of[s] for s in steps[at:]),
                num_others=sum(num[s] for s in steps[:at]),
                of_others=sum(of[s] for s in steps[:at]),
            )
            for at, step in enumerate(steps)
            if at
        ]  # fmt: skip
        return next(iter(_standing_out(places)), None)

    def of_group(self, group: str) -> list[Judged]:
        """Return the group's samples on which the graders differ."""
        return [one for one in self.differing if one.name.group_id == group]

    @cached_property
    def _groups(self) -> Mapping[str, list[Judged]]:
        found: defaultdict[str, list[Judged]] = defaultdict(list)
        for one in self.judged:
            found[one.name.group_id].append(one)
        return found

    def _answers(self, place_of: Callable[[Judged], T]) -> tuple[Counter[T], Counter[T]]:
        """Return, by place, the number of different answers, and of those the graders differ on."""

        def counted(samples: Iterable[Judged]) -> Counter[T]:
            answers = {(place_of(one), one.name.group_id, one.text) for one in samples}
            return Counter(place for place, _, _ in answers)

        return counted(self.judged), counted(self.differing)

    def _places(self, kind: str, name_of: Callable[[Judged], str]) -> list[DisagreementPlace]:
        of, num = self._answers(name_of)
        return [
            DisagreementPlace(
                kind=kind, name=name, num=num[name], of=of[name],
                num_others=num.total() - num[name], of_others=of.total() - of[name],
            )
            for name in of
        ]  # fmt: skip


def _maker(kind: str, one: Judged) -> str:
    return one.made[kind]


def _reordered(group: Sequence[Judged]) -> Iterable[Judged]:
    """Return the samples that the two graders order differently against another of the group."""
    reordered: dict[SampleId, Judged] = {}
    for one, other in itertools.combinations(group, 2):
        if (one.was - other.was) * (one.said - other.said) < 0:
            reordered |= {one.name: one, other.name: other}
    return reordered.values()


def opinion(
    log: RunLog,
    grader: Grader,
    decode: Decode,
    by: TrainerSection,
    steps: range,
    say: Callable[[str], None] = lambda _: None,
) -> Opinion:
    """Have the trained samples of these steps judged by another grader.

    Args:
        decode: token ids to text, special tokens left out.

    Raises:
        RerunError: the log holds none of these steps.
        DeadlineError: a partition did not deliver up to its end.
    """
    trained: dict[SampleId, tuple[int, SampleRef]] = {
        SampleId.of(ref): (event.step, ref)
        for event in log.steps()
        if event.step in steps
        for ref in event.samples
    }
    if not trained:
        raise RerunError(f"the log holds no step from {steps.start} to {steps.stop - 1}")
    groups = frozenset(group for group, _ in trained)
    made = {
        SampleId.of(one.event): _made(one.event)
        for one in log.read(Trajectory, groups, skip_unreadable=True)
    }
    say(f"{grader.name} judges {len(trained):,} answers")
    said = {one.sample: one for one in rejudge(log, grader, decode, by, groups).outcomes}
    judged, unjudged = [], Counter[str]()
    for name, (step, ref) in trained.items():
        one = said.get(name)
        if one is None or name not in made:
            unjudged[NOT_THERE] += 1
        elif one.event.kind != REWARD:
            unjudged[f"no reward: {short(one.event.note)}"] += 1
        else:
            judged.append(Judged(
                name=name, step=step, was=ref.reward, said=one.event.reward,
                advantage=ref.advantage, text=one.text, made=made[name],
            ))  # fmt: skip
    return Opinion(grader.name, grader.hash, judged, unjudged)


def _made(event: Trajectory) -> Mapping[str, str]:
    own = sampled_segments(event)
    values = event.worker, event.judged_by[:12], own[-1].finish_reason if own else ""
    return dict(zip(KINDS, values, strict=True))

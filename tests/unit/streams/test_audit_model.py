"""Random broken logs: the audit says what a reference says that looks at all events at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.schemas.events import (
    ClosedGroups,
    DeadLetter,
    GroupsDropped,
    RedoDrifted,
    StepCompleted,
    TrainerStarted,
)
from rlstreams.streams.log.record import ID_HEADER, Partition
from tests.unit.streams.audit_log import Log
from tests.unit.streams.broken_log import LARGE, broken_log

Name = tuple[str, int]  # group and sample


def records(log: Log, topic: str) -> list[tuple[int, Name, Any]]:
    """Offset, sample and event (None: unreadable, but its header names the sample)."""
    found = []
    for offset, event in enumerate(log.topics[topic]):
        subject: Any = getattr(event, "trajectory", event)
        name, at = (subject.group_id, subject.sample), (topic, offset)
        if at in log.damaged:
            group, _, rest = log.damaged[at][1].get(ID_HEADER, b"").partition(b"/")
            name = group.decode(), int(rest[:1] or 0)
        if at not in log.hidden and name[0]:
            found.append((offset, name, None if at in log.damaged else event))
    return found


def is_training(group: str) -> bool:
    return group.isdigit() and str(int(group)) == group


class Reference:
    """Classes and breaches of samples, groups and steps, by their definitions."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.breaches: Counter[str] = Counter()
        self.classes: Counter[str] = Counter()
        self.records = {topic: records(log, topic) for topic in LARGE}
        self.first: dict[str, dict[Name, int]] = {topic: {} for topic in LARGE}
        for topic, of_topic in self.records.items():
            for offset, name, _ in sorted(of_topic, key=lambda found: found[2] is None):
                self.first[topic].setdefault(name, offset)  # those that can be read before others
        self.prompts, self.trajectories, self.scored = (self.first[topic] for topic in LARGE)
        self.trained: dict[Name, tuple[int, int, StepCompleted]] = {}  # offset, oldest version
        self.step_of: dict[str, int] = {}
        self.dropped: dict[str, str] = {}
        self.absent: dict[Name, str] = {}
        self.masked: set[tuple[Name, int]] = set()
        self.closed = ClosedGroups(watermark=0)
        self.trainer_at = 0
        self.fold_steps()
        self.letters = self.read_letters()
        for name in self.prompts:
            self.classes[self.class_of(name)] += 1
        for name, (offset, oldest, step) in self.trained.items():
            self.measure(name, offset, oldest, step)
        self.check_groups()
        self.check_closed_set()

    def fold_steps(self) -> None:
        epoch, last, version, hashes = 0, 0, -1, set[str]()
        for event in self.log.topics["steps"]:
            if isinstance(event, TrainerStarted) and event.epoch > epoch:
                epoch, version = event.epoch, max(version, event.policy_version)
            if isinstance(event, TrainerStarted) or getattr(event, "epoch", epoch) != epoch:
                continue
            if isinstance(event, GroupsDropped):
                self.closed = event.closed
                for group in event.groups:
                    self.close(group.group_id, reason=group.reason)
            elif isinstance(event, RedoDrifted):
                self.breaches["version chain"] += event.policy_version != version + 1
                version = event.policy_version
                hashes |= {event.actual_hash} if event.step == last else set()
            elif isinstance(event, StepCompleted) and event.step <= last:
                self.breaches["step twice"] += 1
            elif isinstance(event, StepCompleted):
                self.breaches["step missing"] += event.step != last + 1
                self.breaches["hash chain"] += last > 0 and event.previous_hash not in hashes
                self.breaches["version chain"] += event.policy_version != version + 1
                last, version, hashes = event.step, event.policy_version, {event.weight_hash}
                self.closed = event.closed
                self.trainer_at = max((p.offset for p in event.positions), default=0)
                self.take(event)

    def take(self, event: StepCompleted) -> None:
        groups = {ref.group_id for ref in event.samples if is_training(ref.group_id)}
        for group in groups:
            self.close(group, step=event.step)
        for ref in event.samples:
            name = ref.group_id, ref.sample
            if ref.group_id in groups and 0 <= ref.sample < 1 << 16:
                self.breaches["trained twice"] += name in self.trained
                self.trained.setdefault(name, (ref.offset, ref.oldest_policy_version, event))
        self.absent |= {
            (a.group_id, a.sample): a.reason for a in event.absent if a.group_id in groups
        }
        self.masked |= {
            ((m.group_id, m.sample), m.segment) for m in event.masked if m.group_id in groups
        }

    def close(self, group: str, *, step: int = 0, reason: str = "") -> None:
        was_trained, was_dropped = group in self.step_of, group in self.dropped
        both = (was_trained and not step) or (was_dropped and not was_trained and bool(step))
        self.breaches["trained and dropped"] += both
        self.breaches["closed twice"] += (was_trained or was_dropped) and not both
        if step:
            self.step_of.setdefault(group, step)
        elif not was_trained:
            self.dropped.setdefault(group, reason)

    def read_letters(self) -> dict[Name, set[tuple[str, int]]]:
        found: dict[Name, set[tuple[str, int]]] = {}
        for letter in self.log.topics["dead-letters"]:
            assert isinstance(letter, DeadLetter)
            origin = letter.origin_topic, letter.origin_offset
            names = [(letter.group_id, letter.sample)]
            if not letter.group_id:
                names = [n for n, at in self.first[origin[0]].items() if at == origin[1]]
            for name in names:
                found.setdefault(name, set()).add(origin)
        return found

    def class_of(self, name: Name) -> str:  # noqa: PLR0911 - one for each class
        group, log = name[0], self.log
        if name in self.trained:
            made_of = {t: self.first[t].get(name, -1) for t in LARGE[:2]}
            made_of[LARGE[2]] = self.trained[name][0]
            about = [made_of[t] in (at, -1) for t, at in self.letters.get(name, ())]
            self.breaches["trained and dead-lettered"] += any(about)
            return "trained"
        if name in self.letters:
            return "dead-lettered"
        if group in self.step_of and self.absent.get(name):
            return "dropped"
        if group in self.dropped and group not in self.step_of:
            return "dropped"
        if group not in self.step_of:
            if not is_training(group) and name in self.trajectories:
                return "evaluated"
            if self.prompts[name] not in log.rollout_done:
                return "in flight"
            if name in self.trajectories and self.trajectories[name] not in log.logprob_done:
                return "in flight"
            if is_training(group) and self.scored.get(name, -1) >= self.trainer_at:
                return "in flight"
            is_gone = any(p.topic == "trajectories" for p in log.expired)
            if not is_training(group) and name not in self.scored and is_gone:
                return "expired"
        self.breaches["lost"] += 1
        return "lost"

    def measure(self, name: Name, offset: int, oldest: int, step: StepCompleted) -> None:
        base = step.policy_version - 1
        held = [e for at, n, e in self.records[LARGE[2]] if (at, n) == (offset, name) and e]
        if held:
            versions = [
                segment.policy_version
                for index, segment in enumerate(held[0].trajectory.segments)
                if segment.author == "policy" and (name, index) not in self.masked
            ]
            self.breaches["too stale"] += sum(not 0 <= base - v <= 1 for v in versions)
            self.breaches["mislabelled"] += bool(versions) and min(versions) != oldest
        elif offset < self.log.expired.get(Partition(LARGE[2], 0), 0):
            self.breaches["too stale"] += oldest != -1 and not 0 <= base - oldest <= 1
        else:
            self.breaches["unknown position"] += 1

    def check_groups(self) -> None:
        sizes: dict[str, int] = {}
        for offset, name, event in self.records["prompts"]:
            if event and self.prompts[name] == offset:
                sizes.setdefault(name[0], event.group_size)
        read = (name for topic in LARGE[1:] for _, name, event in self.records[topic] if event)
        recorded = {*read, *self.letters}
        for group, size in sizes.items():
            missing = {(group, n) for n in range(size)} - set(self.prompts)
            is_short = sum(name[0] == group for name in self.prompts) < size
            self.breaches["missing sample"] += len(missing) if is_short else 0
        orphans = [n for n in recorded - set(self.prompts) if n[1] >= sizes.get(n[0], 0)]
        closed = {*self.step_of, *self.dropped} - set(sizes) - {name[0] for name in recorded}
        self.breaches["never issued"] += len(orphans) + len(closed)
        numbers = {int(group) for group in sizes if is_training(group)}
        self.breaches["missing group"] += max(numbers, default=-1) + 1 - len(numbers)

    def check_closed_set(self) -> None:
        closed = {int(group) for group in (*self.step_of, *self.dropped)}
        watermark, above = self.closed.watermark, set(self.closed.above)
        high = {number for number in closed if number >= watermark}
        wrong = len(above ^ high) + len(set(range(watermark)) - closed)
        self.breaches["closed set"] += wrong


JUDGED = {
    "closed set", "closed twice", "hash chain", "lost", "mislabelled", "missing group",
    "missing sample", "never issued", "step missing", "step twice", "too stale",
    "trained and dead-lettered", "trained and dropped", "trained twice", "unknown position",
    "version chain",
}  # fmt: skip


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=150)
def test_a_broken_log_is_judged_as_a_reference_judges_it(seed: int) -> None:
    """Each sample's class and each breach, whichever topic is read first."""
    log = broken_log(seed)
    report, reference = log.report(), Reference(log)
    assert report == replace(log.report(steps_last=True), breaches=report.breaches)
    found = {kind: n for kind, n in report.breach_counts.items() if kind in JUDGED}
    assert found == dict(+reference.breaches)
    classes = {
        "trained": report.trained,
        "dead-lettered": report.dead_lettered,
        "dropped": sum(report.dropped.values()),
        "evaluated": report.evaluated,
        "in flight": sum(report.in_flight.values()),
        "expired": report.expired,
        "lost": report.lost,
    }
    assert {name: n for name, n in classes.items() if n} == dict(reference.classes)

"""The pure core of the audit: records in, the place of every issued sample out.

In flight is proven, never the remainder: the rollout group has not committed past the prompt, or
the log-prob group has not committed past the trajectory, or the scored record lies at or above the
position that the trainer recorded with its last step, in a group that is still open. A sample that
none of this and no ending explains is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from schemas.events import (
    EVALUATE,
    DeadLetter,
    Event,
    PolicyLoaded,
    Prompt,
    ScoredTrajectory,
    Segment,
    Trajectory,
)
from streams.audit_ledger import Ledger, Use
from streams.audit_report import AuditReport, Breaches, BreachKind
from streams.record import ID_HEADER, Partition, Position, RawRecord
from streams.topics import PROMPTS, SCORED, STEPS, TRAJECTORIES
from streams.view_evaluation import evaluation_id

Covered = Callable[[Partition, int], bool]
"""Whether a consumer group has committed that it is done with this offset."""

MAX_SAMPLES = 65_536  # of one group; a larger number is a foreign record

# What is known of a sample, one byte each.
_ISSUED = 1
_PROMPT_DONE = 2  # the rollout group has committed past it
_ROLLED_OUT = 4
_ROLLED_OUT_DONE = 8  # the log-prob group has committed past it
_SCORED = 16
_SCORED_WAITS = 32  # at or above the trainer's recorded position
_DEAD = 64
_OF_TOPIC = {PROMPTS.name: _ISSUED, TRAJECTORIES.name: _ROLLED_OUT, SCORED.name: _SCORED}


class AuditFold:
    """Takes the records of a run: first all of `steps`, then the other topics in any order.

    Args:
        rollout_covers: positions of the group `rollout`, read before any topic.
        logprob_covers: positions of the group `logprob`, likewise.
        expired: first offset left by retention, for partitions where that is not 0.
    """

    def __init__(
        self,
        *,
        rollout_covers: Covered,
        logprob_covers: Covered,
        expired: Mapping[Partition, int] | None = None,
    ) -> None:
        self._rollout_covers = rollout_covers
        self._logprob_covers = logprob_covers
        self._expired = expired or {}
        self._breaches = Breaches()
        self._ledger = Ledger(self._breaches)
        self._groups: dict[str, bytearray] = {}
        self._sizes: dict[str, int] = {}
        self._dead_origins: set[Position] = set()
        self._loads: dict[tuple[str, str], tuple[int, str]] = {}
        # (worker, load, version, hash) -> the first sample that names it
        self._named_loads: dict[tuple[str, str, int, str], str] = {}
        self._staleness: Counter[int] = Counter()
        self._newest_group = -1
        self._dense_up_to: int | None = None
        self._ledger_is_read = False
        self._num_duplicates = 0
        self._num_unreadable = 0

    def apply(self, event: Event, position: Position) -> None:
        """Take one event and where it lies; those that prove nothing are passed by.

        Raises:
            ValueError: an event of `steps` after one of another topic.
        """
        if position.topic == STEPS.name:
            if self._ledger_is_read:
                raise ValueError(f"{position}: `steps` is folded before every other topic")
            self._ledger.apply(event)
            return
        self._ledger_is_read = True
        if isinstance(event, Prompt):
            self._prompt(event, position)
        elif isinstance(event, Trajectory):
            self._trajectory(event, position)
        elif isinstance(event, ScoredTrajectory):
            self._scored(event, position)
        elif isinstance(event, DeadLetter):
            self._dead(event)
        elif isinstance(event, PolicyLoaded):
            held = (event.policy_version, event.weight_hash)
            self._loads[(event.worker, event.load_id)] = held

    def unreadable(self, raw: RawRecord) -> None:
        """Take a record that cannot be decoded; its header may still say which sample it is."""
        self._num_unreadable += 1
        group_id, _, rest = raw.headers.get(ID_HEADER, b"").decode(errors="replace").partition("/")
        sample = rest.partition("/")[0]
        if raw.position.topic in _OF_TOPIC and group_id and sample.isdecimal():
            self._note(group_id, int(sample), raw.position)

    def mark_issued(self) -> None:
        """Every group up to the newest one so far must have been seen when the report is made."""
        self._dense_up_to = self._newest_group

    def _prompt(self, event: Prompt, position: Position) -> None:
        if event.group_id.isdecimal():
            self._newest_group = max(self._newest_group, int(event.group_id))
        elif event.purpose != EVALUATE or evaluation_id(event.group_id) is None:
            self._breaches.add(BreachKind.BAD_ID, event.group_id, f"prompt at {position}")
            return
        if self._note(event.group_id, event.sample, position):
            self._sizes.setdefault(event.group_id, event.group_size)

    def _trajectory(self, event: Trajectory, position: Position) -> None:
        if not self._note(event.group_id, event.sample, position):
            return
        for segment in _sampled(event):
            key = (event.worker, segment.load_id, segment.policy_version, segment.weight_hash)
            self._named_loads.setdefault(key, f"{event.group_id}/{event.sample}")

    def _scored(self, event: ScoredTrajectory, position: Position) -> None:
        trajectory = event.trajectory
        self._note(trajectory.group_id, trajectory.sample, position)
        use = self._ledger.uses.get((position.partition, position.offset))
        if use is None:
            return
        if (use.group_id, use.sample) != (trajectory.group_id, trajectory.sample):
            name = f"{use.group_id}/{use.sample}"
            detail = f"step {use.step}: {position} holds {trajectory.group_id}/{trajectory.sample}"
            self._breaches.add(BreachKind.UNKNOWN_POSITION, name, detail)
        else:
            self._measure(use, trajectory)
        del self._ledger.uses[(position.partition, position.offset)]

    def _measure(self, use: Use, trajectory: Trajectory) -> None:
        name = f"{use.group_id}/{use.sample}"
        versions: list[int] = []
        for index, segment in enumerate(trajectory.segments):
            if segment.author == "policy" and index not in use.masked:
                versions.append(segment.policy_version)
                staleness = use.base_version - segment.policy_version
                self._staleness[staleness] += len(segment.token_ids)
                if _is_outside(staleness, use.bound):
                    detail = (
                        f"step {use.step}, segment {index}: version {segment.policy_version} "
                        f"trained on {use.base_version}, bound {use.bound}"
                    )
                    self._breaches.add(BreachKind.TOO_STALE, name, detail)
        if versions and min(versions) != use.oldest_version:
            detail = f"step {use.step} says version {use.oldest_version}, tokens {min(versions)}"
            self._breaches.add(BreachKind.MISLABELLED, name, detail)

    def _dead(self, event: DeadLetter) -> None:
        if event.group_id and event.sample >= 0:
            flags = self._flags(event.group_id, event.sample)
            if flags is not None:
                flags[event.sample] |= _DEAD
        self._dead_origins.add(
            Position(event.origin_topic, event.origin_partition, event.origin_offset)
        )

    def _note(self, group_id: str, sample: int, position: Position) -> bool:
        """Note that a record of the sample exists; False for all but the first of its topic."""
        flags = self._flags(group_id, sample)
        if flags is None:
            return False
        seen = _OF_TOPIC[position.topic]
        if flags[sample] & seen:
            self._num_duplicates += 1
            return False
        flags[sample] |= seen | self._reached(position)
        if position in self._dead_origins:
            flags[sample] |= _DEAD
        return True

    def _reached(self, position: Position) -> int:
        """Whether the reader of this position is done with it, or still has it ahead."""
        partition = Partition(position.topic, position.partition)
        if position.topic == PROMPTS.name:
            return _PROMPT_DONE * self._rollout_covers(partition, position.offset)
        if position.topic == TRAJECTORIES.name:
            return _ROLLED_OUT_DONE * self._logprob_covers(partition, position.offset)
        recorded = self._ledger.positions.get(position.partition, 0)
        return _SCORED_WAITS * (position.offset >= recorded)

    def _flags(self, group_id: str, sample: int) -> bytearray | None:
        if not 0 <= sample < MAX_SAMPLES:
            self._breaches.add(BreachKind.BAD_ID, f"{group_id}/{sample}", "sample out of range")
            return None
        flags = self._groups.setdefault(group_id, bytearray())
        if len(flags) <= sample:
            flags.extend(bytes(sample + 1 - len(flags)))
        return flags

    def report(self) -> AuditReport:
        """Where every sample is by now; may be called again after more records."""
        breaches = self._breaches.copy()
        classes: Counter[tuple[str, str]] = Counter()
        for group_id, sample, flags in self._issued():
            kind, which = self._classify(group_id, sample, flags)
            classes[(kind, which)] += 1
            name = f"{group_id}/{sample}"
            if kind == "lost":
                breaches.add(BreachKind.LOST, name, which)
            elif kind == "trained" and flags & _DEAD:
                breaches.add(BreachKind.TRAINED_AND_DEAD, name, "a sample ends once")
        self._check_issue(breaches)
        self._check_loads(breaches)
        num_unproven = self._check_positions(breaches)
        self._ledger.check_closed_set(breaches)
        return self._report(classes, breaches, num_unproven)

    def _issued(self) -> Iterator[tuple[str, int, int]]:
        for group_id, samples in self._groups.items():
            for sample, flags in enumerate(samples):
                if flags & _ISSUED:
                    yield group_id, sample, flags

    def _classify(self, group_id: str, sample: int, flags: int) -> tuple[str, str]:
        """Class, and within it reason, role or where the trail ends."""
        ledger = self._ledger
        ending = ("", "")
        if ledger.is_trained(group_id, sample):
            ending = ("trained", "")
        elif flags & _DEAD:
            ending = ("dead", "")
        elif group_id in ledger.trained_step:
            reason = ledger.absent.get(group_id, {}).get(sample)
            step = ledger.trained_step[group_id]
            unnamed = ("lost", f"its group was trained in step {step} without it, no reason given")
            ending = ("dropped", reason) if reason else unnamed
        elif group_id in ledger.dropped:
            ending = ("dropped", ledger.dropped[group_id])
        elif not group_id.isdecimal() and flags & _ROLLED_OUT:
            ending = ("evaluated", "")
        elif not flags & _PROMPT_DONE:
            ending = ("in flight", "rollout")
        elif flags & _ROLLED_OUT and not flags & _ROLLED_OUT_DONE:
            ending = ("in flight", "logprob")
        elif flags & _SCORED_WAITS:
            ending = ("in flight", "trainer")
        return ending if ending[0] else self._explain_loss(group_id, flags)

    def _explain_loss(self, group_id: str, flags: int) -> tuple[str, str]:
        if flags & _SCORED:
            return "lost", "scored, below the trainer's positions, its group open"
        if flags & _ROLLED_OUT:
            return "lost", "rolled out, log-prob worker is past it, no score"
        if not group_id.isdecimal() and any(p.topic == TRAJECTORIES.name for p in self._expired):
            return "expired", ""
        return "lost", "issued, rollout worker is past it, no trajectory"

    def _check_issue(self, breaches: Breaches) -> None:
        up_to = self._newest_group if self._dense_up_to is None else self._dense_up_to
        for number in range(up_to + 1):
            if str(number) not in self._sizes:
                breaches.add(BreachKind.MISSING_GROUP, str(number), f"groups reach {up_to}")
        for group_id, size in self._sizes.items():
            for sample in range(size):
                flags = self._groups[group_id]
                if sample >= len(flags) or not flags[sample] & _ISSUED:
                    detail = f"group of {size}, this one was never issued"
                    breaches.add(BreachKind.MISSING_SAMPLE, f"{group_id}/{sample}", detail)
        for group_id, samples in self._groups.items():
            for sample, flag in enumerate(samples):
                if flag and not flag & _ISSUED and group_id not in self._sizes:
                    name = f"{group_id}/{sample}"
                    breaches.add(BreachKind.NEVER_ISSUED, name, "records, but no prompt")
        for group_id in (*self._ledger.trained_step, *self._ledger.dropped):
            if group_id not in self._groups:
                breaches.add(BreachKind.NEVER_ISSUED, group_id, "closed, but no prompt")

    def _check_loads(self, breaches: Breaches) -> None:
        for (worker, load_id, version, weight_hash), name in self._named_loads.items():
            held = self._loads.get((worker, load_id))
            if held == (version, weight_hash):
                continue
            says = "never confirmed" if held is None else f"confirmed as version {held[0]}"
            detail = f"first use of load {load_id!r} (version {version}) of {worker}, {says}"
            breaches.add(BreachKind.UNKNOWN_LOAD, name, detail)

    def _check_positions(self, breaches: Breaches) -> int:
        """Trained samples whose record was not seen; returns how many retention explains."""
        num_unproven = 0
        for (partition, offset), use in self._ledger.uses.items():
            name = f"{use.group_id}/{use.sample}"
            if offset < self._expired.get(Partition(SCORED.name, partition), 0):
                num_unproven += 1
                if _is_outside(use.base_version - use.oldest_version, use.bound):
                    detail = f"step {use.step}: version {use.oldest_version}, bound {use.bound}"
                    breaches.add(BreachKind.TOO_STALE, name, detail)
            else:
                detail = f"step {use.step}: nothing at {Position(SCORED.name, partition, offset)}"
                breaches.add(BreachKind.UNKNOWN_POSITION, name, detail)
        return num_unproven

    def _report(
        self, classes: Counter[tuple[str, str]], breaches: Breaches, num_unproven: int
    ) -> AuditReport:
        ledger = self._ledger
        return AuditReport(
            run=ledger.run,
            steps=ledger.last_step,
            policy_version=ledger.policy_version,
            issued=sum(classes.values()),
            trained=_sum(classes, "trained"),
            evaluated=_sum(classes, "evaluated"),
            dead_lettered=_sum(classes, "dead"),
            lost=_sum(classes, "lost"),
            dropped=_by(classes, "dropped"),
            in_flight=_by(classes, "in flight"),
            expired=_sum(classes, "expired"),
            trained_twice=ledger.num_trained_twice,
            staleness=dict(self._staleness),
            max_staleness=ledger.bound,
            masked_segments=ledger.num_masked,
            unproven=num_unproven,
            duplicates=self._num_duplicates,
            void=ledger.num_void,
            unreadable=self._num_unreadable,
            breaches=tuple(breaches.kept),
            breach_counts=dict(breaches.counts),
        )


def _sampled(trajectory: Trajectory) -> Iterator[Segment]:
    return (segment for segment in trajectory.segments if segment.author == "policy")


def _is_outside(staleness: int, bound: int | None) -> bool:
    return staleness < 0 or (bound is not None and staleness > bound)


def _sum(classes: Counter[tuple[str, str]], kind: str) -> int:
    return sum(count for (name, _), count in classes.items() if name == kind)


def _by(classes: Counter[tuple[str, str]], kind: str) -> dict[str, int]:
    return {which: count for (name, which), count in sorted(classes.items()) if name == kind}

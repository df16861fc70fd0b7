"""Diagnosis: which stage blocks the next step, and the sentence that names the culprit. Pure.

Samples move downstream: prompts, rollout, logprob, trainer; weights move the other way. The first
stage, from upstream, that has had work and made no progress within its limit is the blocked one:
the stages after it merely starve. A worker that is alive and reports that it is working has until
the deadline of its current work, and the time of a restart: its own watchdog acts first. A silent
one has no such allowance. After the last step only the trainer has work: its checkpoint, and the
last version's pulls. For a caller that does not read the samples' topics, reports alone decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlstreams.streams.log.done_set import covered
from rlstreams.streams.log.record import NO_PLACE, Committed, Partition, position_at
from rlstreams.streams.log.roles import STAGES
from rlstreams.streams.log.text import counted
from rlstreams.streams.log.topics import PROMPTS, TRAJECTORIES, Topic
from rlstreams.streams.samples.life import Sample
from rlstreams.streams.views.folds import Folds
from rlstreams.streams.workers import SILENT_S, STARTING, Life

START_S = 600.0  # time to load a large model, in which a role counts as starting
RESTART_S = 15.0  # time for the restart of a role that ended itself, before it is blamed
_IDLE = ("waiting", "stopped")
_NAMED = 3  # workers and groups that a sentence lists


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLimits:
    """Expectations of a run, and the times after which a stage counts as blocked, in seconds."""

    groups_per_step: int
    stall_s: float
    sample_s: float = 0.0  # a rollout worker's own deadline for one sample, all attempts
    pull_s: float = 0.0  # for one pull of weights
    save_s: float = 0.0  # for one checkpoint
    shifts_s: float = 0.0  # for the other roles' shifts on a shared device
    start_s: float = START_S

    def own(self, role: str, state: str) -> float | None:
        """Return the time without progress after which a worker ends itself; None: never.

        `stall_s` is for work without a deadline: a scored window, a step with its publication.
        """
        limits_s = {
            "working": self.sample_s if role == "rollout" else 0.0,
            "pulling": self.pull_s,
            "saving": self.save_s,
        }
        is_limited = self.stall_s > 0 and state in limits_s
        return max(self.stall_s, limits_s[state]) if is_limited else None

    def of(self, worker: Life) -> float:
        """Return the time that others wait for a worker in the state that it reports."""
        if worker.state == "offloaded":  # another role has its device: `up` watches the holder
            return self.shifts_s + max(self.stall_s, self.start_s)
        if (own_s := self.own(worker.role, worker.state)) is not None:
            return own_s + RESTART_S
        return max(self.stall_s, self.start_s) if worker.state in STARTING else self.stall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockingTransaction:
    """An open transaction. Records after it in its partitions cannot be read yet."""

    worker: str  # `{role}-{ordinal}`, from its transactional id; "": no worker of ours
    transactional_id: str
    partitions: tuple[str, ...]
    age_s: float  # since its last write


@dataclass(frozen=True, slots=True, kw_only=True)
class StallFacts:
    """Facts that are not in the topics' events."""

    now_ms: int  # wall clock, for the times of samples and pulls; workers' are by the fold's clock
    waited_s: float  # since the last step or the start, without times that do not count
    # By group ("rollout", "logprob"); a group is missing where the broker did not answer.
    committed: Mapping[str, Mapping[Partition, Committed]] = field(default_factory=dict)
    held: tuple[BlockingTransaction, ...] = ()
    gone: frozenset[str] = frozenset()  # workers without a process, by their supervisor
    # By worker named newest process has not reported yet: seconds since its start, 0 while it is
    # about to be started. Earlier reports are a predecessor's.
    starting_s: Mapping[str, float] = field(default_factory=dict)
    has_samples: bool = True  # False: prompts and trajectories were not read
    since_ms: int = 0  # by the fold's clock: the time before is not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """The first blocked stage."""

    hop: str  # the stage: "broker", "prompts", "rollout", "logprob", "weights" or "trainer"
    workers: tuple[str, ...]  # the culprits, the worst first
    sentence: str
    is_overdue: bool  # False: its own deadline is still to come
    is_unfed: bool = False  # all its workers wait, although their topic has records for them


class Inquiry:
    """One diagnosis of a state. `first` asks the stages in order."""

    def __init__(self, state: Folds, evidence: StallFacts, limits: StallLimits) -> None:
        self._state = state
        self._evidence = evidence
        self._limits = limits

    def first(self) -> Blocked | None:
        """Return the first blocked stage; None: every stage that has work moves."""
        steps: tuple[Callable[[], Blocked | None], ...] = (
            self._held,
            self._broker,
            self._claim,
            self._prompts,
            self._rollout,
            self._logprob,
            self._trainer,
        )
        if not self._evidence.has_samples:
            steps = (self._by_reports,)
        elif self._state.ledger.at_target:
            steps = (self._held, self._broker, self._end)
        return next((found for step in steps if (found := step()) is not None), None)

    def _by_reports(self) -> Blocked | None:
        """Return the first role without workers, or with a busy one while all are overdue."""
        for role in STAGES:
            workers = self._worst_first(role)
            is_busy = any(self._is_silent(w) or w.state not in _IDLE for w in workers)
            if not workers or (is_busy and all(map(self._is_overdue, workers))):
                names = tuple(worker.worker for worker in workers)
                return Blocked(hop=role, workers=names, sentence=self.told(role), is_overdue=True)
        return None

    def _held(self) -> Blocked | None:
        """Return the stage of a stuck transaction: a commit takes well under a second.

        Checked first, because it also hides other stages: readers cannot see the records behind it.
        """
        old = [held for held in self._evidence.held if held.age_s > SILENT_S]
        if not old:
            return None
        held = max(old, key=lambda it: it.age_s)
        who = held.worker or f"the unknown transactional id {held.transactional_id!r}"
        return Blocked(
            hop=held.worker.rpartition("-")[0] or "broker",
            workers=(held.worker,) if held.worker else (),
            sentence=f"{who} has had a transaction open for {held.age_s:.0f} s, which "
            f"blocks every reader of {', '.join(held.partitions)}",
            is_overdue=True,
        )

    def _broker(self) -> Blocked | None:
        running = [w for w in self._state.workers.all if not self._is_starting(w)]
        silent_s = self._stood_s(max((worker.heard_ms for worker in running), default=0))
        is_silence = silent_s > SILENT_S and len(running) > 1
        if not is_silence or self._evidence.gone:
            return None
        return Blocked(
            hop="broker",
            workers=(),
            sentence=f"no worker has reported for {silent_s:.0f} s: the broker does not accept or "
            "deliver records",
            is_overdue=True,
        )

    def _claim(self) -> Blocked | None:
        ledger = self._state.ledger
        if ledger.claim is None:
            return self._blame("trainer", "the trainer has not claimed the run")
        if ledger.policy_version not in self._state.published:
            text = f"policy version {ledger.policy_version} was made but not published"
            return self._blame("trainer", text, hop="weights")
        return None

    def _prompts(self) -> Blocked | None:
        size = max(1, self._state.samples.group_size)
        sizes = Counter(sample.group.number for sample in self._state.samples.open)
        whole = sum(count >= size for count in sizes.values())
        if whole >= self._limits.groups_per_step:
            return None
        torn = [group for group, count in sizes.items() if count < size]
        last = self._state.samples.last_group
        text = f"{whole} whole groups are open, a step needs {self._limits.groups_per_step}; "
        text += f"the last one is {last}" if last >= 0 else "none ever"
        if torn:
            text += f"; group {torn[0]} has {sizes[torn[0]]} of {size} samples"
        return self._blame("prompts", text)

    def _rollout(self) -> Blocked | None:
        left = [s for s in self._state.samples.open if not (s.is_rolled_out or s.is_dead)]
        if not left:
            return None
        first, age_s = left[0], self._age_s(left[0].issued_at_ms)
        where = f"{first.name}{_at(PROMPTS, first.prompt)}, issued {age_s:.0f} s ago"
        text = f"{_trajectories(left)} missing: {where}{_and_more(left)}"
        if self._is_past("rollout", PROMPTS, first.prompt):
            text += "; the group's position lies behind it: another client moved it, set it back"
        wanted = min(sample.min_policy_version for sample in left)
        return self._blame("rollout", text, wanted=wanted)

    def _logprob(self) -> Blocked | None:
        known = self._evidence.committed.get("logprob")
        alive = (s for s in self._state.samples.open if s.is_rolled_out and not s.is_dead)
        left = [s for s in alive if not self._is_past("logprob", TRAJECTORIES, s.trajectory)]
        # Without the group's positions a sample's role is unknown: a working trainer has them.
        if not left or (known is None and self._trainer_works()):
            return None
        first, age_s = left[0], self._age_s(left[0].at_ms)
        where = f"{first.name}{_at(TRAJECTORIES, first.trajectory)}, "
        where += f"finished {age_s:.0f} s ago by {first.worker}"
        text = f"{_trajectories(left)} unscored: {where}{_and_more(left)}"
        return self._blame("logprob", text)

    def _trainer(self) -> Blocked | None:
        """Blame the trainer if its step is due: enough groups are complete, or it reports work."""
        known = self._evidence.committed.get("logprob")
        sizes: Counter[int] = Counter()
        for s in self._state.samples.open:
            is_past = known is None or self._is_past("logprob", TRAJECTORIES, s.trajectory)
            sizes[s.group.number or 0] += (s.is_rolled_out and is_past) or s.is_dead
        complete = [
            group for group, count in sizes.items() if count >= self._state.samples.group_size
        ]
        if len(complete) < self._limits.groups_per_step and not self._trainer_works():
            return None
        text = f"step {self._state.ledger.last_step + 1} has not run, although every sample of "
        text += counted(len(complete), "open group")
        text += f" ({_range(complete)})" if complete else ""
        return self._blame("trainer", f"{text} is scored or dead-lettered")

    def _end(self) -> Blocked | None:
        """Blame the trainer after the last step: other roles only serve the last evaluation."""
        starting, trainers = self._evidence.starting_s, self._state.workers.of("trainer")
        if any(w.state == "stopped" and w.worker not in starting for w in trainers):
            return None
        return self._blame(
            "trainer", f"all {self._state.ledger.last_step} steps are done, and it has not ended"
        )

    def _blame(self, role: str, text: str, *, hop: str = "", wanted: int = -1) -> Blocked | None:
        """Return the stage with its workers, worst first; None if one has made progress lately."""
        workers = self._worst_first(role)
        if not workers:
            said = f"no {role} worker has ever reported"
            starting_s = self._evidence.starting_s.items()
            ages_s = [age_s for worker, age_s in starting_s if worker.rpartition("-")[0] == role]
            return Blocked(
                hop=hop or role,
                workers=(),
                sentence=f"{said}; {text}",
                is_overdue=min(ages_s, default=self._evidence.waited_s) >= self._limits.start_s,
            )
        if any(self._moves(worker) for worker in workers):
            return None
        waits = [worker for worker in workers if self._awaits_weights(worker, wanted)]
        if role != "trainer" and waits and len(waits) == len(workers):
            return self._blame_weights(text, waits)
        waiting = [w for w in workers if w.state == "waiting" and not self._is_silent(w)]
        return Blocked(
            hop=hop or role,
            workers=tuple(worker.worker for worker in workers),
            sentence=f"{self._describe(workers)}; {text}",
            is_overdue=all(self._is_overdue(worker) for worker in workers),
            is_unfed=role in ("rollout", "logprob") and len(waiting) == len(workers),
        )

    def _blame_weights(self, text: str, waits: Sequence[Life]) -> Blocked:
        trainers = self._state.workers.of("trainer")
        served = f"; it is served by {self._describe(trainers)}" if trainers else ""
        return Blocked(
            hop="weights",
            workers=tuple(worker.worker for worker in (*waits, *trainers)),
            sentence=f"{self._describe(waits)}{served}; {text}",
            is_overdue=all(self._is_overdue(worker) for worker in waits),
        )

    def _awaits_weights(self, worker: Life, wanted: int) -> bool:
        """Whether a worker is alive and waits for a pull, or for a version that it has not."""
        is_silent = self._is_silent(worker) or self._is_starting(worker)
        if is_silent or worker.state == "working":
            return False
        return worker.worker in self._state.workers.pulling or worker.policy_version < wanted

    def _moves(self, worker: Life) -> bool:
        """Whether a worker made progress within the limit, and still reports."""
        return not self._is_silent(worker) and self._stood_s(worker.moved_ms) < self._limits.stall_s

    def _is_starting(self, worker: Life) -> bool:
        """Whether a new process of a worker was started, and still has time to load."""
        starting_s = self._evidence.starting_s.get(worker.worker)
        return starting_s is not None and starting_s < self._limits.start_s

    def _is_silent(self, worker: Life) -> bool:
        if self._is_starting(worker):
            return False
        is_old = self._stood_s(worker.heard_ms) > SILENT_S
        return is_old or worker.worker in self._evidence.gone or worker.state == "stopped"

    def _is_overdue(self, worker: Life) -> bool:
        if self._is_starting(worker):
            return False
        limit_s = self._limits.of(worker)
        is_pulled_from = self._state.ledger.at_target and worker.role == "trainer"
        if (
            worker.worker in self._state.workers.pulling or is_pulled_from
        ) and worker.state != "working":
            limit_s = max(limit_s, self._limits.pull_s)
        # No counter grows while a checkpoint is written, and the time before is none of its time.
        since_ms = max(worker.moved_ms, worker.since_ms * (worker.state == "saving"))
        stood_s = self._stood_s(max(since_ms, self._evidence.since_ms))
        return self._is_silent(worker) or stood_s >= limit_s

    def told(self, role: str) -> str:
        """See `told`."""
        return self._describe(self._worst_first(role)) or f"no {role} worker has ever reported"

    def _worst_first(self, role: str) -> Sequence[Life]:
        return sorted(self._state.workers.asked(role, self._evidence.starting_s), key=self._badness)

    def _badness(self, worker: Life) -> tuple[bool, int, str]:
        return (not self._is_silent(worker), worker.moved_ms, worker.worker)

    def _describe(self, workers: Sequence[Life]) -> str:
        texts = [self._about(worker) for worker in workers[:_NAMED]]
        if len(workers) > _NAMED:
            texts.append(f"and {len(workers) - _NAMED} more")
        return ", ".join(texts)

    def _about(self, worker: Life) -> str:
        """Return a text on a worker: dead, silent, or its state, last progress and pull."""
        said = " ".join(filter(None, (worker.state, worker.detail)))
        if self._is_starting(worker):
            starting_s = self._evidence.starting_s[worker.worker]
            return f"{worker.worker} was started {starting_s:.0f} s ago and has not reported yet"
        if worker.worker in self._evidence.gone:
            return f"{worker.worker} is not running (last reported: {said})"
        if self._is_silent(worker):
            silent_s = self._stood_s(worker.heard_ms)
            return f"no report from {worker.worker} for {silent_s:.0f} s (last reported: {said})"
        stood_s = self._stood_s(worker.moved_ms)
        text = f"{worker.worker} says {said!r}, no progress for {stood_s:.0f} s"
        if (pull := self._state.workers.pulling.get(worker.worker)) is not None:
            asked_s = self._age_s(pull.requested_at_ms)
            text += f", asked for policy version {pull.policy_version} {asked_s:.0f} s ago"
            text += " and has not loaded it"
        return text

    def _trainer_works(self) -> bool:
        return any(
            w.state in ("working", "saving") or self._is_silent(w) or self._is_starting(w)
            for w in self._state.workers.of("trainer")
        )

    def _is_past(self, group: str, topic: Topic, place: int) -> bool:
        """Whether the group's position is behind a record; False: the broker did not answer."""
        known, at = self._evidence.committed.get(group, {}), position_at(topic.name, place)
        there = known.get(Partition(at.topic, at.partition))
        return place != NO_PLACE and covered(there, at.offset)

    def _stood_s(self, at_ms: int) -> float:
        return max(0, self._state.workers.clock_ms - at_ms) / 1000

    def _age_s(self, at_ms: int) -> float:
        return max(0, self._evidence.now_ms - at_ms) / 1000


def diagnose(state: Folds, evidence: StallFacts, limits: StallLimits) -> Blocked | None:
    """Return the first blocked stage with its sentence; None: every stage with work moves."""
    return Inquiry(state, evidence, limits).first()


def told(state: Folds, evidence: StallFacts, limits: StallLimits, role: str) -> str:
    """Return the last reports of `role`'s workers in a sentence, the worst first."""
    return Inquiry(state, evidence, limits).told(role)


def _trajectories(samples: Sequence[Sample]) -> str:
    groups = sorted({sample.group.number or 0 for sample in samples})
    named = f"{'group' if len(groups) == 1 else 'groups'} {_range(groups)}"
    verb = "is" if len(samples) == 1 else "are"
    return f"{counted(len(samples), 'trajectory', 'trajectories')} of {named} {verb}"


def _range(groups: Sequence[int]) -> str:
    if len(groups) <= _NAMED:
        return ", ".join(map(str, groups))
    return f"{groups[0]} to {groups[-1]}"


def _at(topic: Topic, place: int) -> str:
    return "" if place == NO_PLACE else f" at {position_at(topic.name, place)}"


def _and_more(samples: Sequence[Sample]) -> str:
    return f", and {len(samples) - 1} more" if len(samples) > 1 else ""

"""Detects that a run makes no progress, and asks which stage is blocked.

Only time in which a step can be expected counts: the run's state is running, and the trainer is not
in redo. What the topics do not contain is queried in a separate thread, because the answer waits
for open transactions.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import SteadyClock, now_ms
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.log.record import Committed, Partition
from rlstreams.streams.log.topics import PROMPTS, TRAJECTORIES
from rlstreams.streams.views.folds import Folds
from rlstreams.streams.views.stalls import Blocked, BlockingTransaction, StallFacts, diagnose, told
from rlstreams.streams.workers import JOINING, SILENT_S
from rlstreams.words.screen import ProcessInfo
from rlstreams.workers.bootstrap.parts import bootstrap_of, client_options
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.control import RUNNING
from rlstreams.workers.loop.stall import StallClock, limits_of

_GROUPS = {"rollout": PROMPTS.name, "logprob": TRAJECTORIES.name}
NO_FACTS = StallFacts(now_ms=0, waited_s=0.0)


def ask_facts(bus: Bus, config: RunConfig) -> StallFacts:
    """Ask the broker for open transactions; for positions only where no old one holds them up.

    Raises:
        BrokerError: the broker cannot be reached, or refused.
        DeadlineError: a transaction on a group's positions stays open.
    """
    held = held_by(bootstrap_of(config), config)
    if any(one.age_s > SILENT_S for one in held):
        return replace(NO_FACTS, held=held)
    return replace(NO_FACTS, held=held, committed=positions(bus))


def positions(bus: Bus) -> Mapping[str, Mapping[Partition, Committed]]:
    """Committed positions of the consumer groups of rollout and logprob, by group."""
    return {group: bus.committed(group, topic) for group, topic in _GROUPS.items()}


def held_by(bootstrap: str, config: RunConfig) -> tuple[BlockingTransaction, ...]:
    """Open transactions in the run's topics, one for each transactional id.

    Raises BrokerError: the broker cannot be reached, or refused.
    """
    from rlstreams.streams.kafka.open_transactions import open_transactions

    run = config.run.id
    ages: dict[str, float] = {}
    partitions: dict[str, list[str]] = {}
    for found in open_transactions(bootstrap, run, client_options(config)):
        ages[found.transactional_id] = max(found.age_s, ages.get(found.transactional_id, 0.0))
        named = found.partition.removeprefix(f"{run}.")
        partitions.setdefault(found.transactional_id, []).append(named)
    return tuple(
        BlockingTransaction(
            worker=worker_of(full_id, run),
            transactional_id=full_id,
            partitions=tuple(partitions[full_id]),
            age_s=age_s,
        )
        for full_id, age_s in ages.items()
    )


def worker_of(transactional_id: str, run: str) -> str:
    """`{run}.{role}.{ordinal}` as `{role}-{ordinal}`; "" for an id that is no worker's."""
    role, dot, ordinal = transactional_id.removeprefix(f"{run}.").partition(".")
    is_ours = transactional_id.startswith(f"{run}.") and dot and ordinal.isdecimal()
    return f"{role}-{ordinal}" if is_ours else ""


ASK_S = 10.0  # longest wait for the facts; without them the sentence says less
AGAIN_S = 5.0  # between two looks at a run that stands
LATER = 2.0  # times as long without a step, before the same is said of it again
_NUMBER = re.compile(r"\d[\d.,]*")


def mark_of(state: Folds) -> object:
    """A value that changes with every step, claim and published version."""
    return state.ledger.last_step, state.ledger.epoch, frozenset(state.published)


class _Question:
    """One question to the broker, in a daemon thread: the loop of `up` does not wait for it."""

    def __init__(self, ask: Callable[[], StallFacts]) -> None:
        self._ask = ask
        self._until_s = time.monotonic() + ASK_S
        self.answer = NO_FACTS  # also where the broker refuses, or does not answer
        self._thread = threading.Thread(target=self._run, name="stall-facts", daemon=True)
        self._thread.start()

    def is_over(self) -> bool:
        """Whether the answer is there, or its time is up."""
        return not self._thread.is_alive() or time.monotonic() >= self._until_s

    def _run(self) -> None:
        with suppress(StreamsError):
            self.answer = self._ask()


class StallWatch:
    """Asks the folds, ticked from the loop of `up`; never waits.

    Args:
        folds: which others feed.
        ask: the question to the broker; called in a thread.
        monotonic_s: the clock that time is counted by.
        clock_ms: the clock that reports are dated by; it must not step. None: one of its own.
    """

    def __init__(
        self,
        config: RunConfig,
        folds: Folds,
        ask: Callable[[], StallFacts],
        monotonic_s: Callable[[], float] = time.monotonic,
        clock_ms: Callable[[], int] | None = None,
    ) -> None:
        self._limits = limits_of(config)
        self._ask = ask
        self._monotonic_s = monotonic_s
        self._folds = folds
        self._clock = StallClock()
        self._steady = clock_ms or SteadyClock()
        self._call: _Question | None = None
        self._next_look_s = 0.0
        self._told = (
            "",
            0.0,
        )  # said last of this wait, without numbers, and after how long
        self._silent: frozenset[str] = frozenset()
        self._gone: frozenset[str] = frozenset()  # workers without a process
        self._starting: dict[str, float] = {}  # since when, by the clock of processes
        self.news = ""  # the newest thing to say; the loop takes it
        self.problem = ""  # why the run should stop; empty: it should not
        self.is_unfed = False  # the blocked stage gets none of the records that wait for it

    def note(self, processes: Sequence[ProcessInfo]) -> None:
        """Take the supervisor's processes; the log says which of them have reported."""
        reported = {worker.instance for worker in self._folds.workers.all}
        self._gone = frozenset(info.worker for info in processes if info.started_s is None)
        self._starting = {
            info.worker: info.started_s
            for info in processes
            if info.started_s is not None and info.instance not in reported
        }

    def tick(self, *, is_running: bool) -> None:
        """Count, and look when it is time.

        Args:
            is_running: from the start to the trainer's end, unless it is drained before.
        """
        now_s = self._monotonic_s()
        state = self._folds
        state.workers.passes(self._steady())
        self._announce_silence(state)
        waited_s = self._clock.tick(
            now_s, mark_of(state), counts=is_running and expects_step(state)
        )
        if not 0 < self._limits.stall_s <= waited_s or self.problem:
            self._call, self._told = None, ("", 0.0)
            return
        self._look(state, waited_s, now_s)

    @property
    def expects_step(self) -> bool:
        """Whether time without a step counts; see above."""
        return expects_step(self._folds)

    def begin_anew(self) -> None:
        """Forget the problem, which is being dealt with, and count from 0."""
        self.problem, self.is_unfed, self._clock = "", False, StallClock()

    def last_reports(self, role: str) -> str:
        """The last reports of the workers of `role` as a sentence, the worst first."""
        return told(self._folds, self._evidence(0.0, NO_FACTS), self._limits, role)

    def is_starting(self, role: str) -> bool:
        """Whether a worker of `role` has been started, has not reported, and still has time."""
        ages_s = self._starting_s()
        return any(
            w.rpartition("-")[0] == role and ages_s[w] < self._limits.start_s for w in ages_s
        )

    def _starting_s(self) -> dict[str, float]:
        now_s = time.monotonic()
        return {worker: now_s - started_s for worker, started_s in self._starting.items()}

    def _evidence(self, waited_s: float, facts: StallFacts) -> StallFacts:
        return replace(
            facts,
            now_ms=now_ms(),
            waited_s=waited_s,
            gone=self._gone,
            starting_s=self._starting_s(),
        )

    def _look(self, state: Folds, waited_s: float, now_s: float) -> None:
        if self._call is None:
            if now_s >= self._next_look_s:
                self._call = _Question(self._ask)
            return
        if not self._call.is_over():
            return
        evidence = self._evidence(waited_s, self._call.answer)
        self._call = None
        self._next_look_s = now_s + AGAIN_S
        self._judge(state, diagnose(state, evidence, self._limits), waited_s)

    def _judge(self, state: Folds, found: Blocked | None, waited_s: float) -> None:
        since = f"no step for {waited_s:.0f} s (the last was {state.ledger.last_step})"
        if state.ledger.at_target:
            since = f"the last step was {waited_s:.0f} s ago"
        if found is None:
            self._tell(since, ", but every stage with work is making progress", waited_s)
        elif found.is_overdue:
            self.problem = f"{since}: blocked at {found.hop}: {found.sentence}"
            self.is_unfed = found.is_unfed
        else:
            said = f", within its own deadline: {found.hop}: {found.sentence}"
            self._tell(since, said, waited_s)

    def _tell(self, since: str, said: str, waited_s: float) -> None:
        """Say it, unless it was said of this wait, and not long ago."""
        kind, told_s = _NUMBER.sub("", said), self._told[1]
        if kind != self._told[0] or waited_s >= LATER * told_s:
            self._told, self.news = (kind, waited_s), f"{since}{said}"

    def _announce_silence(self, state: Folds) -> None:
        """Announce a worker that falls silent, once: a process that hangs is not reaped."""
        clock_ms = state.workers.clock_ms
        silent = {
            worker.worker: (clock_ms - worker.heard_ms) / 1000
            for worker in state.workers.all
            if worker.worker not in self._gone
            and worker.worker not in self._starting
            and worker.state not in ("stopped", JOINING)
            and clock_ms - worker.heard_ms > SILENT_S * 1000
        }
        if new := sorted(silent.keys() - self._silent):
            self.news = "; ".join(f"no report from {w} for {silent[w]:.0f} s" for w in new)
        self._silent = frozenset(silent)


def expects_step(state: Folds) -> bool:
    """Whether time counts: not while paused, draining or in redo; a silent redo is none."""
    if state.control != RUNNING:
        return False
    trainers = state.workers.of("trainer")
    clock_ms = state.workers.clock_ms
    is_heard = any(clock_ms - trainer.heard_ms <= SILENT_S * 1000 for trainer in trainers)
    return not (state.trainer_state == "redo" and is_heard)

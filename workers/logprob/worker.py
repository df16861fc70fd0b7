"""Role `logprob`: score each segment under the policy version that sampled it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from rlstreams.schemas.events import (
    TRAIN,
    Event,
    PolicyPublished,
    ScoredTrajectory,
    SegmentScore,
    Trajectory,
)
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.crash_points import CrashPoint, reach
from rlstreams.streams.log.record import Outgoing, Partition, Position, RawRecord, Record
from rlstreams.streams.log.topics import DEAD_LETTERS, SCORED, TRAJECTORIES
from rlstreams.workers.engines.base import Scorer
from rlstreams.workers.logprob.bisect import score_in_halves
from rlstreams.workers.logprob.reference import Reference, with_reference
from rlstreams.workers.logprob.scoring import Load, num_tokens, plan_anchors, score_window
from rlstreams.workers.logprob.versions import Anchor
from rlstreams.workers.logprob.windows import is_prescribed, next_window
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.dead_letters import Reason, dead_letter
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.loop.stage import Finished, StageLoop
from rlstreams.workers.loop.validation import check_trajectory
from rlstreams.workers.policy.pulls import PullLog
from rlstreams.workers.policy.view import PolicyFollower
from rlstreams.workers.weights.channel import Pulled, WeightChannel, WeightError

Scored = ScoredTrajectory | Exception  # why it could not be scored
ANNOUNCEMENT_DEADLINE_S = 30.0  # for what is on its way: a version, the rest of a window


@dataclass(frozen=True, slots=True)
class _Pull:
    published: PolicyPublished
    future: Future[Pulled]


class LogprobStage:
    """Collect trajectories into windows, score each window off the loop's thread.

    consumes:     trajectories (Trajectory); policy-versions (PolicyPublished)
    produces:     scored-trajectories (ScoredTrajectory), dead-letters; policy-pulls; worker-events
    waits for:    a window that is full or old enough; a pull of a version that the window needs
    unblocked by: rollout sending; trainer publishing

    Args:
        reference: adds its log-probs to every score; None: no KL term asks for them.
    """

    def __init__(
        self,
        context: Context,
        bus: Bus,
        scorer: Scorer,
        channel: WeightChannel,
        reference: Reference | None = None,
    ) -> None:
        self._context = context
        self._config = context.config.logprob
        self._versions_held = context.config.versions_held
        self._replay_routes = context.config.trainer.routing_replay
        self._deadline_s = context.config.weights.pull_deadline_s
        self._scorer = scorer
        self._reference = reference
        self._channel = channel
        self._follower = PolicyFollower(bus)
        self._compute = ThreadPoolExecutor(1, "scorer")
        self._reporter = Reporter(context)
        self._pulls = PullLog(context, channel)
        self._loads: dict[int, Load] = {}
        self._refused: set[int] = set()  # versions whose pull failed: scored by a nearby one
        self._pull: _Pull | None = None
        self._pending: list[Record[Trajectory]] = []
        self._pending_since = 0.0
        self._unannounced: dict[Position, float] = {}  # since when a record waits for its version
        self._window: tuple[list[Record[Trajectory]], Future[list[Scored]]] | None = None
        self._passed: list[Finished] = []
        self._busy_s = 0.0
        self._num_windows = 0

    def room(self) -> int:
        """Room for two windows: one is scored while the other is filled."""
        if self._pending and is_prescribed(self._pending[0]) and not self._is_due():
            return 256  # the rest of its window is to come
        tokens = sum(num_tokens(record.event) for record in self._pending)
        return 0 if tokens > 2 * self._config.token_budget else 256

    def begin(self, record: Record[Event]) -> None:
        """Take a trajectory into the pending window; evaluations are not scored."""
        trajectory = record.event
        if not isinstance(trajectory, Trajectory):
            raise ValueError(  # noqa: TRY004  (bad input of a foreign writer, not our mistake)
                f"a {type(trajectory).__name__} lies in topic {TRAJECTORIES.name}"
            )
        if trajectory.purpose != TRAIN:
            self._passed.append(Finished(raw=record.raw))
            return
        check_trajectory(trajectory, self._scorer.vocab_size, self._scorer.max_tokens)
        if not self._pending:
            self._pending_since = time.monotonic()
        self._pending.append(Record(event=trajectory, raw=record.raw))

    def finished(self) -> Sequence[Finished]:
        """Scored trajectories, and evaluations, which leave without a score."""
        finished, self._passed = self._passed, []
        if self._window is not None and self._window[1].done():
            finished += self._collect(*self._window)
            self._window = None
        if self._window is None and self._pull is None and self._is_due():
            self._start()
        return finished

    def give_up(self, partitions: Set[Partition]) -> None:
        """Forget pending records of these partitions; a window that is being scored goes on."""
        kept = [record for record in self._pending if record.raw.partition not in partitions]
        self._reporter.count(given_up=len(self._pending) - len(kept))
        self._pending = kept

    def isolating(self, raw: RawRecord, tries: int) -> None:
        """Count it; the report is also what shows the supervisor that this worker came so far."""
        self._reporter.count(isolated=1)
        self._reporter.state("isolating", f"{raw.position}, begun {tries} times before")

    def announcements(self) -> Sequence[Outgoing]:
        """Pulls and reports."""
        self._follow()
        self._reporter.policy_version = max(self._scorer.versions, default=-1)
        if self._window is not None:
            self._reporter.state("working")
        elif self._pull is not None:
            version = self._pull.published.policy_version
            self._reporter.state("pulling", f"policy version {version}")
        else:
            self._reporter.state("waiting", "for trajectories")
        return [*self._pulls.take(), *self._reporter.due()]

    def last_report(self) -> Sequence[Outgoing]:
        """The last report."""
        return self._reporter.last_report()

    @property
    def num_open(self) -> int:
        """Trajectories pending or in work."""
        return len(self._pending) + (len(self._window[0]) if self._window else 0)

    def close(self) -> None:
        """Give up open windows; they stay in flight."""
        self._compute.shutdown(wait=False, cancel_futures=True)
        self._follower.close()

    def _follow(self) -> None:
        if self._pull is not None and self._pull.future.done():
            self._finish_pull(self._pull)
            self._pull = None
        newest = self._follower.poll().newest
        # While trajectories wait, only what they need is pulled: or the newest pushes it out.
        is_idle = self._pull is None and self._window is None and not self._pending
        if newest is not None and is_idle:
            version = newest.policy_version
            if version not in self._scorer.versions and version not in self._refused:
                self._start_pull(newest)

    def _start_pull(self, published: PolicyPublished) -> None:
        self._pulls.requested(published)
        future = self._compute.submit(self._scorer.pull, published, self._channel)
        self._pull = _Pull(published, future)

    def _finish_pull(self, pull: _Pull) -> None:
        version = pull.published.policy_version
        try:
            pulled = pull.future.result()
        except WeightError as err:
            self._refused.add(version)
            self._reporter.state("waiting", f"pull of {version} failed: {err}")
            self._reporter.count(failed_pulls=1)
            return
        self._refused.clear()  # another version came: the link works, so older refusals may heal
        self._pulls.loaded(pull.published, pulled)
        load_id = self._pulls.loads[version]
        self._loads[version] = Load(weight_hash=pulled.weight_hash, load_id=load_id)
        self._reporter.count(pulls=1, pull_s=pulled.seconds, pulled_bytes=pulled.num_bytes)

    def _wanted_by(self, records: Sequence[Record[Trajectory]], held: set[int]) -> set[int]:
        return {version for record in records for version in self._wanted(record.event, held)}

    def _is_due(self) -> bool:
        if not self._pending:
            return False
        waited_s = time.monotonic() - self._pending_since
        if is_prescribed(self._pending[0]):
            # One that does not get whole is a stranger's, or lacks a record that was set aside.
            return next_window(self._pending) is not None or waited_s >= ANNOUNCEMENT_DEADLINE_S
        tokens = sum(num_tokens(record.event) for record in self._pending)
        return tokens >= self._config.token_budget or waited_s >= self._config.window_s

    def _start(self) -> None:
        """Score what the held versions can score; pull what the oldest record still needs."""
        announced = self._announced()
        if not announced:
            return
        held = set(self._scorer.versions)
        prescribed = next_window(announced)
        needed = prescribed or announced[:1]
        missing = sorted(self._wanted_by(needed, held) - held)
        if missing:
            published = self._follower.view.get(missing[0])
            assert published is not None  # `_wanted` names served versions only
            self._start_pull(published)
            return
        window = prescribed or [r for r in announced if self._wanted(r.event, held) <= held]
        taken = {record.position for record in window}
        self._pending = [r for r in self._pending if r.position not in taken]
        self._pending_since = time.monotonic()
        anchors = plan_anchors([record.event for record in window], held, set())
        reach(CrashPoint.FORWARD_BEFORE)
        self._num_windows += 1
        number = self._num_windows
        self._window = (window, self._compute.submit(self._score, window, anchors, number))

    def _announced(self) -> list[Record[Trajectory]]:
        """Pending records whose versions are known here, oldest first.

        A sampler may know a version a moment before we do. One that never comes is poison: its
        record waits alone, up to a deadline, and holds nobody up.
        """
        newest, now = self._follower.view.newest_version, time.monotonic()
        waiting = [r for r in self._pending if _newest_version(r.event) > newest]
        since = {r.position: self._unannounced.get(r.position, now) for r in waiting}
        overdue = [r for r in waiting if now - since[r.position] >= ANNOUNCEMENT_DEADLINE_S]
        for record in overdue:
            self._pending.remove(record)
            del since[record.position]
            detail = (
                f"policy version {_newest_version(record.event)} was not announced within "
                f"{ANNOUNCEMENT_DEADLINE_S:g} s; the newest is {newest}"
            )
            self._passed.append(self._dead(record, Reason.VALIDATION, detail))
        self._unannounced = since
        return [r for r in self._pending if r.position not in since]

    def _wanted(self, trajectory: Trajectory, held: set[int]) -> set[int]:
        """Versions to score a record under; if they do not fit at once, those that are held."""
        served: set[int] = set()
        versions = {s.policy_version for s in trajectory.segments if s.author == "policy"}
        if len(versions) <= self._versions_held:
            served = self._served()
        anchors = plan_anchors([trajectory], held, served).values()
        return {a.policy_version for a in anchors if a.label != "behavior"}

    def _served(self) -> set[int]:
        view = self._follower.view
        return {
            version
            for version in view.served
            if version not in self._refused
            and (published := view.get(version)) is not None
            and self._channel.can_pull(published)
        }

    def _score(
        self, window: list[Record[Trajectory]], anchors: Mapping[int, Anchor], number: int
    ) -> list[Scored]:
        """In the compute thread."""

        def score(records: Sequence[Record[Trajectory]]) -> Sequence[tuple[SegmentScore, ...]]:
            events = [record.event for record in records]
            budget = self._config.token_budget
            found = score_window(
                events,
                anchors,
                self._loads,
                self._scorer,
                budget,
                replay_routes=self._replay_routes,
            )
            if self._reference is None:
                return found
            return with_reference(found, events, self._reference, budget)

        started_s = time.monotonic()
        scores = score_in_halves(window, score)
        self._busy_s += time.monotonic() - started_s
        return [
            found
            if isinstance(found, Exception)
            else replace(
                self._scored(record, found),
                window=number,
                window_place=place,
                window_size=len(window),
            )
            for place, (record, found) in enumerate(zip(window, scores, strict=True))
        ]

    def _scored(
        self, record: Record[Trajectory], scores: tuple[SegmentScore, ...]
    ) -> ScoredTrajectory:
        return ScoredTrajectory(
            trajectory=record.event,
            scores=scores,
            worker=self._context.worker,
            instance=self._context.instance,
            trajectory_partition=record.position.partition,
            trajectory_offset=record.position.offset,
            scored_at_ms=now_ms(),
            routing_replayed=self._replay_routes,
        )

    def _collect(
        self, window: list[Record[Trajectory]], future: Future[list[Scored]]
    ) -> list[Finished]:
        results = future.result()
        reach(CrashPoint.FORWARD_AFTER)
        tokens = sum(num_tokens(record.event) for record in window)
        self._reporter.count(samples=len(window), tokens=tokens, windows=1, busy_s=self._busy_s)
        self._busy_s = 0.0
        return [
            Finished(raw=record.raw, outputs=(self._output(record, result),))
            for record, result in zip(window, results, strict=True)
        ]

    def _output(self, record: Record[Trajectory], result: Scored) -> Outgoing:
        if isinstance(result, ScoredTrajectory):
            return outgoing(SCORED, result)
        detail = f"{type(result).__name__}: {result}"
        return self._dead(record, Reason.SCORING, detail).outputs[0]

    def _dead(self, record: Record[Trajectory], reason: str, detail: str) -> Finished:
        letter = dead_letter(
            self._context,
            record.raw,
            record.event,
            reason=reason,
            detail=detail,
            permanent=False,
        )
        self._reporter.count(dead_letters=1)
        return Finished(raw=record.raw, outputs=(outgoing(DEAD_LETTERS, letter),))


def _newest_version(trajectory: Trajectory) -> int:
    return max(s.policy_version for s in trajectory.segments if s.author == "policy")


def make_worker(
    context: Context,
    bus: Bus,
    scorer: Scorer,
    channel: WeightChannel,
    reference: Reference | None = None,
) -> StageLoop:
    """The role, ready to run."""
    stage = LogprobStage(context, bus, scorer, channel, reference)
    interval_s = context.config.logprob.commit_interval_s
    return StageLoop(context, bus, stage, TRAJECTORIES.name, interval_s=interval_s)

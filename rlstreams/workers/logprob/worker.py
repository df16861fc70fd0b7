"""Role `logprob`: score each segment under the policy version that sampled it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from rlstreams.schemas.events import EVALUATE, Event, ScoredTrajectory, Trajectory
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.crash_points import CrashPoint, reach
from rlstreams.streams.log.record import Outgoing, Partition, Record
from rlstreams.streams.log.topics import SCORED, TRAJECTORIES
from rlstreams.streams.segments import num_tokens
from rlstreams.workers.engines.base import Scorer
from rlstreams.workers.logprob import windows
from rlstreams.workers.logprob.held import HeldVersions
from rlstreams.workers.logprob.scoring import Reference, score_records
from rlstreams.workers.logprob.versions import plan_anchors, versions_of
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.dead_letters import Reason, set_aside
from rlstreams.workers.loop.lease import AWAITS_SHIFT, OFFLOADED, Offloading
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.loop.stage import Finished, StageLoop
from rlstreams.workers.loop.validation import check_trajectory
from rlstreams.workers.policy.puller import PolicyPuller
from rlstreams.workers.weights.channel import WeightChannel


@dataclass(frozen=True, slots=True)
class _Window:
    records: list[Record[Trajectory]]
    versions: Set[int]  # that it is scored under
    events: Future[tuple[list[ScoredTrajectory | Exception], float]]  # and seconds


class LogprobStage:
    """Collect trajectories into windows; score in one thread, pull versions in another.

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
        config = context.config
        self._context = context
        self._scorer = scorer
        self._score = partial(score_records, context, scorer, reference)
        self._compute = ThreadPoolExecutor(1, "scorer")
        self._transfer = ThreadPoolExecutor(1, "pull")
        self.reporter = Reporter(context)
        self._puller = PolicyPuller(
            context,
            bus,
            channel,
            self.reporter,
            lambda *what: self._transfer.submit(scorer.pull, *what),
        )
        self._held = HeldVersions(scorer, self._puller, config.versions_held)
        # Without scoring there is no reason to wait for a fuller window.
        window_s = config.logprob.window_s if config.has_scorer else 0.0
        self._backlog = windows.Backlog(config.logprob.token_budget, window_s)
        self._most = self._backlog.room
        self._windows: deque[_Window] = deque()  # being scored, and one behind it
        self._num_windows = 0
        self._passed: list[Finished] = []
        self._scorers = [scorer] if reference is None else [scorer, reference.scorer]
        self._may_begin = True  # False: it has no shift on its device, or its shift ends
        self._offloading = Offloading(
            lambda: self._compute.submit(self._for_scorers, "off_load"),
            lambda: self._compute.submit(self._for_scorers, "load_back"),
        )

    def room(self) -> int:
        """Room for two windows: they are filled while others are scored."""
        return self._backlog.room

    @property
    def most(self) -> int:
        """Records that it takes with none begun."""
        return self._most

    def begin(self, record: Record[Event]) -> None:
        """Let a trajectory wait for its window; evaluations are not scored."""
        trajectory = record.event
        if not isinstance(trajectory, Trajectory):
            raise ValueError(  # noqa: TRY004  (bad input of a foreign writer, not our mistake)
                f"a {type(trajectory).__name__} lies in topic {TRAJECTORIES.name}"
            )
        if trajectory.purpose == EVALUATE:
            self._passed.append(Finished(raw=record.raw))
            return
        check_trajectory(trajectory, self._scorer.vocab_size, self._scorer.max_tokens)
        self._backlog.add(Record(event=trajectory, raw=record.raw))

    def finished(self) -> Sequence[Finished]:
        """Scored trajectories, and evaluations, which leave without a score."""
        while self._windows and self._windows[0].events.done():
            self._collect(self._windows.popleft())
        self._advance()
        finished, self._passed = self._passed, []
        return finished

    def _advance(self) -> None:
        """Pull what is needed next; score what the held versions can score."""
        newest = self._puller.view.newest_version
        for late in self._backlog.overdue(newest):
            detail = f"policy version {max(late.versions)} was not announced within "
            detail += f"{windows.ANNOUNCEMENT_DEADLINE_S:g} s; the newest is {newest}"
            self._passed.append(self._dead(late.record, Reason.VALIDATION, detail))
        ready = self._backlog.ready()
        wanted = self._held.wanted(one.versions for one in ready)
        self._held.follow(
            frozenset().union(*(wanted[one.versions] for one in ready[:1])),
            frozenset().union(*wanted.values()),
            [window.versions for window in self._windows],
            may_pull=self._may_begin,
        )
        if self._may_begin and self._backlog.is_due(len(self._windows)):
            held = self._held.now
            scorable = [one for one in ready if wanted[one.versions] <= held]
            if scorable:
                self._start(self._backlog.take(scorable), held)

    def _start(self, records: list[Record[Trajectory]], held: Set[int]) -> None:
        sampled = set[int]().union(*(versions_of(record.event) for record in records))
        anchors, loads = plan_anchors(sampled, held), dict(self._puller.loads)
        reach(CrashPoint.FORWARD_BEFORE)
        self._num_windows += 1
        future = self._compute.submit(self._score, self._num_windows, records, anchors, loads)
        versions = {anchor.policy_version for anchor in anchors.values()}
        self._windows.append(_Window(records, versions, future))

    def _collect(self, window: _Window) -> None:
        events, seconds = window.events.result()
        reach(CrashPoint.FORWARD_AFTER)
        tokens = sum(num_tokens(record.event) for record in window.records)
        self.reporter.count(samples=len(events), tokens=tokens, windows=1, busy_s=seconds)
        for record, event in zip(window.records, events, strict=True):
            if isinstance(event, Exception):
                detail = f"{type(event).__name__}: {event}"
                self._passed.append(self._dead(record, Reason.SCORING, detail))
            else:
                self._passed.append(Finished(raw=record.raw, outputs=(outgoing(SCORED, event),)))

    def _dead(self, record: Record[Trajectory], reason: str, detail: str) -> Finished:
        self.reporter.count(dead_letters=1)
        dead_letter = set_aside(self._context, record, reason=reason, detail=detail)
        return Finished(raw=record.raw, outputs=(dead_letter,))

    def give_up(self, partitions: Set[Partition]) -> None:
        """Forget what waits of these partitions; a window that is being scored goes on."""
        self.reporter.count(given_up=self._backlog.forget(partitions))

    def give_up_device(self) -> bool:
        """Off-load, once what is being scored and pulled is there."""
        self._may_begin = False
        is_busy = bool(self._windows) or self._puller.pulling is not None
        return not is_busy and self._offloading.to(here=False)

    def take_device(self) -> bool:
        """Load the held versions back."""
        self._may_begin = self._offloading.to(here=True)
        return self._may_begin

    def _for_scorers(self, method: str) -> None:
        for scorer in self._scorers:
            getattr(scorer, method)()

    def announcements(self) -> Sequence[Outgoing]:
        """Pulls and reports."""
        versions = sorted(self._scorer.versions)
        self.reporter.policy_version = max(versions, default=-1)
        self.reporter.figures = {"open": self.num_open, "versions": versions}
        if not self._may_begin:
            self.reporter.state(OFFLOADED, AWAITS_SHIFT)
        elif self._windows:
            self.reporter.state("working")
        elif self._puller.pulling is not None:
            self.reporter.state("pulling", f"policy version {self._puller.pulling}")
        else:
            why = ("for trajectories", self._puller.trouble)
            self.reporter.state("waiting", "; ".join(filter(None, why)))
        return [*self._puller.news(), *self.reporter.due()]

    @property
    def may_join(self) -> bool:
        """True at once: the versions of a record decide which weights are pulled."""
        return True

    @property
    def is_out(self) -> bool:
        """Never: it has its own model."""
        return False

    @property
    def num_open(self) -> int:
        """Trajectories that wait or are being scored."""
        return len(self._backlog) + sum(len(window.records) for window in self._windows)

    def close(self) -> None:
        """Give up open windows; they stay in flight."""
        for threads in (self._compute, self._transfer):
            threads.shutdown(wait=False, cancel_futures=True)
        self._puller.close()


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
    return StageLoop(
        context, bus, stage, TRAJECTORIES.name, reporter=stage.reporter, interval_s=interval_s
    )

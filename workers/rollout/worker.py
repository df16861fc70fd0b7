"""Role `rollout`: one sample in, one trajectory out, under the newest weights that it holds."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence, Set
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue

from rlstreams.schemas.events import DeadLetter, Event, PolicyPublished, Prompt
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.crash_points import CrashPoint, reach
from rlstreams.streams.log.record import Outgoing, Partition, Position, RawRecord, Record
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS, TRAJECTORIES
from rlstreams.workers.engines.base import Engine, PromptTooLongError
from rlstreams.workers.engines.thread import EngineThread
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.dead_letters import dead_letter
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.loop.stage import Finished, StageLoop
from rlstreams.workers.loop.validation import check_prompt
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.policy.pulls import PullLog
from rlstreams.workers.policy.view import PolicyFollower
from rlstreams.workers.rollout.sampling import Rollout, Sampler
from rlstreams.workers.rollout.trajectory import trajectory_of
from rlstreams.workers.sandbox.reward import RewardError
from rlstreams.workers.sandbox.user_code import UserCodeError
from rlstreams.workers.weights.channel import Pulled, WeightChannel, WeightError

PULL_RETRY_S = 1.0
HEALTH_DEADLINE_S = 10.0
START_S = 10.0
CLOSE_S = 40.0  # a server that is ours is given time to end


class RolloutStage:
    """Generate and judge samples; pull weights as they are announced.

    consumes:     prompts (Prompt, one sample each); policy-versions (PolicyPublished)
    produces:     trajectories (Trajectory), dead-letters; policy-pulls (PullRequested,
                  PolicyLoaded); worker-events
    waits for:    a prompt; a version at or above the prompt's `min_policy_version`
    unblocked by: prompts issuing; trainer publishing
    """

    def __init__(
        self, context: Context, bus: Bus, engine: Engine, channel: WeightChannel, sampler: Sampler
    ) -> None:
        self._context = context
        self._engine = engine
        self._channel = channel
        self._sampler = sampler
        self._follower = PolicyFollower(bus)
        self._loop = EngineThread()
        self._reporter = Reporter(context)
        self._pulls = PullLog(context, channel)
        self._pulling: tuple[PolicyPublished, Future[Pulled]] | None = None
        self._pull_after = 0.0
        self._waiting: deque[Record[Prompt]] = deque()
        self._running: set[Position] = set()  # records whose samples the engine has
        self._ended: SimpleQueue[tuple[Record[Prompt], asyncio.Task[Rollout]]] = SimpleQueue()
        self._unnamed: list[tuple[Record[Prompt], Rollout]] = []
        self._num_open = 0
        self._num_sampled = 0
        self._loop.wait(engine.start(), START_S, f"engine {engine.name}")

    def room(self) -> int:
        """Room for twice the engine's capacity: while it is full, as many samples wait."""
        return max(0, 2 * self._engine.capacity - self._num_open)

    def begin(self, record: Record[Event]) -> None:
        """Queue a sample until the engine holds what it asks for."""
        prompt = record.event
        if not isinstance(prompt, Prompt):
            raise ValueError(f"a {type(prompt).__name__} lies in topic {PROMPTS.name}")  # noqa: TRY004
        check_prompt(prompt)
        self._num_open += 1
        self._waiting.append(Record(event=prompt, raw=record.raw))

    def finished(self) -> Sequence[Finished]:
        """Samples that ended, as trajectories or dead letters."""
        self._start_waiting()
        finished: list[Finished] = []
        unnamed, self._unnamed = self._unnamed, []
        for record, rollout in unnamed:
            self._conclude(record, rollout, finished)
        while True:
            try:
                record, task = self._ended.get_nowait()
            except Empty:
                return finished
            self._running.discard(record.position)
            if task.cancelled():  # given up
                self._num_open -= 1
                continue
            reach(CrashPoint.FORWARD_AFTER)
            error = task.exception()
            if error is not None:
                finished.append(self._fail(record, error))
            else:
                self._conclude(record, task.result(), finished)

    def give_up(self, partitions: Set[Partition]) -> None:
        """End the requests of these partitions: their new owner samples them anew."""
        kept = [record for record in self._waiting if record.raw.partition not in partitions]
        named = [one for one in self._unnamed if one[0].raw.partition not in partitions]
        gone = {at for at in self._running if Partition(at.topic, at.partition) in partitions}
        num_ended = len(self._waiting) - len(kept) + len(self._unnamed) - len(named)
        self._waiting, self._unnamed = deque(kept), named
        self._num_open -= num_ended
        self._loop.cancel(gone)
        self._reporter.count(given_up=num_ended + len(gone))

    def isolating(self, raw: RawRecord, tries: int) -> None:
        """Count it; the report is also what shows the supervisor that this worker came so far."""
        self._reporter.count(isolated=1)
        self._reporter.state("isolating", f"{raw.position}, begun {tries} times before")

    def announcements(self) -> Sequence[Outgoing]:
        """Pulls and reports."""
        self._follow()
        self._reporter.policy_version = self._engine.policy_version
        # Of all that was sampled, what is in no trajectory was sampled in vain.
        sampled, self._num_sampled = self._num_sampled, self._engine.num_sampled
        self._reporter.count(sampled_tokens=self._num_sampled - sampled)
        return [*self._pulls.take(), *self._reporter.due()]

    def last_report(self) -> Sequence[Outgoing]:
        """The last report."""
        return self._reporter.last_report()

    @property
    def num_open(self) -> int:
        """Samples that were begun and have not ended."""
        return self._num_open

    def close(self) -> None:
        """Give up open samples; they stay in flight."""
        self._loop.wait(self._engine.close(), CLOSE_S, f"closing engine {self._engine.name}")
        if self._sampler.turns is not None:
            self._sampler.turns.environment.close()
        self._loop.close()
        self._sampler.verifier.close()
        self._follower.close()

    def _follow(self) -> None:
        if self._pulling is not None:
            self._finish_pull(*self._pulling)
        newest = self._follower.poll().newest
        if newest is None or self._pulling is not None or time.monotonic() < self._pull_after:
            return
        if self._engine.wants(newest):
            self._pulls.requested(newest)
            self._pulling = (newest, self._loop.submit(self._engine.pull(newest, self._channel)))

    def _finish_pull(self, published: PolicyPublished, future: Future[Pulled]) -> None:
        if not future.done():
            return
        self._pulling = None
        try:
            pulled = future.result()
        except WeightError as err:
            # A newer version may be out by now, or the trainer restarts: ask again.
            self._reporter.state("waiting", f"pull of {published.policy_version} failed: {err}")
            self._reporter.count(failed_pulls=1)
            self._pull_after = time.monotonic() + PULL_RETRY_S
            return
        self._pulls.loaded(published, pulled)
        self._reporter.count(pulls=1, pull_s=pulled.seconds, pulled_bytes=pulled.num_bytes)

    def _start_waiting(self) -> None:
        held = self._engine.policy_version
        begun: list[Record[Prompt]] = []
        for _ in range(len(self._waiting)):
            record = self._waiting.popleft()
            if held not in self._pulls.loads or record.event.min_policy_version > held:
                self._waiting.append(record)
                continue
            reach(CrashPoint.FORWARD_BEFORE)
            begun.append(record)
        self._loop.start(
            [
                (one.position, self._sampler.roll_out(one.event), partial(self._on_end, one))
                for one in begun
            ]
        )
        self._running.update(one.position for one in begun)
        state, detail = self._state(held)
        told = [line for line in (detail, self._engine.trouble) if line]
        self._reporter.state(state, "; ".join(told))

    def _on_end(self, record: Record[Prompt], task: asyncio.Task[Rollout]) -> None:
        self._ended.put((record, task))

    def _state(self, held: int) -> tuple[str, str]:
        if self._num_open > len(self._waiting):
            return "working", ""
        if not self._waiting:
            return "waiting", "for prompts"
        wanted = min(record.event.min_policy_version for record in self._waiting)
        return "waiting", f"for policy version {wanted}, holds {held}"

    def _conclude(self, record: Record[Prompt], rollout: Rollout, finished: list[Finished]) -> None:
        played = rollout.played
        sampled = [segment for turn in played.turns for segment in turn.segments]
        if any(segment.policy_version not in self._pulls.loads for segment in sampled):
            # Its PolicyLoaded is not told yet: no trajectory names a load that nobody can read of.
            self._unnamed.append((record, rollout))
            return
        trajectory = trajectory_of(
            record.event,
            record.position,
            rollout,
            self._pulls.loads,
            self._engine.name,
            self._context,
        )
        self._num_open -= 1
        self._reporter.count(
            samples=1,
            tokens=sum(len(segment.token_ids) for segment in sampled),
            sample_s=rollout.finished_s - rollout.started_s,
        )
        if self._sampler.turns is not None:
            self._reporter.count(
                turns=len(played.turns),
                environment_tokens=sum(len(answer.token_ids) for answer in played.answers),
                environment_s=played.environment_s,
            )
        finished.append(Finished(raw=record.raw, outputs=(outgoing(TRAJECTORIES, trajectory),)))

    def _engine_is_ready(self) -> bool:
        what = f"health of engine {self._engine.name}"
        return self._loop.wait(self._engine.health(), HEALTH_DEADLINE_S, what).ready

    def _fail(self, record: Record[Prompt], error: BaseException) -> Finished:
        reasons: list[tuple[type[BaseException], str]] = [
            (PromptTooLongError, "prompt_too_long"),
            (EngineError, "engine"),
            (RewardError, "reward"),
            (UserCodeError, "environment"),
            (TimeoutError, "deadline"),
        ]
        reason = next((name for kind, name in reasons if isinstance(error, kind)), None)
        if reason is None or (reason == "engine" and not self._engine_is_ready()):
            raise error  # the process starts again; its samples stay in flight
        self._num_open -= 1
        self._reporter.count(dead_letters=1)
        letter: DeadLetter = dead_letter(
            self._context,
            record.raw,
            record.event,
            reason=reason,
            detail=str(error),
            permanent=isinstance(error, PromptTooLongError),
        )
        return Finished(raw=record.raw, outputs=(outgoing(DEAD_LETTERS, letter),))


def make_worker(
    context: Context, bus: Bus, engine: Engine, channel: WeightChannel, sampler: Sampler
) -> StageLoop:
    """The role, ready to run."""
    stage = RolloutStage(context, bus, engine, channel, sampler)
    interval_s = context.config.rollout.commit_interval_s
    return StageLoop(context, bus, stage, PROMPTS.name, interval_s=interval_s)

"""Role `rollout`: one sample in, one trajectory out, under the newest weights that it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

from rlstreams.schemas.events import Event, Prompt
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.crash_points import CrashPoint, reach
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import Outgoing, Partition, Record
from rlstreams.streams.log.topics import PROMPTS, TRAJECTORIES
from rlstreams.workers.engines.base import Engine, PromptTooLongError
from rlstreams.workers.engines.thread import EngineThread
from rlstreams.workers.loop.agreement import judged_by
from rlstreams.workers.loop.asked import Asked
from rlstreams.workers.loop.compared import AGAIN
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.dead_letters import set_aside
from rlstreams.workers.loop.lease import AWAITS_TURN, OFFLOADED, Handover
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.loop.stage import Finished, StageLoop
from rlstreams.workers.loop.validation import check_prompt
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.policy.puller import PolicyPuller
from rlstreams.workers.rollout.ends import outputs_of
from rlstreams.workers.rollout.episode import Played
from rlstreams.workers.rollout.history import History
from rlstreams.workers.rollout.late import LateOutcomes
from rlstreams.workers.rollout.sampling import Sampler
from rlstreams.workers.rollout.sessions import Closed, Sessions
from rlstreams.workers.rollout.trajectory import trajectory_of
from rlstreams.workers.sandbox.reward import RewardError
from rlstreams.workers.sandbox.user_code import EditedCodeError, UserCodeError
from rlstreams.workers.weights.channel import WeightChannel

Rolling = Sampler | Sessions
START_S = 10.0
CLOSE_S = 40.0  # a server that is ours is given time to end
_JUDGED = 4  # times the engine's capacity: samples that only wait for their reward
# Why a sample is set aside; any other error ends the worker.
REASONS: Mapping[type[BaseException], str] = {
    PromptTooLongError: "prompt_too_long",
    EngineError: "engine",
    RewardError: "reward",
    UserCodeError: "environment",
    TimeoutError: "deadline",
}


class RolloutStage:
    """Generate and judge samples; pull weights as they are announced.

    consumes:     prompts (Prompt, one sample each); policy-versions (PolicyPublished)
    produces:     trajectories (Trajectory), dead-letters; policy-pulls (PullRequested,
                  PolicyLoaded); worker-events
    waits for:    a prompt; a version at or above the prompt's `min_policy_version`
    unblocked by: prompts issuing; trainer publishing
    """

    def __init__(
        self, context: Context, bus: Bus, engine: Engine, channel: WeightChannel, sampler: Rolling
    ) -> None:
        self._context = context
        self._engine = engine
        self._sampler = sampler
        self._sessions = sampler if isinstance(sampler, Sessions) else None
        waited_for = context.config.outcome
        self._history = History(bus, keeps_judged=bool(waited_for.wait_for))
        self._late = LateOutcomes(bus, waited_for)
        self._loop = EngineThread()
        self._judge = judged_by(context.config, context.files)
        self.reporter = Reporter(context)
        self._puller = PolicyPuller(
            context, bus, channel, self.reporter, lambda *of: self._loop.submit(engine.pull(*of))
        )
        self._waiting: list[Record[Prompt]] = []
        self._running: dict[Hashable, Record[Prompt]] = {}  # begun and not finished
        # Of these, and not concluded.
        self._ended: dict[Hashable, asyncio.Task[Played | Closed]] = {}
        self._over: list[Finished] = []  # whose session was closed before
        self._num_sampled = 0
        self._may_begin = True  # False: it has no turn on its device, or its turn ends
        self._handover = Handover(
            lambda: self._loop.submit(self._sleep()), lambda: self._loop.submit(self._wake())
        )
        self._loop.wait(engine.start(), START_S, f"engine {engine.name}")
        if self._sessions is not None:
            self._sessions.keeper.shared.loads = lambda: self._puller.loads
            self._loop.wait(self._sessions.start(), START_S, "the gateway of agents")

    def room(self) -> int:
        """Room for twice the engine's capacity: while it is full, as many samples wait.

        Samples that wait for a slow judge leave the engine's room to others, up to `_JUDGED` times.
        """
        capacity = self._engine.capacity
        late = len(self._late)
        judged = min(self._sampler.verifier.num_open + late, _JUDGED * capacity)
        return max(0, 2 * capacity + judged - self.num_open - late)

    def begin(self, record: Record[Event]) -> None:
        """Let a sample wait until the engine holds what it asks for."""
        prompt = record.event
        if not isinstance(prompt, Prompt):
            raise ValueError(f"a {type(prompt).__name__} lies in topic {PROMPTS.name}")  # noqa: TRY004
        check_prompt(prompt)
        self._waiting.append(Record(event=prompt, raw=record.raw))

    def finished(self) -> Sequence[Finished]:
        """Samples that ended, as trajectories or dead letters."""
        self._puller.poll()
        newest = self._puller.newest()
        if self._may_begin and newest is not None and self._engine.wants(newest):
            self._puller.start(newest)
        if self._may_begin:
            self._start_waiting()
        self._ended.update(self._loop.ended())
        found = [self._conclude(key) for key in list(self._ended)]
        over, self._over = self._over, []
        return [*over, *(one for one in found if one is not None), *self._decided()]

    def _decided(self) -> Iterator[Finished]:
        """Sessions whose graders have spoken, or were waited for long enough."""
        for one in self._late.decided(now_ms()):
            self.reporter.count(late=1)
            outputs = outputs_of(one, self._engine.name, self._context, self._judge)
            yield Finished(raw=one.record.raw, outputs=outputs)

    def _start_waiting(self) -> None:
        held = self._engine.policy_version
        if held not in self._puller.loads:
            return
        if self._sessions is not None:
            self._history.poll()
            self._set_over(self._history)
        ready = [r for r in self._waiting if r.event.min_policy_version <= held]
        if self._sessions is not None:
            # An agent is a program: no more of them run than calls are sampled at a time.
            room = max(0, self._engine.capacity - len(self._running))
            ready = [record for record in ready if self._history.is_known(record)][:room]
        begun: dict[Hashable, Record[Prompt]] = {id(record): record for record in ready}
        if begun:
            reach(CrashPoint.FORWARD_BEFORE)
            self._running |= begun
            self._waiting = [record for record in self._waiting if id(record) not in begun]
            self._loop.start({key: self._rolled(record) for key, record in begun.items()})

    def _set_over(self, history: History) -> None:
        """Set closed sessions apart: what came of them is in the log, or waits for graders."""
        waiting, self._waiting = self._waiting, []
        for record in waiting:
            is_known = history.is_known(record)
            if is_known:
                self._late.listen(record)
            if is_known and history.is_closed(record):
                self._over.append(Finished(raw=record.raw))
            elif is_known and history.is_waiting(record):
                self._late.add(record, history.take(record))
            else:
                self._waiting.append(record)

    def _rolled(self, record: Record[Prompt]) -> Coroutine[Any, Any, Played | Closed]:
        if self._sessions is None:
            assert isinstance(self._sampler, Sampler)
            return self._sampler.roll_out(record.event)
        log = self._history.take(record)
        caught_up = partial(self._history.caught_up, record) if log.starts else None
        return self._sessions.roll_out(record, log, caught_up)

    def _conclude(self, key: Hashable) -> Finished | None:
        """None: it was given up, or has to wait."""
        record, task = self._running[key], self._ended[key]
        if not task.cancelled():
            reach(CrashPoint.FORWARD_AFTER)
            if (error := task.exception()) is not None:
                return self._fail(key, error)
            rollout, loads = task.result(), self._puller.loads
            if any(version not in loads for version in rollout.versions):
                return None  # no trajectory names a load that nobody can read of yet
        del self._running[key], self._ended[key]
        if task.cancelled():
            return None
        if isinstance(rollout, Closed):
            self.reporter.count(**rollout.counts())
            if rollout.is_waiting:
                self._late.add(record, rollout.session.log)
                return None
            name = self._engine.name
            outputs = rollout.outputs(record, name, self._context, self._judge)
            return Finished(raw=record.raw, outputs=outputs)
        assert isinstance(self._sampler, Sampler)
        self.reporter.count(**rollout.counts(in_turns=self._sampler.turns is not None))
        trajectory = trajectory_of(
            *(record.event, record.position, rollout, loads, self._engine.name, self._context),
            judge=self._judge,
        )
        return Finished(raw=record.raw, outputs=(outgoing(TRAJECTORIES, trajectory),))

    def _fail(self, key: Hashable, error: BaseException) -> Finished:
        reason = next((name for kind, name in REASONS.items() if isinstance(error, kind)), None)
        if reason == "engine" and not self._engine.is_ready:
            reason = None
        refuses = self._context.config.run.on_changed_code == "refuse"
        if isinstance(error, EditedCodeError) and refuses:
            raise ConfigError(f"{error}; {AGAIN}") from error
        if reason is None:
            raise error  # the process starts again; its samples stay in flight
        record = self._running.pop(key)
        del self._ended[key]
        self.reporter.count(dead_letters=1)
        is_permanent = isinstance(error, PromptTooLongError)
        letter = set_aside(
            self._context, record, reason=reason, detail=str(error), permanent=is_permanent
        )
        return Finished(raw=record.raw, outputs=(letter,))

    def give_up(self, partitions: Set[Partition]) -> None:
        """End the requests of these partitions: their new owner samples them anew."""
        waiting = [one for one in self._waiting if one.raw.partition not in partitions]
        running = {k for k, one in self._running.items() if one.raw.partition in partitions}
        self.reporter.count(given_up=len(self._waiting) - len(waiting) + len(running))
        numbers = {partition.number for partition in partitions}
        self._history.forget(numbers)
        self._late.forget(numbers)
        self._waiting = waiting
        for key in running & self._ended.keys():  # there is nothing left of them to cancel
            del self._running[key], self._ended[key]
        self._loop.cancel(running)

    def give_up_device(self) -> bool:
        """Cut what is sampled, once no pull is under way; it goes on in the next turn."""
        self._may_begin = False
        return self._puller.pulling is None and self._handover.to(here=False)

    def take_device(self) -> bool:
        """Load back, or wait for a first server; where that lost the weights, a pull is next."""
        self._may_begin = self._handover.to(here=True) and self._engine.is_up
        return self._may_begin

    async def _sleep(self) -> None:
        self._sampler.clock.stop()
        await self._engine.sleep()

    async def _wake(self) -> None:
        await self._engine.wake()
        self._sampler.clock.go_on()

    def announcements(self) -> Sequence[Outgoing]:
        """Pulls and reports."""
        held = self._engine.policy_version
        self.reporter.policy_version = held
        self.reporter.servers(self._engine.servers)
        self.reporter.load = {"open": self.num_open, "versions": [held]}
        # Of all that was sampled, what is in no trajectory was sampled in vain.
        sampled, self._num_sampled = self._num_sampled, self._engine.num_sampled
        self.reporter.count(sampled_tokens=self._num_sampled - sampled)
        state, detail = "waiting", "for prompts"
        if not self._may_begin:
            state, detail = OFFLOADED, AWAITS_TURN
        elif self._handover.was_used and self._puller.pulling is not None:
            state, detail = "pulling", f"policy version {self._puller.pulling}"
        elif self._running:
            state, detail = "working", ""
        elif self._waiting:
            wanted = min(record.event.min_policy_version for record in self._waiting)
            detail = f"for policy version {wanted}, holds {held}"
        elif len(self._late):
            graders = ", ".join(self._late.graders)
            detail = f"for outcomes of {len(self._late)} sessions by {graders}"
        awaited = [url for url, name in self._engine.servers.items() if name == "starting"]
        absent = f"no answer yet from {', '.join(awaited)}" if awaited else ""
        why = (detail, self._puller.trouble, self._engine.trouble, absent)
        self.reporter.state(state, "; ".join(filter(None, why)))
        return [*self._puller.news(), *self.reporter.due()]

    @property
    def asked(self) -> Asked | None:
        """What agents' calls wait to see committed; None: there are no agents."""
        return None if self._sessions is None else self._sessions.keeper.shared.asked

    @property
    def num_open(self) -> int:
        """Samples that wait, or were begun and are not finished."""
        return len(self._waiting) + len(self._running)

    def close(self) -> None:
        """Give up open samples; they stay in flight."""
        if self._sessions is not None:
            self._loop.wait(self._sessions.close(), CLOSE_S, "ending agents")
        self._loop.wait(self._engine.close(), CLOSE_S, f"closing engine {self._engine.name}")
        if isinstance(self._sampler, Sampler) and self._sampler.turns is not None:
            self._sampler.turns.environment.close()
        self._loop.close()
        self._history.close()
        self._late.close()
        self._sampler.verifier.close()
        self._puller.close()


def make_worker(
    context: Context, bus: Bus, engine: Engine, channel: WeightChannel, sampler: Rolling
) -> StageLoop:
    """The role, ready to run."""
    stage = RolloutStage(context, bus, engine, channel, sampler)
    interval_s = context.config.rollout.commit_interval_s
    return StageLoop(
        *(context, bus, stage, PROMPTS.name),
        reporter=stage.reporter,
        interval_s=interval_s,
        asked=stage.asked,
    )

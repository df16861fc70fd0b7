"""Role `rollout`: one sample in, one trajectory out, under the newest weights that it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any

from rlstreams.schemas.events import Event, Prompt
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.crash_points import CrashPoint, reach
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import Outgoing, Partition, Record
from rlstreams.streams.log.topics import PROMPTS
from rlstreams.workers.engines.base import Engine, PromptTooLongError
from rlstreams.workers.engines.thread import EngineThread
from rlstreams.workers.loop.agreement import judged_by
from rlstreams.workers.loop.compared import AGAIN
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.dead_letters import Reason, set_aside
from rlstreams.workers.loop.lease import AWAITS_SHIFT, OFFLOADED, Offloading
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.loop.stage import Finished, StageLoop
from rlstreams.workers.loop.validation import check_prompt
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.policy.puller import PolicyPuller
from rlstreams.workers.rollout.player import Concluded, Player, Rolled
from rlstreams.workers.sandbox.reward import RewardError
from rlstreams.workers.sandbox.user_code import EditedCodeError, UserCodeError
from rlstreams.workers.weights.channel import WeightChannel

START_S = 10.0
CLOSE_S = 40.0  # a server that is ours is given time to end
_APART = 4  # times the engine's capacity: samples that only wait for others
_MANY, _MOST = 8, 0.9  # samples that wait for rewards, and their share: these hold up the worker
# Why a sample is set aside; any other error ends the worker.
REASONS: Mapping[type[BaseException], Reason] = {
    PromptTooLongError: Reason.PROMPT_TOO_LONG,
    EngineError: Reason.ENGINE,
    RewardError: Reason.REWARD,
    UserCodeError: Reason.ENVIRONMENT,
    TimeoutError: Reason.DEADLINE,
}


class RolloutStage:
    """Generate and judge samples; pull weights as they are announced.

    consumes:     prompts (Prompt, one sample each); policy-versions (PolicyPublished)
    produces:     trajectories (Trajectory), dead-letters; policy-pulls (PullRequested,
                  PolicyLoaded); worker-events
    waits for:    first weights, before it joins its group, which it leaves while no server is up;
                  a prompt; a version at or above the prompt's `min_policy_version`
    unblocked by: prompts issuing; trainer publishing
    """

    def __init__(
        self,
        context: Context,
        bus: Bus,
        engine: Engine,
        channel: WeightChannel,
        player: Player[Any],
    ) -> None:
        self._context = context
        self._engine = engine
        self._player = player
        self._loop = EngineThread()
        self._judge = judged_by(context.config, context.files)
        self.reporter = Reporter(context)
        self._puller = PolicyPuller(
            context, bus, channel, self.reporter, lambda *of: self._loop.submit(engine.pull(*of))
        )
        self._waiting: list[Record[Prompt]] = []
        self._running: dict[Hashable, Record[Prompt]] = {}  # begun and not finished
        # begun and ended, not yet concluded
        self._ended: dict[Hashable, asyncio.Task[Rolled]] = {}
        self._num_sampled = 0
        self._may_begin = True  # False: it has no shift on its device, or its shift ends
        self._offloading = Offloading(
            lambda: self._loop.submit(self._sleep()), lambda: self._loop.submit(self._wake())
        )
        self._loop.wait(engine.start(), START_S, f"engine {engine.name}")
        opening = player.open(lambda: self._puller.loads)
        self._loop.wait(opening, START_S, "the player of samples")

    def room(self) -> int:
        """Room for twice the engine's capacity: while it is full, as many samples wait.

        Samples that need none of it, as those that wait for a slow judge, leave it to others: up to
        `_APART` times as many.
        """
        capacity = self._engine.capacity
        apart = min(self._player.num_apart, _APART * capacity)
        return max(0, 2 * capacity + apart - self.num_open - self._player.num_late)

    @property
    def most(self) -> int:
        """Room while the engine has the largest capacity that it may ever have."""
        return 2 * self._engine.max_capacity

    def begin(self, record: Record[Event]) -> None:
        """Let a sample wait until the engine holds the version that it asks for."""
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
        over = map(self._finished, self._player.over(self._context, self._judge))
        return [one for one in (*over, *found) if one is not None]

    def _finished(self, one: Concluded) -> Finished | None:
        self.reporter.count(**one.counts)
        return None if one.outputs is None else Finished(raw=one.record.raw, outputs=one.outputs)

    def _start_waiting(self) -> None:
        held = self._engine.policy_version
        if held not in self._puller.loads:
            return
        self._waiting = self._player.sift(self._waiting)
        current = [r for r in self._waiting if r.event.min_policy_version <= held]
        ready = self._player.ready(current, len(self._running))
        begun: dict[Hashable, Record[Prompt]] = {id(record): record for record in ready}
        if begun:
            reach(CrashPoint.FORWARD_BEFORE)
            self._running |= begun
            self._waiting = [record for record in self._waiting if id(record) not in begun]
            self._loop.start({key: self._player.roll_out(record) for key, record in begun.items()})

    def _conclude(self, key: Hashable) -> Finished | None:
        """Conclude a sample that ended; None: it was given up, or has to wait."""
        record, task = self._running[key], self._ended[key]
        if not task.cancelled():
            reach(CrashPoint.FORWARD_AFTER)
            if (error := task.exception()) is not None:
                return self._fail(key, error)
            rolled, loads = task.result(), self._puller.loads
            unknown = [version for version in rolled.versions if version not in loads]
            if unknown and (self._puller.pulling is not None or min(unknown) > max(loads)):
                return None  # a trajectory names only loads whose records are written
            if unknown:  # a pull failed behind its load, and will not be tried again
                self._roll_out_again(key)
                return None
        del self._running[key], self._ended[key]
        if task.cancelled():
            return None
        return self._finished(
            self._player.concluded(record, rolled, loads, self._context, self._judge)
        )

    def _roll_out_again(self, key: Hashable) -> None:
        self._waiting.append(self._running.pop(key))
        del self._ended[key]
        self.reporter.count(given_up=1)

    def _fail(self, key: Hashable, error: BaseException) -> Finished:
        reason = next((name for kind, name in REASONS.items() if isinstance(error, kind)), None)
        if reason is Reason.ENGINE and not self._engine.is_ready:
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
        dead_letter = set_aside(
            self._context, record, reason=reason, detail=str(error), permanent=is_permanent
        )
        return Finished(raw=record.raw, outputs=(dead_letter,))

    def give_up(self, partitions: Set[Partition]) -> None:
        """End the requests of these partitions: their new owner samples them anew."""
        waiting = [one for one in self._waiting if one.raw.partition not in partitions]
        running = {k for k, one in self._running.items() if one.raw.partition in partitions}
        self.reporter.count(given_up=len(self._waiting) - len(waiting) + len(running))
        self._player.give_up({partition.number for partition in partitions})
        self._waiting = waiting
        for key in running & self._ended.keys():  # there is nothing left of them to cancel
            del self._running[key], self._ended[key]
        self._loop.cancel(running)

    def give_up_device(self) -> bool:
        """Cut what is sampled, once no pull is under way; it goes on in the next shift."""
        self._may_begin = False
        return self._puller.pulling is None and self._offloading.to(here=False)

    def take_device(self) -> bool:
        """Load back, or wait for a first server; where that lost the weights, a pull is next."""
        self._may_begin = self._offloading.to(here=True) and self._engine.is_up
        return self._may_begin

    async def _sleep(self) -> None:
        self._player.clock.stop()
        await self._engine.sleep()

    async def _wake(self) -> None:
        await self._engine.wake()
        self._player.clock.go_on()

    def announcements(self) -> Sequence[Outgoing]:
        """Pulls and reports."""
        held = self._engine.policy_version
        self.reporter.policy_version = held
        self.reporter.servers(self._engine.servers)
        self.reporter.server_loads = self._engine.server_loads
        self.reporter.gateway = self._player.address
        self.reporter.figures = {"open": self.num_open, "versions": [held]}
        # Of all that was sampled, what is in no trajectory was sampled in vain.
        sampled, self._num_sampled = self._num_sampled, self._engine.num_sampled
        self.reporter.count(sampled_tokens=self._num_sampled - sampled)
        state, detail = "waiting", self._player.waits_for
        if not self._may_begin:
            state, detail = OFFLOADED, AWAITS_SHIFT
        elif self._offloading.was_used and self._puller.pulling is not None:
            state, detail = "pulling", f"policy version {self._puller.pulling}"
        elif len(self._running) > self._player.num_waiting:
            is_judging = self._player.num_unjudged >= max(_MANY, _MOST * len(self._running))
            detail = detail or ("for rewards" if is_judging else "")
            state, detail = "working", f"and waiting {detail}" if detail else ""
        elif self._waiting and not self._running:
            wanted = min(record.event.min_policy_version for record in self._waiting)
            detail = f"for policy version {wanted}, holds {held}"
        elif self.is_out and self._puller.loads:
            detail = "for a server"
        elif not self.may_join:
            detail = "for its first weights"
        elif not detail:
            detail = "for prompts"
        awaited = [url for url, name in self._engine.servers.items() if name == "starting"]
        absent = f"no answer yet from {', '.join(awaited)}" if awaited else ""
        why = (detail, self._puller.trouble, self._engine.trouble, absent)
        self.reporter.state(state, "; ".join(filter(None, why)))
        return [*self._puller.news(), *self.reporter.due()]

    @property
    def num_open(self) -> int:
        """Samples that wait, or were begun and are not finished."""
        return len(self._waiting) + len(self._running)

    @property
    def may_join(self) -> bool:
        """Whether it holds weights, for which a server may have to start; or has had to wait for
        its shift on a device, which only work in its partitions brings."""
        return self._offloading.was_used or self._engine.policy_version in self._puller.loads

    @property
    def is_out(self) -> bool:
        """Whether none of its servers is up, and none sleeps for another role's shift."""
        return not (self._offloading.was_used or self._engine.is_up)

    def close(self) -> None:
        """Give up open samples; they stay in flight."""
        self._loop.wait(self._player.stop(), CLOSE_S, "ending the player of samples")
        self._loop.wait(self._engine.close(), CLOSE_S, f"closing engine {self._engine.name}")
        self._loop.close()
        self._player.close()
        self._puller.close()


def make_worker(
    context: Context, bus: Bus, engine: Engine, channel: WeightChannel, player: Player[Any]
) -> StageLoop:
    """The role, ready to run."""
    stage = RolloutStage(context, bus, engine, channel, player)
    interval_s = context.config.rollout.commit_interval_s
    return StageLoop(
        *(context, bus, stage, PROMPTS.name),
        reporter=stage.reporter,
        interval_s=interval_s,
        commits=player.commits,
    )

"""Role `trainer`: scored trajectories in, steps and policy versions out."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from rlstreams.schemas.events import TrainerStarted
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import now_ms
from rlstreams.streams.log.crash_points import CrashPoint, reach
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.trainer.claim import Intruders, claim
from rlstreams.workers.trainer.expired import drop_expired
from rlstreams.workers.trainer.facts import make_claim, versions
from rlstreams.workers.trainer.guard import ALARM, Guard, coarsened
from rlstreams.workers.trainer.intake.admission import Plan
from rlstreams.workers.trainer.ledger_writer import LedgerWriter
from rlstreams.workers.trainer.publisher import Publisher
from rlstreams.workers.trainer.recovery import Recovery
from rlstreams.workers.trainer.redo.redo import drift_error
from rlstreams.workers.trainer.replaced import FINAL_IN_LOOP, unless_replaced
from rlstreams.workers.trainer.samples import TrainerSamples
from rlstreams.workers.trainer.shifts import TrainerShifts
from rlstreams.workers.trainer.training.resumable import Resumable
from rlstreams.workers.trainer.training.step_cost import waits
from rlstreams.workers.trainer.training.training import Trained, Training, UntrainableSample
from rlstreams.workers.weights.channel import WeightServer
from rlstreams.workers.weights.store.writer import StoreWriter

POLL_S = 0.005  # of an iteration; it returns early when records are there
PAUSE_S = 30.0  # for our own pause to come back by the log
GO_ON = (
    "The run is paused. A worker that is killed pulls its weights anew; `rlstreams inspect` shows "
    "a sample. `rlstreams control resume` trains on this batch too and goes on; if this noise is "
    "sound, raise guard.limit or guard.factor, or set guard.action to 'warn'"
)


class TrainerWorker:
    """The fold over the ledger, extended by one step after another.

    consumes:     scored-trajectories, dead-letters (by position); policy-pulls (PullRequested)
    produces:     steps (TrainerStarted, StepCompleted, GroupsDropped, TrainerHeartbeat,
                  StepsRedone, RedoDrifted); policy-versions (PolicyPublished, PolicyStored);
                  dead-letters
    waits for:    `groups_per_step` complete groups
    unblocked by: logprob sending; its own drops, which let prompts issue replacements
    """

    def __init__(
        self,
        context: Context,
        bus: Bus,
        training: Training,
        server: WeightServer,
        store: StoreWriter | None = None,
    ) -> None:
        """Claim the run; only after the claim is the log read further and anything opened."""
        self._context, self._config = context, context.config.trainer
        self._training = training
        self._log = context.log
        self._compute_thread = ThreadPoolExecutor(1, "trainer-compute")
        self._reporter = Reporter(context)
        for slowdown, why in training.slower.items():
            self._log.warning(slowdown, why=why)

        def event(ledger: Ledger) -> TrainerStarted:
            numerics = versions(training.numerics)
            return make_claim(context, bus, ledger, training.model_hash, numerics)

        self._guard = Guard(context.config.guard)
        claimed = claim(context, bus, event, lambda step: self._guard.learn(step.metrics))
        epoch, at = claimed.claim.epoch, claimed.position.offset
        ledger = self._ledger = claimed.ledger
        self._step, self._version = ledger.last_step, ledger.policy_version
        writer = self._writer = LedgerWriter(
            context, claimed.producer, epoch, self._reporter, at, self._step + 1
        )
        self._target, self._code = claimed.claim.step_target, claimed.claim.code
        self._done = self.is_paused = False
        self._drain_until = 0.0  # monotonic; 0: it does not drain
        self._life: Resumable[None] = self._live()
        self._waits_for: Future[Any] | None = None
        self._intruders = Intruders(context, bus, claimed, writer)
        with unless_replaced(self._writer.prove):
            self._publisher = Publisher(context, bus, server, training, writer, epoch, store)
            if self._config.on_expired == "drop":
                drop_expired(bus, ledger, writer, self._log)
            self._recovery = Recovery(context, bus, ledger, training, self._compute, writer)
            self._shifts = TrainerShifts(training, writer, self._compute)
            self._samples = TrainerSamples(
                context, bus, ledger, training, writer, self._reporter, writer.while_reading
            )

    def _live(self) -> Resumable[None]:
        """The training loop. Each `yield` waits for a computation, while iterations go on."""
        yield from self._redo()
        yield from self._publisher.publish(self._compute, self._step, self._version)
        idle_s = 0.0  # monotonic time at which the loop became idle; 0: it is not
        while self._step < self._target and not self._drain_until:
            yield from self._shifts.between_steps(self._may_wait)
            if self._drain_until:
                continue
            yield from self._recovery.look()
            if self._recovery.is_due(self._step, self._samples.positions):
                yield from self._recovery.begin(self._step, self._version)
                continue  # a trainer asked to drain meanwhile begins no step
            plan = None if self.is_paused else self._samples.plan(self._version)
            if plan is None:
                idle_s = idle_s or time.monotonic()
                missing = "to be resumed" if self.is_paused else self._samples.missing()
                self._writer.set_state("waiting", missing)
                yield None
                continue
            self._writer.set_state("training", f"step {self._step + 1}")
            step = self._step
            yield from self._train(plan, idle_s)
            if self._step > step:
                yield from self._publisher.publish(self._compute, self._step, self._version)
            idle_s = 0.0
        self._samples.drop(self._version, at_once=True)  # groups that are still open stay open
        yield from self._shifts.between_steps(self._may_wait)
        if self._shifts.is_here:  # else the steps since the last checkpoint are redone
            yield from self._recovery.begin(self._step, self._version)
        yield from self._recovery.finish()
        if not self._drain_until:
            if self._context.config.shared_device("trainer"):
                yield from self._shifts.end()
            self._writer.set_state("waiting", "until workers have the last version")
            yield self._compute(self._publisher.finish)
        self._publisher.serve()  # announces versions stored last
        self._writer.set_state("done", "")
        self._writer.heartbeat()
        self._done = True

    def _train(self, plan: Plan, idle_s: float) -> Resumable[None]:
        """Train a step, or drop groups that no step can take. Afterwards no payload is held: the
        next plan may be far off."""
        planned_ms = now_ms()
        waited_ms = round(1000 * (time.monotonic() - idle_s)) if idle_s else 0
        payloads = self._samples.take(plan)
        problem = self._guard.look(payload.scored for payload in payloads)
        if problem and not (yield from self._alarmed(problem)):
            return
        trained: Trained | tuple[UntrainableSample, ...] = yield self._compute(
            self._training.try_train, payloads, plan.masked, plan.policy_version
        )
        if isinstance(trained, Trained):
            waited = waits(planned_ms - waited_ms, planned_ms, [p.scored for p in payloads])
            behind = self._guard.look_behind(trained.metrics, plan.policy_version)
            figures = waited | {"publish_s": self._publisher.seconds}
            if problem or behind:
                figures |= {ALARM: 1.0}  # a restart must not learn from this step either
            trained = replace(trained, metrics=trained.metrics | figures)
            self._complete(plan, trained)
            self._recovery.used(payload.raw for payload in payloads)
            if behind:
                yield from self._alarmed(behind)
            self._guard.learn(trained.metrics)
        else:
            self._samples.set_aside(plan, payloads, trained)
            self._samples.drop(self._version, at_once=True)

    def _alarmed(self, problem: str) -> Resumable[bool]:
        """Pause the run and wait until it is resumed, which accepts the guard's problem.

        Returns: whether to go on; False: the trainer drains.
        """
        if not self._guard.pauses:
            self._log.warning("guard", what=problem)
            return True
        self._writer.pause(f"{problem}. {coarsened(self._context.config.engine.args)}{GO_ON}")
        until_s = time.monotonic() + PAUSE_S
        while not self.is_paused and time.monotonic() < until_s and not self._drain_until:
            yield None
        while self.is_paused and not self._drain_until:
            yield from self._shifts.between_steps(self._may_wait)
            self._writer.set_state("waiting", "to be resumed: the guard has paused the run")
            yield None
        return not self._drain_until

    def _complete(self, plan: Plan, trained: Trained) -> None:
        """Commit the step, which is then done."""
        # Before the step, because a restart goes on behind the records of the dead letters.
        self._samples.drop(self._version, at_once=True)
        self._intruders.refuse_before_step()
        self._writer.step_completed(self._step + 1, plan, trained, *self._samples.after(plan))
        self._samples.close_groups(plan.group_ids)
        self._step, self._version = self._step + 1, plan.policy_version + 1
        self._ledger.hashes[self._version] = trained.weight_hash

    def _redo(self) -> Resumable[None]:
        """Report the redone steps. If weights differ, stop, or go on with our own under a new
        version: only a checkpoint holds them, because no redo elsewhere makes them."""
        redone = yield from self._recovery.come_back()
        self._training.configure(self._config, self._code)
        self._writer.redone(redone)
        if self._config.is_redo_exact and (unequal := redone.first_unequal) is not None:
            before = self._ledger.claims[self._ledger.steps[unequal.step].epoch]
            now = versions(self._training.numerics)
            raise drift_error(unequal, before.versions, now, before.code)
        expected, actual = self._ledger.weight_hash, self._training.weight_hash
        is_foreign = self._ledger.is_disowned(self._step) and expected != actual
        if redone.last_unequal is not None or is_foreign:
            self._version += 1
            self._writer.drifted(self._step, self._version, expected, actual)
            self._ledger.hashes[self._version] = actual
            yield from self._recovery.begin(self._step, self._version)
            yield from self._recovery.finish()
            self._writer.set_state("redo", "")

    def tick(self) -> None:
        """Read new records, commit drops, serve pulls, advance the step, and report.

        Raises:
            FencedError: a successor took over, whatever error that caused here.
        """
        with unless_replaced(self._writer.prove, FINAL_IN_LOOP):
            reach(CrashPoint.POLL_BEFORE)
            num_old = self._samples.poll(POLL_S)
            if self._writer.state in ("redo", "waiting"):  # else another count must grow
                self._reporter.count(fetched_records=num_old)
            reach(CrashPoint.POLL_AFTER)
            self._intruders.refuse()
            self._samples.drop(self._version)
            self._publisher.serve()
            self._training.check()
            self._resume()
            learner = self._training.learner
            self._writer.progressed(learner.num_micro_batches, learner.slow_calls())
            self._writer.heartbeat()

    def _resume(self) -> None:
        if self._done or (self._waits_for is not None and not self._waits_for.done()):
            return
        result = self._waits_for.result() if self._waits_for is not None else None
        try:
            self._waits_for = self._life.send(result)
        except StopIteration:
            self._done = True

    def drain(self) -> None:
        """Finish the step, and write a checkpoint."""
        self._drain_until = time.monotonic() + self._context.config.deadlines.drain_s

    def give_up_device(self) -> bool:
        """See `Sharing`."""
        return self._shifts.give_up()

    def take_device(self) -> bool:
        """See `Sharing`."""
        return self._shifts.take()

    def _may_wait(self) -> bool:
        return not self._drain_until or time.monotonic() < self._drain_until

    @property
    def done(self) -> bool:
        """Whether it has drained, or reached the step target."""
        return self._done

    def close(self) -> None:
        """Release everything."""
        self._compute_thread.shutdown(wait=False, cancel_futures=True)
        parts = (
            self._recovery,
            self._training,
            self._publisher,
            self._samples,
            self._intruders,
            self._writer,
        )
        for part in parts:
            part.close()

    def _compute(self, work: Callable[..., Any], *args: object) -> Future[Any]:
        return self._compute_thread.submit(work, *args)

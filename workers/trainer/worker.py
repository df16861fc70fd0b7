"""Role `trainer`: scored trajectories in, steps and policy versions out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rlstreams.schemas.events import PartitionPosition, PullRequested, TrainerStarted
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.crash_points import CrashPoint, reach
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import POLICY_PULLS
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.foreign import ForeignRecords
from rlstreams.workers.loop.log import get as get_log
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.trainer.claim import claim
from rlstreams.workers.trainer.expired import drop_expired
from rlstreams.workers.trainer.facts import make_claim, versions
from rlstreams.workers.trainer.intake.admission import Admission, Plan
from rlstreams.workers.trainer.intake.intake import Intake
from rlstreams.workers.trainer.intake.payloads import Payload, Payloads
from rlstreams.workers.trainer.ledger_writer import LedgerWriter
from rlstreams.workers.trainer.redo.recovery import Recovery
from rlstreams.workers.trainer.redo.redo import Coroutine, Redone, drift_error
from rlstreams.workers.trainer.replaced import FINAL_IN_LOOP, unless_replaced
from rlstreams.workers.trainer.training.training import Trained, Training, UntrainableSample
from rlstreams.workers.weights.channel import WeightServer

POLL_S = 0.005  # of a turn; it returns early when records are there
DROP_EVERY_S = 0.25
_REPORTED = {"training": "working", "redo": "starting", "done": "stopped"}  # as any role says it


class TrainerWorker:
    """The fold over the ledger, extended by one step after another.

    consumes:     scored-trajectories, dead-letters (by position); policy-pulls (PullRequested)
    produces:     steps (TrainerStarted, StepCompleted, GroupsDropped, TrainerHeartbeat,
                  StepsRedone, RedoDrifted); policy-versions (PolicyPublished); dead-letters
    waits for:    `groups_per_step` complete groups
    unblocked by: logprob sending; its own drops, which let prompts issue replacements
    """

    def __init__(
        self, context: Context, bus: Bus, training: Training, server: WeightServer
    ) -> None:
        self._context = context
        self._config = context.config.trainer
        self._bus = bus
        self._training = training
        self._server = server
        self._log = get_log(context.role, context.worker, context.instance)
        self._compute_thread = ThreadPoolExecutor(1, "trainer-compute")
        self._reporter = Reporter(context)
        for what, why in training.slower.items():
            self._log.warning(what, why=why)
        claimed = claim(context, bus, self._claim)
        self._ledger = claimed.ledger
        self._writer = LedgerWriter(
            context,
            claimed.producer,
            claimed.claim.epoch,
            self._reporter,
            claimed.position.offset,
        )
        self._step = self._ledger.last_step
        self._version = self._ledger.policy_version
        self._target = claimed.claim.step_target
        self._state = "redo"
        self._draining = False
        self.is_paused = False
        self._next_drop = 0.0
        self._num_micro_batches = 0  # as it was counted last
        self._coroutine: Coroutine[None] = self._live()
        self._waits_for: Future[Any] | None = None
        self._done = False
        with unless_replaced(self._prove):
            self._set_up(claimed.claim.epoch)

    def _set_up(self, epoch: int) -> None:
        """All that is asked of the log, and opened, behind the claim."""
        context, bus, training = self._context, self._bus, self._training
        self._server.open(epoch)
        if self._config.on_expired == "drop":
            drop_expired(bus, self._ledger, self._writer, self._log)
        self._recovery = Recovery(context, bus, self._ledger, training, self._compute, self._log)
        # One size for all groups: a claim with another one is refused (`facts.check_same_run`).
        size = context.config.prompts.group_size
        self._admission = Admission(self._config, self._ledger.closed, group_size=size)
        self._payloads = Payloads(bus, self._while_fetching)
        self._intake = Intake(
            context,
            bus,
            self._admission,
            self._payloads,
            vocab_size=training.vocab_size,
            max_tokens=training.max_tokens,
            start=self._ledger.positions,
            hashes=self._ledger.hashes,
            reporter=self._reporter,
            routers=training.routers,
        )
        self._foreign = ForeignRecords(context.worker, bus.schemas())
        pulls = Partition(POLICY_PULLS.name, 0)
        self._pulls = bus.reader({pulls: bus.ends(POLICY_PULLS.name)[pulls]})

    def turn(self) -> None:
        """Read new records, commit drops, serve pulls, advance the step, and report.

        Raises:
            FencedError: a successor took over, whatever was met because of it.
        """
        with unless_replaced(self._prove, FINAL_IN_LOOP):
            self._turn()

    def _turn(self) -> None:
        reach(CrashPoint.POLL_BEFORE)
        num_old = self._intake.poll(POLL_S)
        if self._state in ("redo", "waiting"):  # else something else is to come forward
            self._reporter.count(fetched_records=num_old)
        reach(CrashPoint.POLL_AFTER)
        self._drop()
        self._serve()
        self._training.check()
        self._live_on()
        self._count_progress()
        self._heartbeat()

    def drain(self) -> None:
        """Finish the step, write a checkpoint."""
        self._draining = True

    @property
    def done(self) -> bool:
        """Drained, or at the step target."""
        return self._done

    def close(self) -> None:
        """Release everything."""
        self._compute_thread.shutdown(wait=False, cancel_futures=True)
        self._training.close()
        self._server.close()
        self._intake.close()
        self._pulls.close()
        self._writer.close()

    def _live(self) -> Coroutine[None]:
        """The training loop. Each `yield` waits for a computation, while turns go on."""
        yield from self._redo()
        yield from self._publish()
        while self._step < self._target and not self._draining:
            if self._recovery.is_due(self._step, self._intake.positions):
                yield from self._checkpoint()
                continue  # who was asked to drain meanwhile begins no step
            plan = None if self.is_paused else self._admission.plan(self._version)
            if plan is None:
                self._tell("waiting", "to be resumed" if self.is_paused else self._missing())
                yield None
                continue
            self._tell("training", f"step {self._step + 1}")
            yield from self._train(plan)
            # Also where there was no step: its server may have let go of the version.
            yield from self._publish()
        self._next_drop = 0.0
        self._drop()  # what is decided is told; what is open stays open
        yield from self._checkpoint()
        if not self._draining:  # the last version is evaluated, and nobody else has it
            self._tell("waiting", "until workers have the last version")
            deadline_s = self._context.config.weights.pull_deadline_s
            yield self._compute(self._server.finish, deadline_s)
        self._tell("done", "")
        self._heartbeat()
        self._done = True

    def _train(self, plan: Plan) -> Coroutine[None]:
        """A step, or the drop of groups that no step can take. Behind it no payload is held: until
        the next plan may be long."""
        payloads = self._payloads.take([sample.seen.position for sample in plan.samples])
        yield self._compute(self._server.before_change)
        trained: Trained | tuple[UntrainableSample, ...] = yield self._compute(
            self._training.try_train, payloads, plan.masked, plan.policy_version
        )
        if isinstance(trained, Trained):
            self._complete(plan, trained)
            self._recovery.used(payload.raw for payload in payloads)
        else:
            self._set_aside(plan, payloads, trained)

    def _redo(self) -> Coroutine[None]:
        """Report the redone steps. If weights differ, stop, or go on under a new version."""
        redone = yield from self._recovery.come_back(self._while_fetching)
        self._training.configure(self._config)
        if redone.num_steps or redone.passed_over:
            self._writer.redone(redone)
            self._log.info("redone", steps=redone.num_steps, equal=redone.num_equal)
        if self._config.is_redo_exact and redone.first_unequal is not None:
            unequal = redone.first_unequal
            before = self._ledger.claims[self._ledger.steps[unequal.step].epoch]
            raise drift_error(unequal, before.versions, self._versions())
        if redone.last_unequal is not None:
            yield from self._drifted(redone)

    def _drifted(self, redone: Redone) -> Coroutine[None]:
        """Go on with our own weights. Only a checkpoint holds them: no redo elsewhere makes them"""
        assert redone.last_unequal is not None
        expected, actual = redone.last_unequal.expected, redone.last_unequal.actual
        self._version += 1
        self._writer.drifted(self._step, self._version, expected, actual)
        self._ledger.hashes[self._version] = actual
        self._log.warning("redo_drifted", step=self._step, policy_version=self._version)
        yield from self._checkpoint()
        self._tell("redo", "")

    def _publish(self) -> Coroutine[None]:
        """Serve the version in hand, then announce it."""
        manifest = yield self._compute(
            self._server.publish,
            self._version,
            self._training.learner.weights(),
            self._training.weight_hash,
        )
        self._writer.published(self._step, manifest, self._server)
        # After the commit, which a trainer that was replaced does not get through.
        self._server.retire(self._context.config.weights.versions_served)
        self._reporter.policy_version = self._version
        self._log.info("published", policy_version=self._version, hash=manifest.weight_hash[:12])

    def _checkpoint(self) -> Coroutine[None]:
        if self._recovery.saved_step == self._step:
            return
        self._tell("saving", f"a checkpoint of step {self._step}")
        epoch = self._ledger.epoch
        yield from self._recovery.save(epoch, self._step, self._version, self._prove)
        self._reporter.count(checkpoints=1)

    def _complete(self, plan: Plan, trained: Trained) -> None:
        """Commit the step; from here on it is done."""
        self._next_drop = 0.0
        self._drop()  # a restart goes on behind what the letters are about
        step = self._step + 1
        low = self._intake.low_watermarks(plan.group_ids)
        positions = [
            PartitionPosition(topic=p.topic, partition=p.number, offset=offset)
            for p, offset in sorted(low.items())
        ]
        closed = self._admission.closed_after(plan.group_ids)
        self._writer.step_completed(step, plan, trained, closed, positions)
        # A sample may have come since, of which the plan knew a letter alone.
        self._payloads.release(self._admission.positions_of(plan.group_ids))
        self._admission.close(plan.group_ids)
        self._step, self._version = step, plan.policy_version + 1
        self._ledger.hashes[self._version] = trained.weight_hash
        self._reporter.count(
            steps=1,
            samples=len(plan.samples),
            tokens=trained.batch.num_loss_tokens,
            busy_s=trained.seconds,
        )
        self._log.info(
            "step_completed",
            step=step,
            policy_version=self._version,
            loss=trained.loss,
            reward=trained.metrics["reward"],
            duration_s=round(trained.seconds, 4),
        )

    def _set_aside(
        self, plan: Plan, payloads: Sequence[Payload], untrainable: Sequence[UntrainableSample]
    ) -> None:
        """Drop the groups of samples that no step can take; plan the other groups anew.

        The drop is committed before the next step, so a successor plans that step alike.
        """
        refused: dict[str, tuple[str, str]] = {}
        for bad in untrainable:
            sample = payloads[bad.index].scored.trajectory
            told = f"sample {sample.sample}: {bad.detail}"
            refused.setdefault(sample.group_id, (str(bad.reason), told))
            self._intake.set_aside(payloads[bad.index], bad.reason, bad.detail)
            self._log.warning("set_aside", group=sample.group_id, reason=bad.reason, what=told)
        for payload in payloads:
            self._payloads.put(payload)
        self._admission.give_back(plan, refused)
        self._next_drop = 0.0
        self._drop()

    def _drop(self) -> None:
        """Drops never wait for a step: a dropped group lets `prompts` issue another one."""
        now = time.monotonic()
        if now < self._next_drop:
            return
        self._next_drop = now + DROP_EVERY_S
        groups = self._admission.drops(self._version, now)
        letters, self._intake.letters = self._intake.letters, []
        if not groups and not letters:
            return
        ids = [group.group_id for group in groups]
        closed = self._admission.closed_after(ids)
        self._writer.groups_dropped(groups, closed, letters)
        self._payloads.release(self._admission.positions_of(ids))
        self._admission.close(ids)
        self._reporter.count(dropped_groups=len(groups), dead_letters=len(letters))

    def _count_progress(self) -> None:
        """Count micro-batches, so that the supervisor sees progress within a long step."""
        done = self._training.learner.num_micro_batches
        if done > self._num_micro_batches:
            self._reporter.count(micro_batches=done - self._num_micro_batches)
            self._num_micro_batches = done

    def _serve(self) -> None:
        for record in self._foreign.readable(self._pulls.poll(100, 0.0)):
            if isinstance(record.event, PullRequested):
                self._server.serve(record.event)

    def _live_on(self) -> None:
        if self._done or (self._waits_for is not None and not self._waits_for.done()):
            return
        result = self._waits_for.result() if self._waits_for is not None else None
        try:
            self._waits_for = self._coroutine.send(result)
        except StopIteration:
            self._done = True

    def _claim(self, ledger: Ledger) -> TrainerStarted:
        model_hash = self._training.model_hash
        return make_claim(self._context, self._bus, ledger, model_hash, self._versions())

    def _versions(self) -> dict[str, str]:
        return versions(self._training.numerics)

    def _compute(self, work: Callable[..., Any], *args: object) -> Future[Any]:
        return self._compute_thread.submit(work, *args)

    def _missing(self) -> str:
        num_open = self._admission.num_open_groups
        return f"for {self._config.groups_per_step} complete groups; {num_open} are begun"

    def _tell(self, state: str, detail: str) -> None:
        self._state = state
        self._reporter.state(_REPORTED.get(state, state), detail)

    def _while_fetching(self, num_records: int) -> None:
        """Called in a turn that may read for long: alive, and not stuck as long as records come."""
        if num_records:
            self._reporter.count(fetched_records=num_records)
            self._context.beat()
        self._heartbeat()

    def _prove(self) -> None:
        self._writer.prove(self._state, self._step + 1)

    def _heartbeat(self) -> None:
        self._writer.heartbeat(self._state, self._step + 1)

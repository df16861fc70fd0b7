"""Role `trainer`: scored trajectories in, steps and policy versions out."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from schemas.events import PartitionPosition, PullRequested, TrainerStarted
from streams.bus import Bus
from streams.codec import decoded
from streams.record import Partition
from streams.topics import POLICY_PULLS
from workers.context import Context
from workers.log import get as get_log
from workers.reporter import Reporter
from workers.trainer.admission import Admission, Plan
from workers.trainer.checkpoint import CheckpointStore, Manifest
from workers.trainer.claim import claim
from workers.trainer.facts import make_claim
from workers.trainer.intake import Intake
from workers.trainer.ledger import Ledger
from workers.trainer.office import Office
from workers.trainer.payloads import Payloads
from workers.trainer.redo import Life, RedoError, redo, restore
from workers.trainer.training import Trained, Training
from workers.weights.channel import WeightServer

POLL_S = 0.005  # of a turn; it returns early when records are there
DROP_EVERY_S = 0.25


class TrainerWorker:
    """The fold over the ledger, extended by one step after another.

    consumes:     scored-trajectories, dead-letters (by position); policy-pulls (PullRequested)
    produces:     steps (TrainerStarted, StepCompleted, GroupsDropped, TrainerHeartbeat,
                  RedoDrifted); policy-versions (PolicyPublished); dead-letters
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
        self._store = CheckpointStore(context.folder / "checkpoints")
        claimed = claim(context, bus, self._claim)
        self._ledger = claimed.ledger
        self._office = Office(context, claimed.producer, claimed.claim.epoch, self._reporter)
        self._step = self._ledger.last_step
        self._version = self._ledger.policy_version
        self._target = claimed.claim.step_target
        self._admission = Admission(self._config, self._ledger.closed)
        self._payloads = Payloads(bus, self._heartbeat)
        self._intake = Intake(
            context,
            bus,
            self._admission,
            self._payloads,
            vocab_size=training.vocab_size,
            start=self._ledger.positions,
        )
        pulls = Partition(POLICY_PULLS.name, 0)
        self._pulls = bus.reader({pulls: bus.ends(POLICY_PULLS.name)[pulls]})
        self._state = "redo"
        self._draining = False
        self._next_drop = 0.0
        self._saved_step = -1
        self._life: Life[None] = self._live()
        self._waits_for: Future[Any] | None = None
        self._done = False

    def turn(self) -> None:
        """Read, drop, live on, and say so."""
        self._intake.poll(POLL_S)
        self._drop()
        self._serve()
        self._live_on()
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
        self._server.close()
        self._intake.close()
        self._pulls.close()
        self._office.close()

    def _live(self) -> Life[None]:
        """The algorithm. Each `yield` waits for what computes, while turns go on."""
        yield from self._redo()
        yield from self._publish()
        while self._step < self._target and not self._draining:
            plan = self._admission.plan(self._version)
            if plan is None:
                self._tell("waiting", self._missing())
                yield None
                continue
            self._tell("training", f"step {self._step + 1}")
            payloads = self._payloads.take([sample.seen.position for sample in plan.samples])
            trained: Trained = yield self._compute(
                self._training.train, payloads, plan.masked, plan.policy_version
            )
            self._complete(plan, trained)
            yield from self._publish()
            if self._step % self._config.checkpoint_every == 0:
                yield from self._checkpoint()
        self._tell("draining", "checkpoint")
        yield from self._checkpoint()
        self._tell("done", "")
        self._heartbeat()
        self._done = True

    def _redo(self) -> Life[None]:
        for line in restore(self._store, self._ledger, self._training):
            self._log.warning("checkpoint_passed_over", reason=line)
        self._saved_step = self._training.learner.step_number
        begun_at = self._saved_step
        equal = yield from redo(
            self._bus, self._ledger, self._training, self._compute, self._heartbeat
        )
        self._training.configure(self._config)
        if self._step > begun_at:
            self._log.info("redone", steps=self._step - begun_at, equal=equal)
        if not equal:
            self._drifted()

    def _drifted(self) -> None:
        expected, actual = self._ledger.weight_hash, self._training.weight_hash
        if self._config.redo == "exact":
            raise RedoError(
                f"redo of step {self._step} gave weights {actual}, the ledger says {expected}: "
                'other hardware, threads or libraries? trainer.redo = "tolerate" goes on with them'
            )
        self._version += 1
        self._office.drifted(self._step, self._version, expected, actual)
        self._log.warning("redo_drifted", step=self._step, policy_version=self._version)

    def _publish(self) -> Life[None]:
        """Serve the version in hand, then announce it."""
        manifest = yield self._compute(
            self._server.publish, self._version, self._training.learner.weights()
        )
        self._server.retire(self._context.config.weights.versions_served)
        self._office.published(self._step, manifest, self._server)
        self._reporter.policy_version = self._version
        self._log.info("published", policy_version=self._version, hash=manifest.weight_hash[:12])

    def _checkpoint(self) -> Life[None]:
        if self._saved_step == self._step:
            return
        manifest = Manifest(
            run=self._context.config.run.id,
            epoch=self._ledger.epoch,
            step=self._step,
            policy_version=self._version,
            weight_hash=self._training.weight_hash,
        )
        keep = self._config.checkpoints_kept
        yield self._compute(self._training.save, self._store, manifest, keep)
        self._saved_step = self._step

    def _complete(self, plan: Plan, trained: Trained) -> None:
        """Commit the step; from here on it is done."""
        step = self._step + 1
        low = self._admission.low_watermarks(self._intake.positions(), plan.group_ids)
        positions = [
            PartitionPosition(topic=p.topic, partition=p.number, offset=offset)
            for p, offset in sorted(low.items())
        ]
        closed = self._admission.closed_after(plan.group_ids)
        self._office.step_completed(step, plan, trained, closed, positions)
        self._admission.close(plan.group_ids)
        self._step, self._version = step, plan.policy_version + 1
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
        self._office.groups_dropped(groups, closed, letters)
        self._payloads.release(self._admission.positions_of(ids))
        self._admission.close(ids)
        self._reporter.count(dropped_groups=len(groups), dead_letters=len(letters))

    def _serve(self) -> None:
        for raw in self._pulls.poll(100, 0.0):
            event = decoded(raw).event
            if isinstance(event, PullRequested):
                self._server.serve(event)

    def _live_on(self) -> None:
        if self._done or (self._waits_for is not None and not self._waits_for.done()):
            return
        result = self._waits_for.result() if self._waits_for is not None else None
        try:
            self._waits_for = self._life.send(result)
        except StopIteration:
            self._done = True

    def _claim(self, ledger: Ledger) -> TrainerStarted:
        numerics = self._training.numerics
        versions = {
            "cpu_capability": numerics.cpu_capability,
            "threads": str(numerics.threads),
            "attention": numerics.attention,
            "experts": numerics.experts,
        }
        return make_claim(self._context, self._bus, ledger, self._training.model_hash, versions)

    def _compute(self, work: Callable[..., Any], *args: object) -> Future[Any]:
        return self._compute_thread.submit(work, *args)

    def _missing(self) -> str:
        num_open = self._admission.num_open_groups
        return f"for {self._config.groups_per_step} complete groups; {num_open} are begun"

    def _tell(self, state: str, detail: str) -> None:
        self._state = state
        self._reporter.state({"training": "working", "done": "stopped"}.get(state, state), detail)

    def _heartbeat(self) -> None:
        self._office.heartbeat(self._state, self._step + 1)

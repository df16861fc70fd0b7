"""Writer of the trainer's events: steps, drops, heartbeats, versions; each in its own transaction.

All events go through one producer under one epoch. An aborted commit is retried unchanged: none of
it took effect.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlstreams.schemas.events import (
    ClosedGroups,
    DeadLetter,
    DroppedGroup,
    GroupsDropped,
    PartitionPosition,
    PolicyPublished,
    PolicyStored,
    RedoDrifted,
    SampleRef,
    StepCompleted,
    StepsRedone,
    TrainerHeartbeat,
)
from rlstreams.streams.log.bus import Producer
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topics import CONTROL, DEAD_LETTERS, POLICY_VERSIONS, STEPS
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.control import PAUSED, desired
from rlstreams.workers.loop.pending import commit
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.sandbox.recorded import slow_call
from rlstreams.workers.trainer.intake.admission import Plan
from rlstreams.workers.trainer.redo.redo import Redone
from rlstreams.workers.trainer.training.training import Trained
from rlstreams.workers.weights.channel import WeightManifest, WeightServer
from rlstreams.workers.weights.store.writer import Stored

HEARTBEAT_S = 2.0
POINTED_S = 10.0  # longest time between two heartbeats: they point to the claim
_ROUTINE = (
    "training",
    "waiting",
    "offloaded",
)  # a change among these waits for the next heartbeat
_REPORTED = {"training": "working", "redo": "starting", "done": "stopped"}  # in reports


class LedgerWriter:
    """Writes the events of one trainer, under its epoch."""

    def __init__(
        self,
        context: Context,
        producer: Producer,
        epoch: int,
        reporter: Reporter,
        claim_offset: int = -1,
        next_step: int = 1,
    ) -> None:
        self.state, self._detail, self._trouble, self._of_ranks = "redo", "", "", ""
        self._next_step = next_step
        self._num_micro_batches = 0  # at the last count
        self._log = context.log
        self._beat = context.beat
        self._worker = context.worker
        self._producer = producer
        self._ours: dict[str, Any] = {
            "run": context.config.run.id, "epoch": epoch, "instance": context.instance
        }  # fmt: skip
        self._reporter = reporter
        self._claim_offset = claim_offset
        self._next_heartbeat = 0.0
        self._pointed_s = 0.0
        self._sent_state = ""
        self._written: set[int] = set()  # offsets in `steps`, until they are read there
        self.newest_offset = claim_offset  # of its events there

    def met(self, offset: int) -> bool:
        """Whether the event at this offset of `steps` is ours; may be asked once."""
        if offset not in self._written:
            return False
        self._written.remove(offset)
        return True

    def disown(self, offsets: Sequence[int]) -> None:
        """Announce to every reader that these events under our epoch are not ours."""
        event = self._beat_event(disowned=tuple(offsets))
        self._commit([outgoing(STEPS, event)])

    def set_state(self, state: str, detail: str = "") -> None:
        """Set the trainer's state; the next heartbeat and report carry it."""
        self.state, self._detail = state, detail
        self._report()

    def trouble(self, text: str) -> None:
        """Set a problem beside training that does not stop it; "": none."""
        if text != self._trouble:
            self._trouble = text
            self._report()

    def _report(self) -> None:
        parts = (self._detail, slow_call(), self._of_ranks, self._trouble)
        detail = "; ".join(filter(None, parts))
        self._reporter.state(_REPORTED.get(self.state, self.state), detail)

    def while_reading(self, num_records: int) -> None:
        """Report progress while reading takes long: alive, and not stuck while records come."""
        if num_records:
            self._reporter.count(fetched_records=num_records)
            self._beat()
        self.heartbeat()

    def progressed(self, num_micro_batches: int, of_ranks: str) -> None:
        """Count micro-batches begun so far: the supervisor sees progress within a long step.

        Args:
            of_ranks: what keeps other ranks for long; reports have it.
        """
        self._of_ranks = of_ranks
        if num_micro_batches > self._num_micro_batches:
            self._reporter.count(micro_batches=num_micro_batches - self._num_micro_batches)
            self._num_micro_batches = num_micro_batches

    def saved(self) -> None:
        """Count a checkpoint that is whole."""
        self._reporter.count(checkpoints=1)

    def heartbeat(self) -> None:
        """Write a heartbeat if one is due: two seconds after the last record in `steps`.

        Also at each change of state, except those that come with every step: `steps` is kept for
        ever, and its other records show as much. In any case every ten seconds: a worker that joins
        learns from it where the claim lies.
        """
        self._report()
        records = self._reporter.due()
        state = self.state
        has_changed = state != self._sent_state and not (
            state in _ROUTINE and self._sent_state in _ROUTINE
        )
        now_s = time.monotonic()
        if now_s >= min(self._next_heartbeat, self._pointed_s + POINTED_S) or has_changed:
            self._sent_state, self._pointed_s = state, now_s
            records.append(outgoing(STEPS, self._beat_event()))
        self._commit(records)

    def _beat_event(self, disowned: tuple[int, ...] = ()) -> TrainerHeartbeat:
        return TrainerHeartbeat(
            **self._ours,
            state=self.state,
            next_step=self._next_step,
            detail="",
            at_ms=now_ms(),
            claim_offset=self._claim_offset,
            disowned=disowned,
        )

    def prove(self) -> None:
        """Write a heartbeat now.

        Raises:
            FencedError: this trainer is no longer the owner.
        """
        self._next_heartbeat = 0.0
        self.heartbeat()

    def step_completed(
        self,
        step: int,
        plan: Plan,
        trained: Trained,
        closed: ClosedGroups,
        positions: Sequence[PartitionPosition],
    ) -> None:
        """Commit a step."""
        finished_ms = now_ms()
        event = StepCompleted(
            **self._ours,
            step=step,
            policy_version=plan.policy_version + 1,
            weight_hash=trained.weight_hash,
            previous_hash=trained.previous_hash,
            samples=_sample_refs(plan, trained),
            micro_batches=trained.batch.cut.sizes,
            batch_hash=trained.batch_hash,
            closed=closed,
            positions=tuple(positions),
            loss=trained.loss,
            masked=plan.masked,
            absent=plan.absent,
            metrics=trained.metrics,
            staleness=trained.batch.staleness,
            anchors=trained.batch.anchors,
            started_at_ms=finished_ms - round(1000 * trained.seconds),
            finished_at_ms=finished_ms,
            order=trained.batch.cut.order,
            bins=trained.batch.cut.bins,
            rows=trained.rows,
            value_head_hash=trained.value_head_hash,
            judged_by=Counter(sample.seen.judged_by for sample in plan.samples),
        )
        self._commit([outgoing(STEPS, event)])
        self._next_step = step + 1
        num_tokens = trained.batch.num_loss_tokens
        self._reporter.count(
            steps=1, samples=len(plan.samples), tokens=num_tokens, busy_s=trained.seconds
        )
        self._log.info(
            "step_completed",
            step=step,
            policy_version=event.policy_version,
            loss=trained.loss,
            reward=trained.metrics["reward"],
            duration_s=round(trained.seconds, 4),
        )

    def groups_dropped(
        self,
        groups: Sequence[DroppedGroup],
        closed: ClosedGroups,
        letters: Sequence[DeadLetter],
    ) -> None:
        """Commit that groups are closed without a step, with dead letters of unfit records."""
        records = [outgoing(DEAD_LETTERS, letter) for letter in letters]
        if groups:
            event = GroupsDropped(
                **self._ours,
                groups=tuple(groups),
                closed=closed,
                dropped_at_ms=now_ms(),
            )
            records.append(outgoing(STEPS, event))
        self._commit(records)

    def pause(self, reason: str) -> None:
        """Have every role pause, until an operator resumes the run."""
        event = desired(self._ours["run"], PAUSED, by=self._worker, reason=reason)
        self._commit([outgoing(CONTROL, event)])
        self._log.error("paused", why=reason)

    def redone(self, redone: Redone) -> None:
        """Commit the result of a redo, or the checkpoints that it passed over."""
        if not redone.num_steps and not redone.passed_over:
            return
        event = StepsRedone(
            **self._ours,
            first_step=redone.first_step,
            last_step=redone.last_step,
            num_equal=redone.num_equal,
            seconds=redone.seconds,
            at_ms=now_ms(),
            passed_over=redone.passed_over,
        )
        self._commit([outgoing(STEPS, event)])
        self._log.info("redone", steps=redone.num_steps, equal=redone.num_equal)

    def drifted(self, step: int, policy_version: int, expected: str, actual: str) -> None:
        """Commit that a redo gave other weights, which go on under a version of their own."""
        event = RedoDrifted(
            **self._ours,
            step=step,
            policy_version=policy_version,
            expected_hash=expected,
            actual_hash=actual,
            at_ms=now_ms(),
        )
        self._commit([outgoing(STEPS, event)])
        self._log.warning("redo_drifted", step=step, policy_version=policy_version)

    def published(self, step: int, manifest: WeightManifest, server: WeightServer) -> None:
        """Announce that the version can be pulled."""
        event = PolicyPublished(
            model=self._ours["run"],
            policy_version=manifest.policy_version,
            weight_hash=manifest.weight_hash,
            epoch=self._ours["epoch"],
            instance=self._ours["instance"],
            step=step,
            num_bytes=manifest.num_bytes,
            layout=manifest.layout,
            endpoints=tuple(server.endpoints()),
            versions_served=tuple(server.versions()),
            published_at_ms=now_ms(),
        )
        self._commit([outgoing(POLICY_VERSIONS, event)])
        self._reporter.policy_version = manifest.policy_version
        self._log.info(
            "published", policy_version=manifest.policy_version, hash=manifest.weight_hash[:12]
        )

    def stored(self, news: Sequence[Stored]) -> None:
        """Announce versions in the store, and those that were passed over."""
        ours = {name: self._ours[name] for name in ("epoch", "instance")}
        events = [
            PolicyStored(
                model=self._ours["run"],
                policy_version=one.policy_version,
                weight_hash=one.weight_hash,
                **ours,
                address=one.address,
                files=one.files,
                oldest_version=one.oldest_version,
                missing=one.missing,
                seconds=one.seconds,
                stored_at_ms=now_ms(),
            )
            for one in news
        ]
        self._commit([outgoing(POLICY_VERSIONS, event) for event in events])
        num_bytes = sum(file.num_bytes for one in news for file in one.files)
        missing = sum(len(one.missing) for one in news)
        self._reporter.count(
            stored_versions=len(news), stored_bytes=num_bytes, versions_not_stored=missing
        )

    def close(self) -> None:
        """Release the producer."""
        self._producer.close()

    def _commit(self, records: Sequence[Outgoing]) -> None:
        positions = commit(self._producer, records)
        ours = {position.offset for position in positions if position.topic == STEPS.name}
        if ours:
            self._written |= ours
            self.newest_offset = max(ours)
            self._next_heartbeat = time.monotonic() + HEARTBEAT_S


def _sample_refs(plan: Plan, trained: Trained) -> tuple[SampleRef, ...]:
    return tuple(
        SampleRef(
            group_id=planned.seen.group_id,
            sample=planned.seen.sample,
            partition=planned.seen.position.partition,
            offset=planned.seen.position.offset,
            oldest_policy_version=planned.oldest_policy_version,
            num_tokens=planned.seen.num_tokens,
            reward=planned.seen.reward,
            advantage=advantage,
        )
        for planned, advantage in zip(plan.samples, trained.advantages, strict=True)
    )

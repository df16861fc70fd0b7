"""Samples read and not trained on yet: batches are planned of them, and groups dropped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rlstreams.schemas.events import ClosedGroups, PartitionPosition
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.record import Partition
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.trainer.intake.admission import Admission, Plan
from rlstreams.workers.trainer.intake.intake import Intake
from rlstreams.workers.trainer.intake.payloads import Payload, Payloads
from rlstreams.workers.trainer.ledger_writer import LedgerWriter
from rlstreams.workers.trainer.training.training import Training, UntrainableSample

DROP_EVERY_S = 0.25


class TrainerSamples:
    """Intake, planner and payloads of one trainer.

    Args:
        ledger: up to the claim; with closed groups and positions of the last step.
        while_fetching: see `fetch`.
    """

    def __init__(
        self,
        context: Context,
        bus: Bus,
        ledger: Ledger,
        training: Training,
        writer: LedgerWriter,
        reporter: Reporter,
        while_fetching: Callable[[int], None],
    ) -> None:
        self._section = context.config.trainer
        self._writer = writer
        self._reporter = reporter
        self._log = context.log
        # One size for all groups: a claim with another one is refused (`facts.check_same_run`).
        size = context.config.prompts.group_size
        self._admission = Admission(self._section, ledger.closed, group_size=size)
        limit_bytes = self._section.buffer_mb * 1_000_000
        self._payloads = Payloads(bus, while_fetching, limit_bytes)
        self._intake = Intake(
            context,
            bus,
            self._admission,
            self._payloads,
            vocab_size=training.vocab_size,
            max_tokens=training.max_tokens,
            start=ledger.positions,
            hashes=ledger.hashes,
            reporter=reporter,
            routers=training.routers,
        )
        self._next_drop = 0.0

    def poll(self, timeout_s: float) -> int:
        """See `Intake.poll`."""
        return self._intake.poll(timeout_s)

    def positions(self) -> Mapping[Partition, int]:
        """Next offsets to read."""
        return self._intake.positions()

    def plan(self, version: int) -> Plan | None:
        """The next batch, or None if groups are missing."""
        return self._admission.plan(version)

    def missing(self) -> str:
        """Text on the groups that a plan waits for."""
        num_open = self._admission.num_open_groups
        return f"for {self._section.groups_per_step} complete groups; {num_open} are begun"

    def take(self, plan: Plan) -> list[Payload]:
        """Payloads of the batch; those not held are read from the log again."""
        return list(self._payloads.take([sample.seen.position for sample in plan.samples]))

    def after(self, plan: Plan) -> tuple[ClosedGroups, list[PartitionPosition]]:
        """Groups closed by a step of this batch, and offsets where a successor starts."""
        low = self._intake.low_watermarks(plan.group_ids)
        positions = [
            PartitionPosition(topic=p.topic, partition=p.number, offset=offset)
            for p, offset in sorted(low.items())
        ]
        return self._admission.closed_after(plan.group_ids), positions

    def close_groups(self, group_ids: Sequence[str]) -> None:
        """Release groups that the ledger closed; a plan may know one of their samples as dead."""
        self._payloads.release(self._admission.positions_of(group_ids))
        self._admission.close(group_ids)

    def drop(self, version: int, *, at_once: bool = False) -> None:
        """Commit drops and dead letters, a few times a second: neither waits for a step, because
        `prompts` issues another group for each dropped one."""
        now = time.monotonic()
        if now < self._next_drop and not at_once:
            return
        self._next_drop = now + DROP_EVERY_S
        groups = self._admission.drops(version, now)
        letters, self._intake.letters = self._intake.letters, []
        if not groups and not letters:
            return
        ids = [group.group_id for group in groups]
        self._writer.groups_dropped(groups, self._admission.closed_after(ids), letters)
        self.close_groups(ids)
        self._reporter.count(dropped_groups=len(groups), dead_letters=len(letters))

    def set_aside(
        self, plan: Plan, payloads: Sequence[Payload], untrainable: Sequence[UntrainableSample]
    ) -> None:
        """Drop the groups of samples that no step can take; the other groups are planned anew.

        The drop must be committed before the next step, so that a successor plans that step alike.
        """
        refused: dict[str, tuple[str, str]] = {}
        for bad in untrainable:
            sample = payloads[bad.index].scored.trajectory
            detail = f"sample {sample.sample}: {bad.detail}"
            refused.setdefault(sample.group_id, (str(bad.reason), detail))
            self._intake.set_aside(payloads[bad.index], bad.reason, bad.detail)
            self._log.warning("set_aside", group=sample.group_id, reason=bad.reason, what=detail)
        for payload in payloads:
            self._payloads.put(payload)
        self._admission.give_back(plan, refused)

    def close(self) -> None:
        """Release the reader."""
        self._intake.close()

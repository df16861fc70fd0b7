"""The role `prompts`: turns rows into samples to roll out; the single pacer of a run.

Consumes: the data set, `steps`, and what operators ask for in `dead-letters`.
Produces: `prompts` (all samples of a group in one transaction, to one partition).
Waits for: the trainer's claim, then for closed groups. A branch goes on with what its parent would
have issued next.
Unblocked by: `TrainerStarted`, `StepCompleted` and `GroupsDropped`, all from the trainer; it
commits drops without waiting for a step, so that the two never wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlstreams.schemas.events import EVALUATE, Prompt
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.crash_points import CrashPoint, reach
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import PROMPTS, STEPS
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.dataset.identity import data_hashes
from rlstreams.workers.dataset.limits import PromptEncoder
from rlstreams.workers.dataset.open import open_problems, prompt_encoder
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.foreign import EventReader, ForeignRecords
from rlstreams.workers.loop.pending import commit
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.model.folder import max_tokens_of, read_config
from rlstreams.workers.prompts.issue import PromptWriter
from rlstreams.workers.prompts.issued import Issued, read_issued
from rlstreams.workers.prompts.plan import IssuePlan
from rlstreams.workers.prompts.replacing import DroppedGroups, Replacements

POLL_S = 0.05
MAX_POLL = 1000


class PromptsWorker:
    """One `prompts` worker; implements `rlstreams.workers.loop.runtime.Role`.

    Args:
        encoder: the tokenizer; None: the model folder's.
        poll_s: longest wait of an iteration.

    Raises:
        ConfigError: from the constructor: data set or topics that cannot be used.
        EngineError: from the constructor: the model folder's `config.json` cannot be read.
    """

    def __init__(
        self, context: Context, encoder: PromptEncoder | None = None, *, poll_s: float = POLL_S
    ) -> None:
        self._config = config = context.config
        encoder = encoder or prompt_encoder(config)
        log = context.log
        problems = open_problems(
            config.data,
            encoder,
            max_tokens_of(read_config(model_folder(config.model.path))),
            lambda line: log.info("indexing", data=line),
        )
        for line in problems.summary:
            log.info("data_opened", data=line)
        self._data_hash = data_hashes(config.data).get("train")
        self._writer = PromptWriter(problems.train, problems.held_out, encoder, config.run.seed)
        num_rows = len(problems.train)
        dropped = DroppedGroups(
            config.prompts.max_replacements,
            num_rows,
            lambda group_id: log.warning("no_row_to_replace", group_id=group_id),
        )
        self._ledger = Ledger()
        self._ledger.listen(on_drop=dropped.add, on_branch=dropped.take_over)
        self._reporter = Reporter(context)
        self._poll_s = poll_s
        self._draining = self._is_mended = self.is_paused = False
        bus = context.bus
        self._num_partitions = bus.partitions(PROMPTS.name)
        self._issued = Issued(config.run.seed, self._num_partitions, bus.schemas())
        self._ledger.listen(on_branch=self._issued.branched)
        # The producer comes first: it fences a predecessor, whose records are final from here on.
        self._producer = bus.producer(context.transactional_id)
        foreign = ForeignRecords(context.worker, bus.schemas())
        read_issued(bus, self._issued, config.deadlines.commit_s, foreign.note)
        self._steps = EventReader(bus, bus.beginnings(STEPS.name), context.worker)
        self._history = bus.ends(STEPS.name)  # nothing is issued before it is read up to here
        self._replacements = Replacements(bus, config.run.id, dropped)
        self._plan = IssuePlan(
            config,
            self._ledger,
            self._issued,
            self._replacements,
            num_rows=num_rows,
            num_held_out=len(problems.held_out or ()),
        )

    def tick(self) -> None:
        """Fold new records of `steps` and requests of operators, issue what is due."""
        reach(CrashPoint.POLL_BEFORE)
        records = list(self._steps.poll(MAX_POLL, self._poll_s))
        reach(CrashPoint.POLL_AFTER)
        for record in records:
            self._ledger.apply(record.event, record.position)
        self._replacements.poll()
        self._check_closed()
        self._check_data()
        why_not = self._why_not_issue()
        if why_not == "" and self._issue():
            self._reporter.state("working")
        else:
            self._reporter.state("waiting", why_not or "for closed groups")
        commit(self._producer, self._reporter.due())

    def _issue(self) -> bool:
        """Issue the groups and evaluations that are due; returns whether there were any."""
        if not self._is_mended:
            self._commit(self._plan.torn())
            self._is_mended = True
        version, rows = self._plan.evaluation()
        if rows:
            size = self._config.prompts.evaluate_samples
            samples = [
                prompt
                for row in rows
                for prompt in self._issued.torn_evaluation(version, row)
                or self._writer.evaluation(version, row, size)
            ]
            self._commit(samples)
            self._issued.evaluate(version, rows)
            self._reporter.count(evaluation_samples=len(samples))
        groups, version = self._plan.groups(), self._ledger.policy_version
        size = self._config.prompts.group_size
        self._commit(p for group in groups for p in self._writer.group(group, size, version))
        self._issued.take(groups)
        self._reporter.count(groups=len(groups), samples=len(groups) * size)
        return bool(rows or groups)

    def _commit(self, prompts: Iterable[Prompt]) -> None:
        """Commit in one transaction; the group or the held-out row decides the partition."""
        numbered = [(p.row if p.purpose == EVALUATE else int(p.group_id), p) for p in prompts]
        commit(
            self._producer,
            [outgoing(PROMPTS, p, partition=n % self._num_partitions) for n, p in numbered],
        )

    def drain(self) -> None:
        """Issue nothing more. A group is one transaction, so none is left half issued."""
        self._draining = True

    @property
    def done(self) -> bool:
        """Drained, or the target is reached and the last version's evaluation is issued."""
        # A resumed run may go beyond the target that the last claim knows.
        beyond = self._config.trainer.steps > self._ledger.step_target
        finished = self._ledger.at_target and not beyond and self._history_read()
        return self._draining or (finished and not self._plan.evaluation()[1])

    def close(self) -> None:
        """Release connections; a worker that is done reports its end first."""
        if self.done:
            commit(self._producer, self._reporter.last_report())
        for each in (self._replacements, self._steps, self._producer):
            each.close()

    def _history_read(self) -> bool:
        now = self._steps.positions()
        return all(now.get(partition, 0) >= end for partition, end in self._history.items())

    def _why_not_issue(self) -> str:
        if self._draining:
            return "for the end: draining"
        if not self._history_read():
            return "for the history of steps"
        if self._ledger.claim is None:
            return "for the trainer's claim"
        if not self._replacements.history_read:
            return "for the history of dead-letters"
        return "to be resumed" if self.is_paused else ""

    def _check_closed(self) -> None:
        if self._ledger.highest_closed > self._issued.highest:
            raise ConfigError(
                f"topic steps closed group {self._ledger.highest_closed}, but topic prompts ends "
                f"with group {self._issued.highest}: its records are gone, it was re-created, or "
                "somebody else wrote samples of that group into this run's topics; start a new "
                "run.id"
            )

    def _check_data(self) -> None:
        claim = self._ledger.claim
        claimed = claim.hashes.get("train", "") if claim else ""
        if claimed and self._data_hash != claimed:
            raise ConfigError(
                f"data.train has SHA-256 {self._data_hash}, but the trainer's claim is about "
                f"{claimed}: give both roles the same data and the same [data]"
            )

"""The role `prompts`: turns rows into samples to roll out; the single pacer of a run.

Consumes: the data set, `steps`, and what operators ask for in `dead-letters`.
Produces: `prompts` (all samples of a group in one transaction, to one partition).
Waits for: the trainer's claim, then for closed groups.
Unblocked by: `TrainerStarted`, `StepCompleted` and `GroupsDropped`, all from the trainer; it
commits drops without waiting for a step, so that the two never wait for each other.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence

from rlstreams.schemas.events import NO_VERSION, Prompt
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.crash_points import CrashPoint, reach
from rlstreams.streams.log.errors import AbortedError, BrokerError, ConfigError
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topics import PROMPTS, STEPS
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.dataset.identity import data_hashes
from rlstreams.workers.dataset.limits import PromptEncoder
from rlstreams.workers.dataset.open import open_problems, prompt_encoder
from rlstreams.workers.dataset.order import Order
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.foreign import ForeignRecords
from rlstreams.workers.loop.log import get as get_log
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.model.folder import max_tokens_of
from rlstreams.workers.prompts.issue import PlannedGroup, PromptWriter
from rlstreams.workers.prompts.issued import Issued, read_issued
from rlstreams.workers.prompts.pacing import DroppedGroups, evaluation_due, room
from rlstreams.workers.prompts.replacing import Replacements

POLL_S = 0.05
MAX_POLL = 1000
GROUPS_PER_COMMIT = 64
MAX_ABORTS = 5  # in a row, before the process gives up and starts again


class PromptsWorker:
    """One `prompts` worker; implements `rlstreams.workers.loop.runtime.Role`.

    Args:
        encoder: the tokenizer; None: the model folder's.
        poll_s: longest wait of a turn.

    Raises:
        ConfigError: from the constructor: data set, model or topics that cannot be used.
    """

    def __init__(
        self, context: Context, encoder: PromptEncoder | None = None, *, poll_s: float = POLL_S
    ) -> None:
        self._config = config = context.config
        encoder = encoder or prompt_encoder(config)
        log = get_log("prompts", context.worker, context.instance)
        problems = open_problems(
            config.data,
            encoder,
            longest_sequence(config.model.path),
            lambda told: log.info("indexing", data=told),
        )
        train, held_out = problems.train, problems.held_out
        self._watch = problems.watch
        self._data_hash = data_hashes(config.data).get("train")
        self._writer = PromptWriter(train, held_out, encoder, config.run.seed)
        limit = config.prompts.evaluate_rows or len(held_out or ())
        self._held_out_rows = range(min(limit, len(held_out or ())))
        self._num_rows = len(train)
        self._order = Order(config.run.seed, self._num_rows)
        self._dropped = DroppedGroups(config.prompts.max_replacements)
        self._ledger = Ledger(on_drop=self._dropped.add)
        self._foreign = ForeignRecords(context.worker, context.bus.schemas())
        self._reporter = Reporter(context)
        self._poll_s = poll_s
        self._draining = False
        self.is_paused = False
        self._mended = False
        self._aborts = 0
        for told in problems.told:
            log.info("data_opened", data=told)
        self._connect(context)

    def _connect(self, context: Context) -> None:
        bus, deadline_s = context.bus, self._config.deadlines.commit_s
        self._num_partitions = bus.partitions(PROMPTS.name)
        self._issued = Issued(self._config.run.seed, self._num_partitions, bus.schemas())
        # The producer comes first: it fences a predecessor, whose records are final from here on.
        self._producer = bus.producer(context.transactional_id)
        read_issued(bus, self._issued, deadline_s, self._foreign.note)
        self._torn = self._issued.settle(self._order)
        self._steps = bus.reader(bus.beginnings(STEPS.name))
        self._history = bus.ends(STEPS.name)  # nothing is issued before it is read up to here
        self._replacements = Replacements(
            bus,
            self._config.run.id,
            self._dropped,
            self._foreign,
            num_rows=self._num_rows,
            deadline_s=deadline_s,
        )

    def turn(self) -> None:
        """Fold what `steps` and operators brought, issue what is due."""
        self._watch.check()
        reach(CrashPoint.POLL_BEFORE)
        raws = self._steps.poll(MAX_POLL, self._poll_s)
        reach(CrashPoint.POLL_AFTER)
        for record in self._foreign.readable(raws):
            self._ledger.apply(record.event, record.position)
        self._replacements.poll()
        self._check_closed()
        self._check_data()
        why_not = self._why_not_issue()
        issued = why_not == "" and self._issue()
        if issued:
            self._reporter.state("working")
        else:
            self._reporter.state("waiting", why_not or "closed groups")
        if report := self._reporter.due():
            self._commit(report)

    def drain(self) -> None:
        """Issue nothing more. A group is one transaction, so none is left half issued."""
        self._draining = True

    @property
    def done(self) -> bool:
        """Drained, or the target is reached and the last version's evaluation is issued."""
        # A resumed run may go beyond the target that the last claim knows.
        beyond = self._config.trainer.steps > self._ledger.step_target
        finished = self._ledger.at_target and not beyond and self._history_read()
        return self._draining or (finished and not self._evaluation_rows())

    def close(self) -> None:
        """Release connections; a worker that is done reports its end first."""
        if self.done:
            self._commit(self._reporter.farewell())
        self._replacements.close()
        self._steps.close()
        self._producer.close()

    def _history_read(self) -> bool:
        now = self._steps.positions()
        return all(now.get(partition, 0) >= end for partition, end in self._history.items())

    def _why_not_issue(self) -> str:
        if self._draining:
            return "the end: draining"
        if not self._history_read():
            return "the history of steps"
        if self._ledger.claim is None:
            return "the trainer's claim"
        if not self._replacements.history_read:
            return "the history of dead-letters"
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

    def _issue(self) -> bool:
        """Issue the groups that are due; returns whether there were any."""
        self._mend()
        evaluated = self._evaluate()
        groups = self._planned()
        version = self._ledger.policy_version
        size = self._config.prompts.group_size
        prompts = [p for group in groups for p in self._writer.group(group, size, version)]
        if not self._commit([self._train_record(prompt) for prompt in prompts]):
            return evaluated
        self._issued.take(groups)
        self._reporter.count(groups=len(groups), samples=len(prompts))
        return evaluated or bool(groups)

    def _mend(self) -> None:
        """Write again what a torn transaction left out of groups that are still open."""
        if not self._mended:
            self._issued.forget(self._ledger.is_closed, self._order)
            torn = [p for p in self._torn if not self._ledger.is_closed(int(p.group_id))]
            self._mended = self._commit([self._train_record(prompt) for prompt in torn])

    def _evaluate(self) -> bool:
        version, rows = self._evaluation_version(), self._evaluation_rows()
        size = self._config.prompts.evaluate_samples
        prompts = [
            prompt
            for row in rows
            for prompt in self._issued.torn_evaluation(version, row)
            or self._writer.evaluation(version, row, size)
        ]
        records = [
            outgoing(PROMPTS, prompt, partition=prompt.row % self._num_partitions)
            for prompt in prompts
        ]
        if not rows or not self._commit(records):
            return False
        self._issued.evaluate(version, rows)
        self._reporter.count(evaluation_samples=len(prompts))
        return True

    def _evaluation_version(self) -> int:
        """The version to evaluate now, or NO_VERSION."""
        last, done = self._issued.evaluated_version, self._issued.evaluated_rows
        whole = done.issuperset(self._held_out_rows)
        every = self._config.prompts.evaluate_every
        due = evaluation_due(self._ledger, every, last if whole else last - 1)
        return NO_VERSION if due is None else due

    def _evaluation_rows(self) -> Sequence[int]:
        """Held-out rows that are to be issued for that version."""
        version = self._evaluation_version()
        if version == NO_VERSION:
            return ()
        same = version == self._issued.evaluated_version
        done = self._issued.evaluated_rows if same else frozenset[int]()
        return [row for row in self._held_out_rows if row not in done]

    def _planned(self) -> Sequence[PlannedGroup]:
        """The groups to issue now: rows that a tear left out, replacements, the training order."""
        num = room(
            self._ledger,
            self._issued.num_groups,
            self._config.max_open_groups,
            self._config.trainer.groups_per_step,
        )
        numbers = self._issued.numbers(min(num, GROUPS_PER_COMMIT))
        # Left-out rows come first, so that numbers go on in the order of positions.
        groups = self._in_order(numbers, self._issued.left_out)
        groups += self._replacements.planned(numbers[len(groups) :], self._issued.replaced)
        groups += self._in_order(numbers[len(groups) :], itertools.count(self._issued.position))
        return groups

    def _in_order(self, numbers: Sequence[int], positions: Iterable[int]) -> list[PlannedGroup]:
        """Groups under these numbers for what stands at these positions, as far as both go."""
        groups = []
        for number, position in zip(numbers, positions, strict=False):
            epoch, row = self._order.at(position)
            groups.append(PlannedGroup(number=number, row=row, dataset_epoch=epoch))
        return groups

    def _train_record(self, prompt: Prompt) -> Outgoing:
        partition = int(prompt.group_id) % self._num_partitions
        return outgoing(PROMPTS, prompt, partition=partition)

    def _commit(self, records: Sequence[Outgoing]) -> bool:
        """Commit one transaction; False if it was aborted, and the next turn tries again."""
        if not records:
            return True
        try:
            self._producer.commit(records)
        except AbortedError as err:
            self._aborts += 1
            if self._aborts >= MAX_ABORTS:
                raise BrokerError(
                    f"{self._aborts} transactions in a row were aborted: {err}"
                ) from err
            return False
        self._aborts = 0
        return True


def longest_sequence(model_path: str) -> int | None:
    """The model's longest sequence, in tokens; None if its folder does not name one.

    Raises:
        ConfigError: no readable `config.json` there.
    """
    file = model_folder(model_path) / "config.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ConfigError(f"model.path: cannot read {file}: {err}") from err
    return max_tokens_of(fields)

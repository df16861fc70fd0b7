"""What was issued, as a fold of the topic `prompts`, and the events of what is issued next."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from schemas.events import EVALUATE, NO_VERSION, TRAIN, Prompt, Tensor
from streams.codec import decoded, now_ms
from streams.errors import ConfigError
from streams.record import ID_HEADER, PURPOSE_HEADER, RawRecord
from workers.prompts.dataset import ChatMessages, Dataset, Order, Row

SPARE_TOKENS = 16  # special tokens that a tokenizer may add around a text


class PromptEncoder(Protocol):
    """The part of a tokenizer that issuing needs."""

    @property
    def hash(self) -> str:
        """Names the tokenizer's files."""

    def encode_prompt(self, prompt: str | ChatMessages) -> list[int]:
        """Token ids, special tokens included; the chat template is applied to messages."""


@dataclass(slots=True)
class _Group:
    prompt: Prompt  # any sample of it
    samples: set[int]


class Issued:
    """Which groups and evaluations the topic holds. Fold all of its records, then `settle`.

    Records are decoded once per group: their headers tell the rest.
    """

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}  # torn so far
        self._whole: set[int] = set()
        self._newest_rows: tuple[int, set[int]] = (0, set())
        self._next_number = 0
        self._free: list[int] = []
        self.replaced: set[str] = set()  # groups that have a replacement
        self.position = 0  # in the training order: of the next new group
        self.evaluated_version = NO_VERSION
        self.evaluated_rows: set[int] = set()  # of that version

    def apply(self, raw: RawRecord) -> None:
        """Fold one record.

        Raises:
            schemas.DecodeError: not a prompt.
        """
        group_id, sample, _ = raw.headers.get(ID_HEADER, b"//").decode().split("/")
        if raw.headers.get(PURPOSE_HEADER) == EVALUATE.encode():
            self._evaluation(group_id)
        elif int(group_id) not in self._whole:
            self._training(int(group_id), int(sample), raw)

    def settle(self, order: Order) -> Sequence[Prompt]:
        """End the fold: samples that a torn transaction left out, to be written again.

        A group of which nothing is left gives its number to the next new one.
        """
        known = self._whole | self._groups.keys()
        self._next_number = max(known, default=-1) + 1
        self._free = sorted(set(range(self._next_number)) - known, reverse=True)
        epoch, rows = self._newest_rows
        self.position = order.after(epoch, rows)
        torn = [
            dataclasses.replace(group.prompt, sample=sample)
            for _, group in sorted(self._groups.items())
            for sample in range(group.prompt.group_size)
            if sample not in group.samples
        ]
        self._groups.clear()
        self._whole.clear()
        return torn

    def forget(self, is_closed: Callable[[int], bool]) -> None:
        """A missing group that is closed was not torn but removed by retention: keep its number."""
        self._free = [number for number in self._free if not is_closed(number)]

    @property
    def num_groups(self) -> int:
        """Training groups issued."""
        return self._next_number - len(self._free)

    @property
    def highest(self) -> int:
        """The highest group number issued; -1 if none was."""
        return self._next_number - 1

    def numbers(self, count: int) -> list[int]:
        """Numbers for the next `count` groups; nothing is taken yet."""
        reused = self._free[::-1][:count]
        fresh = range(self._next_number, self._next_number + count - len(reused))
        return [*reused, *fresh]

    def take(self, groups: Sequence[PlannedGroup]) -> None:
        """These groups are committed."""
        for group in groups:
            if self._free and self._free[-1] == group.number:
                self._free.pop()
            else:
                self._next_number = group.number + 1
            if group.replaces is None:
                self.position += 1
            else:
                self.replaced.add(group.replaces)

    def evaluate(self, version: int, rows: Sequence[int]) -> None:
        """The evaluation of `version` on `rows` is committed."""
        if version != self.evaluated_version:
            self.evaluated_version, self.evaluated_rows = version, set()
        self.evaluated_rows.update(rows)

    def _evaluation(self, group_id: str) -> None:
        version, _, row = group_id.removeprefix("e").partition("-")
        if int(version) >= self.evaluated_version:
            self.evaluate(int(version), [int(row)])

    def _training(self, number: int, sample: int, raw: RawRecord) -> None:
        group = self._groups.get(number)
        if group is None:
            event = decoded(raw).event
            if not isinstance(event, Prompt):
                raise ConfigError(f"{raw.position} holds {type(event).__name__}, not Prompt")
            group = self._groups[number] = _Group(event, set())
            self._note(event)
        group.samples.add(sample)
        if len(group.samples) == group.prompt.group_size:
            self._whole.add(number)
            del self._groups[number]

    def _note(self, event: Prompt) -> None:
        if event.replaces is not None:
            self.replaced.add(event.replaces)
            return
        epoch, rows = self._newest_rows
        if event.dataset_epoch > epoch:
            self._newest_rows = (event.dataset_epoch, {event.row})
        elif event.dataset_epoch == epoch:
            rows.add(event.row)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """A group to be issued."""

    number: int
    row: int
    dataset_epoch: int
    replaces: str | None = None
    replacement: int = 0


class PromptWriter:
    """Makes the events of a group or an evaluation from rows."""

    def __init__(
        self, train: Dataset, held_out: Dataset | None, encoder: PromptEncoder, seed: int
    ) -> None:
        self._train = train
        self._held_out = held_out
        self._encoder = encoder
        self._seed = seed

    def check_lengths(self, max_tokens: int) -> None:
        """Refuse rows that leave the model no room for a single token.

        A token stands for at least one byte, so that rows which are short enough in bytes are not
        tokenised for this.

        Raises:
            ConfigError: names the line, its tokens and the limit.
        """
        for dataset in (self._train, self._held_out):
            for row in _rows(dataset):
                if isinstance(row.prompt, str) and row.num_bytes + SPARE_TOKENS <= max_tokens:
                    continue
                num_tokens = len(self._encoded(row))
                if num_tokens > max_tokens:
                    raise ConfigError(
                        f"{row.place}: prompt of {num_tokens} tokens; the model takes at most "
                        f"{max_tokens} so that one can follow; shorten or remove the row"
                    )

    def group(self, plan: PlannedGroup, group_size: int, version: int) -> list[Prompt]:
        """All samples of a training group."""
        first = self._prompt(self._train.row(plan.row), str(plan.number), group_size, version)
        first = dataclasses.replace(
            first,
            dataset_epoch=plan.dataset_epoch,
            replaces=plan.replaces,
            replacement=plan.replacement,
        )
        return [dataclasses.replace(first, sample=sample) for sample in range(group_size)]

    def evaluation(self, version: int, row: int) -> Prompt:
        """One held-out row, to be answered under `version`."""
        assert self._held_out is not None
        prompt = self._prompt(self._held_out.row(row), f"e{version}-{row}", 1, version)
        return dataclasses.replace(prompt, purpose=EVALUATE)

    def _prompt(self, row: Row, group_id: str, group_size: int, version: int) -> Prompt:
        ids = self._encoded(row)
        if not ids:
            raise ConfigError(f"{row.place}: `prompt` has no tokens")
        return Prompt(
            group_id=group_id,
            sample=0,
            group_size=group_size,
            purpose=TRAIN,
            token_ids=Tensor.of(np.asarray(ids, np.int32)),
            tokenizer_hash=self._encoder.hash,
            text=text_of(row.prompt),
            answer=row.answer,
            metadata=row.metadata,
            row=row.number,
            dataset_epoch=0,
            min_policy_version=version,
            seed=self._seed,
            issued_at_ms=now_ms(),
        )

    def _encoded(self, row: Row) -> list[int]:
        try:
            return self._encoder.encode_prompt(row.prompt)
        except ValueError as err:  # a tokenizer that has no chat template, or refuses the messages
            raise ConfigError(f"{row.place}: {err}") from err


def text_of(prompt: str | ChatMessages) -> str:
    """The prompt for verifiers and people: a chat as `role: content` lines."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _rows(dataset: Dataset | None) -> Iterator[Row]:
    if dataset is not None:
        for number in range(len(dataset)):
            yield dataset.row(number)

"""The events to issue next: a group or an evaluation, made from rows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from rlstreams.schemas.events import EVALUATE, TRAIN, Prompt, Tensor
from rlstreams.streams.log.codec import now_ms
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.group_ids import evaluation_group
from rlstreams.workers.dataset.limits import PromptEncoder, encoded
from rlstreams.workers.dataset.row import PromptText, Row
from rlstreams.workers.dataset.table import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """A group to be issued."""

    number: int = -1  # of a group that replaces another: given when it is issued
    row: int  # -1, or none of the data, where a drop could not name it
    dataset_epoch: int
    replaces: str | None = None
    replacement: int = 0  # how often the row was replaced, this time included


class PromptWriter:
    """Makes the events of a group or an evaluation from rows."""

    def __init__(
        self, train: Dataset, held_out: Dataset | None, encoder: PromptEncoder, seed: int
    ) -> None:
        self._train = train
        self._held_out = held_out
        self._encoder = encoder
        self._seed = seed

    def group(self, plan: PlannedGroup, group_size: int, version: int) -> list[Prompt]:
        """All samples of a training group."""
        first = dataclasses.replace(
            prompt_of(
                self._train.row(plan.row),
                self._encoder,
                self._seed,
                group_id=str(plan.number),
                group_size=group_size,
                version=version,
            ),
            dataset_epoch=plan.dataset_epoch,
            replaces=plan.replaces,
            replacement=plan.replacement,
        )
        return [dataclasses.replace(first, sample=sample) for sample in range(group_size)]

    def evaluation(self, version: int, row: int, num_samples: int) -> list[Prompt]:
        """All samples of a held-out row, to be answered under `version`."""
        assert self._held_out is not None
        prompt = prompt_of(
            self._held_out.row(row),
            self._encoder,
            self._seed,
            group_id=evaluation_group(version, row),
            group_size=num_samples,
            version=version,
        )
        first = dataclasses.replace(prompt, purpose=EVALUATE)
        return [dataclasses.replace(first, sample=sample) for sample in range(num_samples)]


def prompt_of(
    row: Row,
    encoder: PromptEncoder,
    seed: int,
    *,
    group_id: str,
    group_size: int = 1,
    version: int = 0,
) -> Prompt:
    """The event of a row's first sample.

    Raises:
        ConfigError: the tokenizer cannot take the prompt, or makes no token of it.
    """
    ids = encoded(encoder, row.prompt, row.place)
    if not ids:
        raise ConfigError(f"{row.place}: `prompt` has no tokens")
    return Prompt(
        group_id=group_id,
        sample=0,
        group_size=group_size,
        purpose=TRAIN,
        token_ids=Tensor.of(np.asarray(ids, np.int32)),
        tokenizer_hash=encoder.hash,
        text=text_of(row.prompt),
        answer=row.answer,
        metadata=row.metadata,
        row=row.number,
        dataset_epoch=0,
        min_policy_version=version,
        seed=seed,
        issued_at_ms=now_ms(),
        is_chat=not isinstance(row.prompt, str),
    )


def text_of(prompt: PromptText) -> str:
    """The prompt for verifiers and people: a chat as `role: content` lines."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)

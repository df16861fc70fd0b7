"""A language model of one table, for tests: a Markov chain behind the `Engine` and `Scorer` ports.

Its weights are `{"table": (V, V) float32}`: the logits of the next token, given the last one. It
loads in no time, needs no model folder, and passes the contract tests of the built-in engine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.engines.base import (
    Scores,
    TokenSequence,
    check_sequences,
    pulled_of,
)
from rlstreams.workers.engines.decode import Generation, draw_next
from rlstreams.workers.engines.local import LocalEngine
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.weights.channel import Pulled, WeightChannel, WeightError
from rlstreams.workers.weights.layout import layout_difference, layout_of, size_bytes

VOCAB_SIZE = 16
EOS = 2
MAX_TOKENS = 128
NUM_EXPERTS = 4  # token t is routed to experts t mod 4 and (t + 1) mod 4 of its one layer


def fake_weights(seed: int) -> dict[str, torch.Tensor]:
    """A table that rarely ends an answer, even at a high temperature."""
    table = np.random.default_rng(seed).normal(size=(VOCAB_SIZE, VOCAB_SIZE))
    table[:, EOS] = -60.0
    return {"table": torch.from_numpy(table.astype(np.float32))}


def _table(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A copy: a file's tensors are the file's memory, and it may be deleted."""
    difference = layout_difference(expected=layout_of(fake_weights(0)), found=layout_of(weights))
    if difference:
        raise WeightError(f"weights do not fit the model: {difference}")
    return weights["table"].clone()


class TableDecoder:
    """Decoder of such a table; each step takes `step_s`."""

    def __init__(self, step_s: float) -> None:
        self.running: list[Generation] = []
        self.num_sampled = 0
        self._step_s = step_s
        self._table = self._away = fake_weights(0)["table"]

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See `Decoder`."""
        self._table = _table(weights)

    def admit(self, joining: list[Generation]) -> None:
        """See `Decoder`."""
        self.running += joining
        self._advance(joining)

    def step(self) -> None:
        """See `Decoder`."""
        time.sleep(self._step_s)
        self._advance(self.running)

    def remove(self, sequence: Generation) -> None:
        """See `Decoder`."""
        self.running.remove(sequence)

    def off_load(self) -> None:
        """See `Decoder`."""
        self._away, self._table = self._table, torch.empty(0)

    def load_back(self) -> None:
        """See `Decoder`."""
        self._table = self._away

    def close(self) -> None:
        """See `Decoder`."""

    def _advance(self, rows: list[Generation]) -> None:
        for sequence in rows:
            new_T = np.array(sequence.token_ids[sequence.experts_stop :])
            experts_TK = np.stack([new_T, new_T + 1], -1) % NUM_EXPERTS
            sequence.experts.append(experts_TK[:, None, :].astype(np.uint8))
            sequence.experts_stop = len(sequence.token_ids)
        draw_next(rows, self._table[[sequence.token_ids[-1] for sequence in rows]])
        self.num_sampled += len(rows)


class FakeEngine(LocalEngine):
    """Samples from the table."""

    def __init__(self, *, slots: int = 8, step_s: float = 0.0, deadline_s: float = 10.0) -> None:
        super().__init__(
            "fake/1",
            TableDecoder(step_s),
            slots=slots,
            vocab_size=VOCAB_SIZE,
            max_tokens=MAX_TOKENS,
            eos_ids=frozenset({EOS}),
            pull_deadline_s=deadline_s,
            answer_deadline_s=deadline_s,
        )


class FakeScorer:
    """Scores under tables."""

    vocab_size = VOCAB_SIZE
    max_tokens = MAX_TOKENS

    def __init__(self, *, deadline_s: float = 10.0) -> None:
        self._deadline_s = deadline_s
        self._tables: dict[int, torch.Tensor] = {}
        self.is_away = False

    @property
    def versions(self) -> Sequence[int]:
        """Versions held, lowest first."""
        return sorted(self._tables)

    def pull(self, published: PolicyPublished, channel: WeightChannel) -> Pulled:
        """Hold one more version."""
        started_s = time.monotonic()
        weights = dict(channel.pull(published, self._deadline_s))
        table = _table(weights)
        self._tables[published.policy_version] = table
        return pulled_of(published, size_bytes(weights), started_s)

    def drop(self, policy_version: int) -> None:
        """Hold this version no longer."""
        self._tables.pop(policy_version, None)

    def off_load(self) -> None:
        """Score nothing."""
        self.is_away = True

    def load_back(self) -> None:
        """Score again."""
        self.is_away = False

    def score(
        self, sequences: Sequence[TokenSequence], policy_version: int, temperature: float
    ) -> Sequence[Scores]:
        """Score under `policy_version`; see `Scorer.score`."""
        if policy_version not in self._tables:
            raise EngineError(f"policy version {policy_version} is not held, only {self.versions}")
        assert not self.is_away, "its memory was given up"
        check_sequences(sequences, self.vocab_size, self.max_tokens)
        logprobs_VV = torch.log_softmax(self._tables[policy_version] / (temperature or 1.0), -1)
        entropy_V = -(logprobs_VV.exp() * logprobs_VV).sum(-1)
        found = []
        for sequence in sequences:
            before_T, after_T = sequence.token_ids[:-1], sequence.token_ids[1:]
            logprobs, entropy = logprobs_VV.numpy()[before_T, after_T], entropy_V.numpy()[before_T]
            found.append(
                Scores(
                    logprobs=np.concatenate([[0.0], logprobs], dtype=np.float32),
                    entropy=np.concatenate([[0.0], entropy], dtype=np.float32),
                )
            )
        return found

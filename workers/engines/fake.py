"""A language model of one table, for tests: a Markov chain behind the `Engine` and `Scorer` ports.

Its weights are `{"table": (V, V) float32}`: the logits of the next token, given the last one. It
loads in no time, needs no model folder, and passes the contract tests of the built-in engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import numpy as np
import torch

from rlstreams.schemas.events import NO_VERSION, PolicyPublished
from rlstreams.workers.engines.base import (
    FinishReason,
    GeneratedSegment,
    Health,
    PauseMode,
    SampleRequest,
    Scores,
    TokenSequence,
    check_ids,
    check_request,
)
from rlstreams.workers.engines.sampling import Draw, sample, uniforms
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.weights.channel import Pulled, WeightChannel, WeightError
from rlstreams.workers.weights.layout import layout_difference, layout_of, size_bytes

VOCAB_SIZE = 16
EOS = 2
MAX_TOKENS = 128
NUM_EXPERTS = 4  # token t is routed to experts t mod 4 and (t + 1) mod 4 of its one layer
_POLL_S = 0.001


def fake_weights(seed: int) -> dict[str, torch.Tensor]:
    """A table that rarely ends an answer, even at a high temperature."""
    table = np.random.default_rng(seed).normal(size=(VOCAB_SIZE, VOCAB_SIZE))
    table[:, EOS] = -60.0
    return {"table": torch.from_numpy(table.astype(np.float32))}


def _receive(
    published: PolicyPublished, channel: WeightChannel, deadline_s: float
) -> tuple[torch.Tensor, Pulled]:
    started_s = time.monotonic()
    weights = {name: tensor.clone() for name, tensor in channel.pull(published, deadline_s)}
    difference = layout_difference(expected=layout_of(fake_weights(0)), found=layout_of(weights))
    if difference:
        raise WeightError(f"weights do not fit the model: {difference}")
    pulled = Pulled(
        policy_version=published.policy_version,
        weight_hash=published.weight_hash,
        num_bytes=size_bytes(weights),
        seconds=time.monotonic() - started_s,
        paused_s=0.0,
    )
    return weights["table"], pulled


class _Request:
    """A request on its way."""

    def __init__(self, request: SampleRequest) -> None:
        self.request = request
        self.token_ids: list[int] = request.token_ids.tolist()
        self.begun = len(self.token_ids)
        self.logprobs: list[float] = []
        self.aborted = False
        resumed = self.begun > request.prompt_tokens
        self.experts_start = self.begun - 1 if resumed else 0

    def cut(self, held: tuple[int, str], reason: FinishReason) -> GeneratedSegment:
        """What was sampled since the last cut."""
        forwarded = np.array(self.token_ids[self.experts_start : -1], np.int64)
        rows = np.stack([forwarded, forwarded + 1], -1)[:, None, :] % NUM_EXPERTS
        segment = GeneratedSegment(
            token_ids=np.array(self.token_ids[self.begun :], np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            policy_version=held[0],
            weight_hash=held[1],
            finish_reason=reason,
            routed_experts=rows.astype(np.uint8) if self.logprobs else None,
            routed_experts_start=self.experts_start,
        )
        self.begun, self.logprobs = len(self.token_ids), []
        self.experts_start += len(rows)
        return segment


class FakeEngine:
    """Samples from the table; one token per turn of the event loop, or per `step_s`."""

    name = "fake/1"
    vocab_size = VOCAB_SIZE
    max_tokens = MAX_TOKENS

    def __init__(self, *, slots: int = 8, step_s: float = 0.0, deadline_s: float = 10.0) -> None:
        self._slots = slots
        self._step_s = step_s
        self._deadline_s = deadline_s
        self._table: torch.Tensor | None = None
        self._held = (NO_VERSION, "")
        self._num_sampled = 0
        self._running: list[_Request] = []
        self._waiting: list[_Request] = []
        self._paused = self._draining = self._closed = False

    @property
    def capacity(self) -> int:
        """As many as there are slots."""
        return self._slots

    @property
    def policy_version(self) -> int:
        """The version that it holds, or NO_VERSION."""
        return self._held[0]

    @property
    def num_sampled(self) -> int:
        """Tokens sampled since it was made."""
        return self._num_sampled

    @property
    def trouble(self) -> str:
        """None."""
        return ""

    def wants(self, published: PolicyPublished) -> bool:
        """Whether `published` is newer than what it holds."""
        return published.policy_version > self.policy_version

    async def start(self) -> None:
        """Nothing to do."""

    async def generate(self, request: SampleRequest) -> AsyncIterator[GeneratedSegment]:
        """The sample's segments; see `Engine.generate`."""
        check_request(request, self.vocab_size, self.max_tokens)
        if self._closed:
            raise EngineError(f"{self.name} is closed")
        mine = _Request(request)
        self._waiting.append(mine)
        try:
            while not self._may_start(mine):
                if mine.aborted:
                    yield mine.cut(self._held, FinishReason.ABORT)
                    return
                await asyncio.sleep(_POLL_S)
            self._waiting.remove(mine)
            self._running.append(mine)
            async for segment in self._sample(mine):
                yield segment
        finally:
            for requests in (self._waiting, self._running):
                if mine in requests:
                    requests.remove(mine)

    def _may_start(self, mine: _Request) -> bool:
        free = len(self._running) < self._slots and self._waiting[0] is mine
        return free and self._table is not None and not (self._paused or self._draining)

    async def _sample(self, mine: _Request) -> AsyncIterator[GeneratedSegment]:
        request = mine.request
        limit = min(self.max_tokens, request.prompt_tokens + request.sampling.max_new_tokens)
        draws = uniforms(request.seed, request.sample_id, 0, limit)
        held = self._held
        while len(mine.token_ids) < limit:
            await asyncio.sleep(_POLL_S if self._paused else self._step_s)
            if mine.aborted:
                yield mine.cut(held, FinishReason.ABORT)
                return
            if self._paused:
                continue
            if self._held != held:
                if mine.logprobs:
                    yield mine.cut(held, FinishReason.POLICY_CHANGED)
                held = self._held
            self._append(mine, float(draws[len(mine.token_ids)]))
            if mine.token_ids[-1] == EOS:
                yield mine.cut(held, FinishReason.STOP)
                return
        yield mine.cut(held, FinishReason.LENGTH)

    def _append(self, mine: _Request, uniform: float) -> None:
        assert self._table is not None
        sampling = mine.request.sampling
        draw = Draw(
            uniform_N=torch.tensor([uniform], dtype=torch.float64),
            temperature_N=torch.tensor([sampling.temperature]),
            top_p_N=torch.tensor([sampling.top_p]),
            top_k_N=torch.tensor([sampling.top_k]),
        )
        ids_N, logprobs_N = sample(self._table[mine.token_ids[-1]][None], draw)
        mine.token_ids.append(int(ids_N))
        mine.logprobs.append(float(logprobs_N))
        self._num_sampled += 1

    async def pull(self, published: PolicyPublished, channel: WeightChannel) -> Pulled:
        """Hold `published`; what was held stays if the pull fails."""
        table, pulled = await asyncio.to_thread(_receive, published, channel, self._deadline_s)
        self._table = table
        self._held = (pulled.policy_version, pulled.weight_hash)
        return pulled

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling."""
        if mode is PauseMode.WAIT:
            self._draining = True
            await self._drained()
        self._paused = True
        if mode is PauseMode.ABORT:
            await self._abort_all(self._running)

    async def resume(self) -> None:
        """Go on sampling."""
        self._paused = self._draining = False

    async def health(self) -> Health:
        """Ready when it holds a version and is not closed."""
        ready = not self._closed and self._table is not None
        return Health(
            ready=ready,
            detail=f"version {self.policy_version}",
            running=len(self._running),
            waiting=len(self._waiting),
        )

    async def close(self) -> None:
        """End all requests with ABORT."""
        self._closed = True
        await self._abort_all([*self._running, *self._waiting])

    async def _drained(self) -> None:
        until_s = time.monotonic() + self._deadline_s
        while self._running:
            if time.monotonic() > until_s:
                raise EngineError(
                    f"pausing {self.name}: {len(self._running)} requests still run "
                    f"after {self._deadline_s:g} s"
                )
            await asyncio.sleep(_POLL_S)

    async def _abort_all(self, requests: Sequence[_Request]) -> None:
        for mine in requests:
            mine.aborted = True


class FakeScorer:
    """Scores under tables."""

    vocab_size = VOCAB_SIZE
    max_tokens = MAX_TOKENS

    def __init__(self, *, deadline_s: float = 10.0) -> None:
        self._deadline_s = deadline_s
        self._tables: dict[int, torch.Tensor] = {}

    @property
    def versions(self) -> Sequence[int]:
        """Versions held, lowest first."""
        return sorted(self._tables)

    def pull(self, published: PolicyPublished, channel: WeightChannel) -> Pulled:
        """Hold one more version."""
        table, pulled = _receive(published, channel, self._deadline_s)
        self._tables = {**self._tables, pulled.policy_version: table}
        return pulled

    def drop(self, policy_version: int) -> None:
        """Hold this version no longer."""
        self._tables = {v: table for v, table in self._tables.items() if v != policy_version}

    def score(
        self, sequences: Sequence[TokenSequence], policy_version: int, temperature: float
    ) -> Sequence[Scores]:
        """Score under `policy_version`; see `Scorer.score`."""
        if policy_version not in self._tables:
            raise EngineError(f"policy version {policy_version} is not held, only {self.versions}")
        for index, sequence in enumerate(sequences):
            check_ids(sequence.token_ids, self.vocab_size, f"sequence {index}")
            if len(sequence.token_ids) > self.max_tokens:
                raise EngineError(
                    f"sequence {index} has {len(sequence.token_ids)} tokens, "
                    f"the limit is {self.max_tokens}"
                )
        logprobs_VV = torch.log_softmax(self._tables[policy_version] / (temperature or 1.0), -1)
        entropy_V = -(logprobs_VV.exp() * logprobs_VV).sum(-1)
        return [_scores(s.token_ids.astype(np.int64), logprobs_VV, entropy_V) for s in sequences]


def _scores(
    ids_T: np.ndarray[tuple[int], np.dtype[np.int64]],
    logprobs_VV: torch.Tensor,
    entropy_V: torch.Tensor,
) -> Scores:
    before_T, after_T = ids_T[:-1], ids_T[1:]
    return Scores(
        logprobs=np.concatenate([[0.0], logprobs_VV.numpy()[before_T, after_T]], dtype=np.float32),
        entropy=np.concatenate([[0.0], entropy_V.numpy()[before_T]], dtype=np.float32),
    )

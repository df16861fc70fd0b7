"""The `Engine` and `Scorer` ports: an engine samples tokens, a scorer scores given ones.

A tensor path and a model server are behind the same two ports, under one contract suite.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rlstreams.schemas.events import NO_VERSION, PolicyPublished, ServerLoad
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.weights.channel import Pulled, WeightChannel, WeightSource

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
Experts = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


class PromptTooLongError(EngineError):
    """The prompt leaves no room for an answer; another attempt would fail alike."""


class FinishReason(StrEnum):
    """Reason that a segment ended."""

    STOP = "stop"  # end-of-sequence token
    LENGTH = "length"  # max_new_tokens, or the model's longest sequence
    POLICY_CHANGED = "policy_changed"  # goes on in the next segment under another version
    ABORT = "abort"  # cut; the sample may be resumed with the tokens so far


class PauseMode(StrEnum):
    """Treatment of running requests while weights change."""

    KEEP = "keep"  # they go on; segments record which version sampled which token
    ABORT = "abort"  # they end as partial segments and are resumed by the worker
    WAIT = "wait"  # they finish first


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of the distribution that tokens are drawn from."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_new_tokens: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One turn of a sample to generate. The draw at position p is keyed by (seed, sample_id, p).

    In a later turn `token_ids` begins with the earlier turns and the messages between them, and
    `prompt_tokens` counts them all: `max_new_tokens` is for the turn, and expert rows cover the
    whole sequence, as for any prompt.
    """

    sample_id: str  # "{group_id}/{sample}/{attempt}"
    group_id: str  # siblings share a prefix
    token_ids: Int32s  # the turn's prompt, and on resumption its tokens so far
    prompt_tokens: int  # of token_ids; the rest was sampled before, in this turn
    sampling: Sampling
    seed: int
    session: str = ""  # requests of one session begin with its earlier ones; empty: none


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSegment:
    """Tokens sampled under one version."""

    token_ids: Int32s  # [tokens]
    logprobs: Float32s  # [tokens], nats, of the distribution that was sampled from
    policy_version: int
    weight_hash: str
    finish_reason: FinishReason
    # Rows [start, start + len) of the sample's [tokens - 1, layers, top_k]; None: not captured.
    routed_experts: Experts | None = None
    routed_experts_start: int = 0
    server: str = ""  # address of the server, where an engine has several


def sampled_by(engine: str, segments: Iterable[GeneratedSegment]) -> str:
    """The engine's name, and the servers of it that sampled these segments."""
    urls = dict.fromkeys(segment.server for segment in segments if segment.server)
    return f"{engine} at {', '.join(urls)}" if urls else engine


@dataclass(frozen=True, slots=True)
class Held:
    """Weights that an engine holds."""

    policy_version: int = NO_VERSION
    weight_hash: str = ""

    @property
    def label(self) -> str:
        """The server's name for these weights: unique to number and content."""
        return f"{self.policy_version}-{self.weight_hash[:16]}"


class Engine(Protocol):
    """Samples tokens. Its methods run on the rollout worker's event loop.

    `pull` closes the gate: from its start until it returns no token is sampled under unknown
    weights. Before the first pull `generate` waits.
    """

    vocab_size: int  # token ids are below it

    @property
    def capacity(self) -> int:
        """Number of requests that are worth having in flight now."""

    @property
    def max_capacity(self) -> int:
        """Upper bound of `capacity`."""

    @property
    def name(self) -> str:
        """Name and version, recorded in each trajectory."""

    @property
    def max_tokens(self) -> int:
        """Longest sequence, prompt included."""

    @property
    def policy_version(self) -> int:
        """The version that the engine holds, or NO_VERSION."""

    @property
    def is_up(self) -> bool:
        """Whether the engine could pull or sample now; asked from any thread.

        Raises:
            EngineError: it never will be up; gives the reason.
        """

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests, perhaps after a server came back; asked from any thread."""

    @property
    def num_sampled(self) -> int:
        """Tokens sampled since it was made; of abandoned requests those that it knows."""

    @property
    def trouble(self) -> str:
        """Parts out of service, with reasons, for people; "": none. Asked from any thread."""

    @property
    def servers(self) -> Mapping[str, str]:
        """The state of each model server that it uses, by address; asked from any thread."""

    @property
    def server_loads(self) -> Sequence[ServerLoad]:
        """Load of each model server; asked from any thread."""

    def wants(self, published: PolicyPublished) -> bool:
        """Whether a pull of `published` would bring it forward now; asked from any thread.

        Raises:
            EngineError: it will never hold a version; gives the reason.
        """

    async def start(self) -> None:
        """Begin: called once, on the event loop, before everything else; returns at once."""

    def generate(self, request: SampleRequest) -> AsyncIterator[GeneratedSegment]:
        """The sample's segments, as they end.

        Raises:
            PromptTooLongError: no room for a single token.
            EngineError: ids out of range, a server that fails or answers nonsense.
        """

    async def pull(self, published: PolicyPublished, channel: WeightChannel) -> Pulled:
        """Hold `published`, by way of `channel`; returns once its hash was checked."""

    async def sleep(self) -> None:
        """Cut running requests, sample nothing, and free the device's memory.

        No pull may be under way, and none begins before `wake`.
        """

    async def wake(self) -> None:
        """Load the weights back. If sleep discarded them, no version is held until a pull."""

    async def close(self) -> None:
        """End all requests and release the engine; idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One sequence to score; experts to replay travel along where the scorer can use them."""

    token_ids: Int32s  # [tokens]
    routed_experts: Experts | None = None  # [tokens - 1, layers, top_k]
    routed_experts_mask: npt.NDArray[np.uint8] | None = None  # [tokens - 1]; None: all recorded
    group_id: str = ""  # sequences of one group share a prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Per token: position t is given tokens before t; position 0 is 0."""

    logprobs: Float32s  # [tokens], nats
    entropy: Float32s  # [tokens], nats
    # Of the likeliest tokens [tokens, k], in falling order; None: not asked for.
    top_logprobs: Float32s | None = None  # nats
    top_ids: Int32s | None = None


class Scorer(Protocol):
    """Scores given tokens under the versions that it holds.

    One thread scores, another may pull and drop meanwhile: held weights are never written to.
    """

    vocab_size: int  # token ids are below it
    max_tokens: int  # longest sequence

    @property
    def versions(self) -> Sequence[int]:
        """Versions held, lowest first; asked from any thread."""

    def pull(self, published: PolicyPublished, channel: WeightSource) -> Pulled:
        """Hold one more version.

        Raises:
            WeightError: not received, or it does not fit; the versions held before are still held.
        """

    def drop(self, policy_version: int) -> None:
        """Stop holding this version."""

    def off_load(self) -> None:
        """Free the device's memory; versions stay held, on the host. Nothing may be scored."""

    def load_back(self) -> None:
        """Move the versions back to the device, bit for bit; `score` works again."""

    def score(
        self, sequences: Sequence[TokenSequence], policy_version: int, temperature: float
    ) -> Sequence[Scores]:
        """Score under `policy_version`, which must be held. The same call gives the same bits.

        Raises:
            EngineError: a version that is not held, ids out of range, a sequence too long.
        """


def pulled_of(
    published: PolicyPublished, num_bytes: int, started_s: float, paused_s: float = 0.0
) -> Pulled:
    """A pull that began at `started_s`, monotonic, and is over now."""
    return Pulled(
        policy_version=published.policy_version,
        weight_hash=published.weight_hash,
        num_bytes=num_bytes,
        seconds=time.monotonic() - started_s,
        paused_s=paused_s,
    )


def check_ids(token_ids: Int32s, vocab_size: int, what: str) -> None:
    """Check that every id lies in the vocabulary.

    Raises:
        EngineError: one does not, or there are none; names position and id.
    """
    if not len(token_ids):
        raise EngineError(f"{what}: token_ids is empty")
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if outside.any():
        position = int(outside.argmax())
        raise EngineError(
            f"{what}: token_ids[{position}] = {token_ids[position]} is outside the vocabulary of "
            f"{vocab_size}"
        )


def check_sequences(sequences: Sequence[TokenSequence], vocab_size: int, max_tokens: int) -> None:
    """Check that sequences can be scored.

    Raises:
        EngineError: ids outside the vocabulary, or a sequence too long.
    """
    for index, sequence in enumerate(sequences):
        check_ids(sequence.token_ids, vocab_size, f"sequence {index}")
        if (num := len(sequence.token_ids)) > max_tokens:
            raise EngineError(f"sequence {index} has {num} tokens, the limit is {max_tokens}")


def check_request(request: SampleRequest, vocab_size: int, max_tokens: int) -> None:
    """Check that a request can be sampled.

    Raises:
        PromptTooLongError: no room for a single token; names length and limit.
        EngineError: ids outside the vocabulary, or a field out of its range.
    """
    what = f"request {request.sample_id}"
    check_ids(request.token_ids, vocab_size, what)
    num_tokens, sampling = len(request.token_ids), request.sampling
    if num_tokens >= max_tokens:
        raise PromptTooLongError(
            f"{what}: {num_tokens} tokens leave no room for an answer: the limit is {max_tokens}"
        )
    if not 0 < request.prompt_tokens <= num_tokens:
        raise EngineError(
            f"{what}: prompt_tokens must be in 1..{num_tokens}, got {request.prompt_tokens}"
        )
    if sampling.max_new_tokens < 1:
        raise EngineError(f"{what}: max_new_tokens must be above 0, got {sampling.max_new_tokens}")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise EngineError(f"{what}: temperature, top_p or top_k is out of range: {sampling}")

"""Choice of the next sequences to decode: waiting and running requests, the version held, the gate.

Belongs to the decode thread; nothing here locks or waits. Results go to `deliver(generation,
item)`: a request's segments, of which the last one names the end, or an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import numpy as np
import torch

from rlstreams.schemas.events import NO_VERSION
from rlstreams.workers.engines.base import FinishReason, GeneratedSegment, Held
from rlstreams.workers.engines.decode import CacheDecoder, Generation
from rlstreams.workers.weights.channel import WeightError

_WAVE_SHARE = 8  # of the slots must be free before a wave joins: a prefill costs as much as a step
_PREFILL_TOKENS = 8192  # of one wave, padding included

Item = GeneratedSegment | Exception
Deliver = Callable[[Generation, Item], None]


class Scheduler:
    """Admits, decodes, cuts and ends requests."""

    def __init__(
        self,
        decoder: CacheDecoder,
        *,
        slots: int,
        eos_ids: frozenset[int],
        deliver: Deliver,
    ) -> None:
        self.held = Held()
        self.waiting: deque[Generation] = deque()
        self._decoder = decoder
        self._slots = slots
        self._eos_ids = eos_ids
        self._deliver = deliver
        self._paused = False

    @property
    def can_step(self) -> bool:
        """Whether `step` has something to do."""
        if self._paused or self.held.policy_version == NO_VERSION:
            return False
        return bool(self._decoder.running or self.waiting)

    def step(self) -> None:
        """One more token for every running request; a wave joins first where that pays."""
        wave = self._next_wave()
        if self._decoder.running:
            self._decoder.step()
        if wave:
            self._decoder.admit(wave)
        self._end_finished()

    def add(self, generation: Generation) -> None:
        """Queue a new request."""
        self.waiting.append(generation)

    def forget(self, generation: Generation) -> None:
        """Take out a request that no caller listens to any more."""
        if generation in self._decoder.running:
            self._decoder.remove(generation)
        elif generation in self.waiting:
            self.waiting.remove(generation)

    def stop(self) -> None:
        """Cut running requests, and sample nothing before `resume`."""
        self._abort(self._decoder.running)
        self._paused = True

    def resume(self) -> None:
        """Go on sampling."""
        self._paused = False

    def load(self, weights: Mapping[str, torch.Tensor], held: Held) -> None:
        """Put `weights` in place between two steps; running requests go on under them.

        Raises:
            WeightError: they do not fit; the model is as it was.
        """
        before, self.held = self.held, Held()
        try:
            self._decoder.load(weights)
            self.held = held
        except WeightError:
            self.held = before
            raise
        if held != before:
            for generation in self._decoder.running:
                self._cut(generation, FinishReason.POLICY_CHANGED, before)

    def close(self) -> None:
        """End all requests."""
        self._abort([*self._decoder.running, *self.waiting])
        self._decoder.close()

    def fail(self, error: Exception) -> None:
        """End all requests with `error`."""
        for generation in [*self._decoder.running, *self.waiting]:
            self._deliver(generation, error)
        self._decoder.running.clear()
        self.waiting.clear()

    def _next_wave(self) -> list[Generation]:
        free = self._slots - len(self._decoder.running)
        enough = min(len(self.waiting), max(1, self._slots // _WAVE_SHARE))
        wave: list[Generation] = []
        longest = 0
        while self.waiting and (free >= enough or not self._decoder.running) and len(wave) < free:
            generation = self.waiting[0]
            longest = max(longest, len(generation.token_ids))
            if wave and longest * (len(wave) + 1) > _PREFILL_TOKENS:
                break
            self.waiting.popleft()
            if len(generation.token_ids) < generation.limit:
                wave.append(generation)
            else:  # resumed with nothing left to sample
                self._cut(generation, FinishReason.LENGTH, self.held)
        return wave

    def _end_finished(self) -> None:
        for generation in list(self._decoder.running):
            is_stopped = generation.token_ids[-1] in self._eos_ids
            if is_stopped or len(generation.token_ids) >= generation.limit:
                self._decoder.remove(generation)
                reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
                self._cut(generation, reason, self.held)

    def _abort(self, generations: list[Generation]) -> None:
        for generation in list(generations):
            self.forget(generation)
            self._cut(generation, FinishReason.ABORT, self.held)

    def _cut(self, generation: Generation, reason: FinishReason, held: Held) -> None:
        """Deliver the tokens sampled since the last cut; only a final segment may be empty."""
        if not generation.logprobs and reason is FinishReason.POLICY_CHANGED:
            return
        token_ids, logprobs, experts, experts_start = generation.take_segment()
        segment = GeneratedSegment(
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            policy_version=held.policy_version,
            weight_hash=held.weight_hash,
            finish_reason=reason,
            routed_experts=experts,
            routed_experts_start=experts_start,
        )
        self._deliver(generation, segment)

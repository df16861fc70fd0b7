"""A model server as a queueing system: seats, a cache of tokens, steps that cost time, preemption.

Continuous batching as vLLM does it: each step gives every running request some tokens; whoever is
last to come is preempted when the cache is full, loses its keys and values, and computes them anew
once there is room.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlstreams.workers.engines.served.capacity import Capacity, Gauges

QUANTUM = 8  # tokens of each request in a step of the simulation
LOOK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a server is made of; seconds are of a token's step."""

    seats: int
    cache_tokens: int
    step_s: float  # whatever runs
    request_s: float  # more, for each that runs
    prefill_s: float  # of one token
    prompt: int = 256
    median: float = 400.0  # tokens of an answer
    sigma: float = 0.8  # of the logarithm of its length
    longest: int = 4096


class Queueing:
    """One such server, and clients that keep as many requests in flight as they may."""

    def __init__(self, machine: Machine, seed: int = 0) -> None:
        self.machine = machine
        self.cache_tokens = machine.cache_tokens
        self.now_s = 0.0
        self.num_preemptions = self.num_answers = self.num_tokens = 0
        self._random = np.random.default_rng(seed)
        self._done = np.zeros(0, np.int64)  # tokens sampled, of those that run, in order of arrival
        self._length = np.zeros(0, np.int64)
        self._waiting: list[tuple[int, int]] = []  # (done, length); preempted ones first

    @property
    def in_flight(self) -> int:
        return len(self._done) + len(self._waiting)

    @property
    def gauges(self) -> Gauges:
        return Gauges(
            num_running=len(self._done),
            num_waiting=len(self._waiting),
            cache_share=min(1.0, self._used() / self.cache_tokens),
            num_preemptions=self.num_preemptions,
        )

    def give(self, number: int) -> None:
        """So many new requests come in."""
        machine = self.machine
        lengths = self._random.lognormal(np.log(machine.median), machine.sigma, max(0, number))
        self._waiting += [(0, int(length)) for length in np.clip(lengths, 1, machine.longest)]

    def step(self) -> int:
        """A step; how many were answered."""
        machine, cost_s = self.machine, 0.0
        while self._waiting and len(self._done) < machine.seats:
            done, length = self._waiting[0]
            if (
                self._used() + machine.prompt + done + QUANTUM > self.cache_tokens
                and self._done.size
            ):
                break
            self._waiting.pop(0)
            cost_s += machine.prefill_s * (machine.prompt + done)
            self._done = np.append(self._done, done)
            self._length = np.append(self._length, length)
        cost_s += QUANTUM * (machine.step_s + machine.request_s * len(self._done))
        self._done = self._done + QUANTUM
        self.num_tokens += QUANTUM * len(self._done)
        self.now_s += cost_s
        over = self._done >= self._length
        self.num_answers += int(over.sum())
        self._done, self._length = self._done[~over], self._length[~over]
        while len(self._done) > 1 and self._used() > self.cache_tokens:
            self._waiting.insert(0, (int(self._done[-1]), int(self._length[-1])))
            self._done, self._length = self._done[:-1], self._length[:-1]
            self.num_preemptions += 1
        return int(over.sum())

    def _used(self) -> int:
        return int(self._done.sum()) + self.machine.prompt * len(self._done)


def run(server: Queueing, capacity: Capacity, until_s: float) -> None:
    """Have the server work until then, as clients with such a capacity use it."""
    next_look_s = server.now_s
    while server.now_s < until_s:
        server.give(capacity.limit - server.in_flight)
        before = server.in_flight
        for number in range(server.step()):
            capacity.answered(before - number, 0)
        if server.now_s >= next_look_s:
            capacity.look(server.gauges, server.in_flight)
            next_look_s = server.now_s + LOOK_S

"""What a log-prob service buys: the three values of `logprob.place` at equal total resources.

    python -m tests.bench.overlap                    # rates measured on H200s, Qwen3-1.7B's shape
    python -m tests.bench.overlap --sample 8000 --score 30000 --train 9000

Simulated, with answers of lognormal length (mean 1,000 tokens, at most 8,000): samplers fill the
slots that the staleness bound leaves open, scorers take answers as they come, the trainer takes
whole groups. Rates are tokens/s of one GPU, and passes are taken to scale with GPUs; the hash of a
step does not. `equal` gives the scorer's GPUs to sampler or trainer, whichever is faster; `without`
takes them away, as the published 1.64x (1.09x per GPU) compares.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tests.bench.hardware import hardware

PUBLISHED = {"end_to_end": 1.64, "per_gpu": 1.09}  # verl-project/verl, pull request 5990
PROMPT, MEAN, LONGEST, SIGMA = 200, 1000, 8000, 1.0
GROUPS, GROUP, STALENESS, STEPS, WARM = 64, 16, 4, 30, 10


def say(*words: object) -> None:
    """To whoever runs it."""
    print(*words)  # noqa: T201


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens/s of one GPU; seconds of a step that no GPU shortens."""

    sample: float = 31_025  # tests/bench/results/rollout-speed-2026-11-22.json
    score: float = 141_488  # score_throughput-2026-11-23.json
    train: float = 46_283  # the same
    fixed_s: float = 0.162  # the hash, likewise
    slots: int = 128  # answers that a GPU samples at once


def lengths(num: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Of answers, tokens."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, num)
    return np.clip(drawn, 1, LONGEST)


class _Run:
    """Events in the order of time: an answer is sampled or scored, a step ends."""

    def __init__(self, by: Rates, place: str, samplers: int, scorers: int, trainers: int) -> None:
        self.by, self.place, self.trainers = by, place, trainers
        self.free = {"sample": samplers * by.slots, "score": scorers, "train": 1}
        self.waiting: dict[str, deque[int]] = {"sample": deque(), "score": deque()}
        self.tokens = lengths(GROUPS * GROUP * (STEPS + STALENESS + 1))
        self.left = [GROUP] * (len(self.tokens) // GROUP)
        self.complete: list[int] = []
        self.events: list[tuple[float, int, str, Sequence[int]]] = []
        self.num_open = 0
        self.ends: list[float] = []

    def open(self, groups: int) -> None:
        first, self.num_open = self.num_open, self.num_open + groups
        self.waiting["sample"].extend(range(first * GROUP, self.num_open * GROUP))

    def go(self) -> list[float]:
        """When each step ended."""
        self.open((STALENESS + 1) * GROUPS)
        self.start(0.0)
        while len(self.ends) < STEPS:
            now_s, _, what, of = heapq.heappop(self.events)
            self.free[what] += 1
            if what == "train":
                self.ends.append(now_s)
                self.open(GROUPS)
            elif what == "sample" and self.place == "separate":
                self.waiting["score"].extend(of)
            else:
                group = of[0] // GROUP
                self.left[group] -= 1
                if not self.left[group]:
                    heapq.heappush(self.complete, group)
            self.start(now_s)
        return self.ends

    def start(self, now_s: float) -> None:
        by = self.by
        per_token_s = {"sample": by.slots / by.sample, "score": 1 / by.score}
        for what, queue in self.waiting.items():
            while queue and self.free[what]:
                number = queue.popleft()
                num = self.tokens[number] + PROMPT * (what == "score")
                self.push(now_s + num * per_token_s[what], what, [number])
        if self.free["train"] and len(self.complete) >= GROUPS:
            groups = [heapq.heappop(self.complete) for _ in range(GROUPS)]
            numbers = [group * GROUP + n for group in groups for n in range(GROUP)]
            num = sum(PROMPT + self.tokens[number] for number in numbers)
            each_s = 1 / by.train + (1 / by.score if self.place == "trainer" else 0)
            self.push(now_s + num * each_s / self.trainers + by.fixed_s, "train", numbers)

    def push(self, at_s: float, what: str, of: Sequence[int]) -> None:
        self.free[what] -= 1
        heapq.heappush(self.events, (at_s, of[0], what, of))


def samples_per_s(by: Rates, place: str, samplers: int, scorers: int, trainers: int) -> float:
    """Of a run that is under way."""
    ends = _Run(by, place, samplers, scorers, trainers).go()
    return (STEPS - WARM) * GROUPS * GROUP / (ends[-1] - ends[WARM - 1])


def row(by: Rates, samplers: int, trainers: int, scorers: int) -> dict[str, float]:
    """One layout of `separate`, against the others."""
    separate = samples_per_s(by, "separate", samplers, scorers, trainers)
    found = {"separate": separate}
    for place in ("trainer", "off"):
        found[place] = max(
            samples_per_s(by, place, samplers + more, 0, trainers + scorers - more)
            for more in range(scorers + 1)
        )
    without = samples_per_s(by, "trainer", samplers, 0, trainers)
    share = (samplers + trainers) / (samplers + trainers + scorers)
    return found | {
        "separate / trainer, equal GPUs": separate / found["trainer"],
        "separate / trainer, without the scorer's": separate / without,
        "the same per GPU": separate / without * share,
    }


def table(by: Rates, layouts: Sequence[tuple[int, int, int]]) -> dict[str, dict[str, float]]:
    """Printed, and given: by `samplers + trainers + scorers`."""
    share = by.train / (by.train + by.score)
    say(f"{by}; scoring is {share:.0%} of what a trainer computes that scores by itself")
    found = {f"{r} + {t} + {s}": row(by, r, t, s) for r, t, s in layouts}
    names = list(next(iter(found.values())))
    say(f"{'GPUs (sample + train + score)':>42}", *(f"{layout:>13}" for layout in found))
    for name in names:
        unit = "x" if "/" in name or "per" in name else " samples/s"
        cells = (f"{of[name]:>13.2f}" for of in found.values())
        say(f"{name + unit * (unit != 'x'):>42}", *cells)
    say(f"published: {PUBLISHED['end_to_end']}x end to end, {PUBLISHED['per_gpu']}x per GPU")
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in asdict(Rates()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--json", type=Path)
    given = vars(parser.parse_args())
    file = given.pop("json")
    by = Rates(**given)
    found = table(by, [(16, 16, 8), (16, 6, 2), (16, 6, 3), (16, 3, 1)])
    if file:
        file.write_text(
            json.dumps({"hardware": hardware(), "rates": asdict(by), "table": found}, indent=1)
        )


if __name__ == "__main__":
    main()

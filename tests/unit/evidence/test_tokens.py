"""Other tokens than those that were sampled are told from noise, which has heavy tails."""

from __future__ import annotations

import numpy as np
import pytest

from rlstreams.debug.evidence.tokens import Distance, others
from rlstreams.streams.log.group_ids import SampleId

NOISES = {
    "float32": lambda draw, num: 1e-6 * np.abs(draw.normal(size=num)),
    # As of Gemma 3 in bfloat16 (decision 0082): 0.003 to 0.011 nats, most of it by few tokens.
    "bfloat16": lambda draw, num: 3e-3 * np.exp(1.2 * draw.normal(size=num)),
    "heavy": lambda draw, num: 3e-3 * np.abs(draw.standard_t(2, size=num)),
}


def distance(number: int, apart_N: np.ndarray) -> Distance:
    return Distance.of(SampleId(str(number // 8), number % 8), 1, apart_N)


def noise(kind: str, samples: int, seed: int) -> list[Distance]:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(4, 60, samples)
    return [distance(n, NOISES[kind](draw, length)) for n, length in enumerate(lengths)]


@pytest.mark.parametrize("kind", NOISES)
def test_of_8000_sound_samples_none_is_named(kind: str) -> None:
    found = noise(kind, 8000, 0)
    steps = [float(np.mean([one.mean for one in found]))] * 20
    assert others(found, steps, 5.0)[0] == []


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("samples", [32, 2000])
def test_a_group_with_other_tokens_is_named_whole(kind: str, samples: int) -> None:
    """Also where it is a quarter of all that is looked at."""
    draw = np.random.default_rng(1)
    found = noise(kind, samples, 2)
    for number in range(8, 16):
        found[number] = distance(number, draw.exponential(3.0, 6))
    bad = [one.name for one, _ in others(found, [], 5.0)[0]]
    assert bad == [("1", number) for number in range(8)]


def test_one_wild_token_is_no_other_sample() -> None:
    """A router that takes another expert moves one token far."""
    found = noise("bfloat16", 500, 3)
    apart_N = np.full(12, 1e-3)
    apart_N[5] = 2.5
    found[0] = distance(0, apart_N)
    assert others(found, [], 5.0)[0] == []


def test_without_scores_nothing_is_said() -> None:
    assert others([], [0.1], 5.0) == ([], "")

"""What two ranks exchange in a step: weights and gradients once an update, where they have room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rlstreams.workers.compute import fsdp2
from rlstreams.workers.trainer.learn.step import StepResult
from tests.heavy.trainer.parallel_stand import batch_of, hashes, make_model, two_ranks

# Before torch 2.13 they had other names.
IS_SINGLE = hasattr(dist, "all_gather_single")
GATHERS = "all_gather_single" if IS_SINGLE else "all_gather_into_tensor"
SUMS = "reduce_scatter_single" if IS_SINGLE else "reduce_scatter_tensor"
UNITS = 3  # two layers, and the rest
ROOM = 1 / 6
ONE_ROUND = 1000, 8  # tokens, samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Exchanges of rank 0."""
    found: Counter[str] = Counter()

    def exchange(name: str, own: Callable[..., Any], *args: Any, **more: Any) -> Any:
        found[name] += 1
        return own(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        for name in (GATHERS, SUMS):
            patch.setattr(dist, name, partial(exchange, name, getattr(dist, name)))
        yield found


def steps(
    folder: Path, weights: float, gradients: float, budget: int = 15, count: int = 20
) -> tuple[list[StepResult], tuple[str, str], Counter[str], str]:
    """Two steps of ranks that have room for these shares, the hashes after them, the exchanges of
    the second one, and what a claim says of the backend."""
    with pytest.MonkeyPatch.context() as patch:
        # Of rank 0 alone: what one rank has no room for, none holds.
        patch.setattr(fsdp2, "WEIGHTS_SHARE", weights)
        patch.setattr(fsdp2, "GRADIENTS_SHARE", gradients)
        training = two_ranks(folder)
    with closing(training):
        results = [training.learner.step(batch_of(0, budget, count))]
        with counted() as exchanged:
            results.append(training.learner.step(batch_of(1, budget, count)))
        return results, hashes(training), exchanged, training.numerics.backend


def test_weights_that_stay_whole_change_no_bit(folder: Path) -> None:
    """They are gathered once a step, not twice a round."""
    cut, cut_hashes, often, _ = steps(folder, 0.0, 0.0)
    kept, kept_hashes, seldom, _ = steps(folder, ROOM, 0.0)
    assert kept == cut
    assert kept_hashes == cut_hashes
    rounds = often[SUMS] // UNITS
    assert rounds > 2
    assert seldom[SUMS] == often[SUMS] == rounds * UNITS
    assert often[GATHERS] == rounds * (2 * UNITS - 1)  # the root stays whole within a round
    assert seldom[GATHERS] == UNITS


def test_gradients_are_summed_once_and_twice_to_the_same_bits(folder: Path) -> None:
    """In another order than round by round, so the claim says so; of one round, in the same."""
    once, once_hashes, exchanged, backend = steps(folder, ROOM, ROOM)
    again, again_hashes, _, _ = steps(folder, ROOM, ROOM)
    assert exchanged == {GATHERS: UNITS, SUMS: UNITS}
    assert backend == "fsdp2, one sum an update"
    assert once == again
    assert once_hashes == again_hashes
    each, each_hashes, _, backend = steps(folder, 0.0, 0.0)
    assert not backend
    assert each_hashes != once_hashes
    assert [r.metrics["grad_norm"] for r in each] == pytest.approx(
        [r.metrics["grad_norm"] for r in once], rel=1e-2
    )
    assert each[0].loss == once[0].loss
    assert steps(folder, ROOM, ROOM, *ONE_ROUND)[:2] == steps(folder, 0.0, 0.0, *ONE_ROUND)[:2]

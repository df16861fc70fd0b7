"""Two ranks on the CPU: the bits of a step, its checkpoints, and what becomes of a bad rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from rlstreams.workers.compute.learn import Learner
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.trainer.learn.out_of_memory import OutOfMemoryError
from rlstreams.workers.trainer.learn.step import NumericsError
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore, Manifest
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.layout import weight_hash
from tests.heavy.trainer.parallel_stand import SECTION, batch_of, hashes, make_model, two_ranks
from tests.heavy.trainer.poor_follower import ROWS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Training]:
    """Two ranks for all tests, for a process has one group at a time. The second one is poor."""
    with closing(two_ranks(folder, program="tests.heavy.trainer.poor_follower")) as made:
        yield made


def begin(trained: Training, folder: Path) -> None:
    """The folder's weights, and nothing learnt."""
    single = Training(folder, SECTION, threads=1, dtype="bfloat16")
    trained.learner.load(single.learner.weights(), {}, 0)


def places(learner: Learner) -> dict[str, int]:
    """Where rank 0 has the optimizer's tensors."""
    return {key: rows.data_ptr() for key, rows in learner.states.items() if rows.dim()}


@pytest.mark.parametrize("is_routed", [False, True])
def test_a_step_of_two_ranks_is_that_of_one_but_for_rounding(
    two: Training, folder: Path, is_routed: bool
) -> None:
    """Loss, gradient norm and every metric agree, and so do the weights after it; with routes that
    were recorded too."""
    begin(two, folder)
    one = Training(folder, SECTION, threads=1, dtype="bfloat16")
    before = {name: tensor.clone() for name, tensor in one.learner.weights().items()}
    batch = batch_of(0, is_routed=is_routed)
    assert len(batch.micro_batches) % 2 == 1
    alone, together = one.learner.step(batch), two.learner.step(batch)
    assert alone.metrics.keys() == together.metrics.keys()
    assert is_routed == ("routing_flips" in together.metrics)
    assert alone.loss == pytest.approx(together.loss, rel=1e-6)
    assert alone.metrics == pytest.approx(together.metrics, rel=1e-2)
    after, other = one.learner.weights(), two.learner.weights()
    assert list(after) == list(other)
    moved = sum(float((after[n].float() - t.float()).abs().sum()) for n, t in before.items())
    apart = sum(float((after[n].float() - other[n].float()).abs().sum()) for n in before)
    assert moved > 0
    assert apart < 0.01 * moved


def test_what_both_ranks_off_loaded_comes_back_to_the_bit(two: Training, folder: Path) -> None:
    """All of weights and moments leaves, between any two steps; the next step is as without."""
    begin(two, folder)
    two.learner.step(batch_of(0))
    before = hashes(two)
    state = [*two.learner.weights().facts.values()]  # type: ignore[attr-defined]
    state += two.learner.optimizer_tensors().facts.values()  # type: ignore[attr-defined]
    num_bytes = sum(t.numel() * t.element_size() for t in state if t.dim())
    for _ in range(2):
        assert num_bytes <= two.learner.off_load() < 1.5 * num_bytes
        two.learner.load_back()
        assert before == hashes(two)
    two.learner.step(batch_of(1))
    after = hashes(two)
    begin(two, folder)
    for seed in range(2):
        two.learner.step(batch_of(seed))
    assert after == hashes(two)


def test_ranks_agree_on_the_number_behind_a_step_that_nobody_made(
    two: Training, folder: Path
) -> None:
    """The weights stay, and the next step is one further on every rank."""
    begin(two, folder)
    two.learner.step(batch_of(0))
    before = hashes(two)
    two.pass_over()
    assert before == hashes(two)
    assert two.learner.step_number == 2
    two.learner.step(batch_of(1))
    assert two.learner.step_number == 3
    assert before != hashes(two)


def test_a_checkpoint_knows_no_ranks(two: Training, folder: Path, tmp_path: Path) -> None:
    """Saved by two, it is loaded by one with the same bytes, and by two as if nothing had been."""
    begin(two, folder)
    for seed in range(2):
        two.learner.step(batch_of(seed))
    store = CheckpointStore(tmp_path)
    manifest = Manifest(
        run="r", epoch=1, step=2, policy_version=2, weight_hash=weight_hash(two.learner.weights())
    )
    saved = hashes(two)
    two.save(store, manifest)
    two.learner.step(batch_of(2))
    expected = hashes(two)
    begin(two, folder)
    two.restore(store, manifest)
    assert saved == hashes(two)
    two.learner.step(batch_of(2))
    assert expected == hashes(two)
    one = Training(folder, SECTION, threads=1, dtype="bfloat16")
    one.restore(store, manifest)
    assert saved == hashes(one)
    one.save(CheckpointStore(tmp_path / "one"), manifest)
    held = places(two.learner)
    two.restore(CheckpointStore(tmp_path / "one"), manifest)
    assert saved == hashes(two)
    assert held == places(two.learner)  # written over: a GPU has no room for two states


@pytest.mark.parametrize(
    "loss",
    [
        LossSection(proximal="step_start", entropy_share=0.5, weight_normalize=True),
        LossSection(kind="m2po", second_moment_max=1.0),
    ],
)
def test_two_ranks_look_at_a_batch_as_one_does(
    two: Training, folder: Path, loss: LossSection
) -> None:
    """What the whole batch decides is decided alike, and twice to the bit."""
    one = Training(folder, SECTION, threads=1, dtype="bfloat16")
    batch, found = batch_of(0), []
    one.learner.configure(SECTION.optimizer, loss)
    two.learner.configure(SECTION.optimizer, loss)
    for _ in range(2):
        begin(two, folder)
        found.append((two.learner.step(batch), hashes(two)))
    two.learner.configure(SECTION.optimizer, SECTION.loss)
    assert found[0] == found[1]
    alone, together = one.learner.step(batch).metrics, found[0][0].metrics
    for name in ("rejected_fraction", "weight_mean", "ratio_max", "grad_norm"):
        assert alone[name] == pytest.approx(together[name], rel=0.05), name


def test_a_later_update_that_fails_is_taken_back_on_every_rank(
    two: Training, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and moments are those before the step; done again, it has the bits of a first try."""
    begin(two, folder)
    two.learner.step(batch_of(0))
    before, twice = hashes(two), replace(batch_of(1), epochs=2)
    made = two.learner.step(twice)
    expected = hashes(two)
    assert made.metrics["updates"] == 2
    begin(two, folder)
    two.learner.step(batch_of(0))
    norm, own = two.learner._shards.norm, iter([0.0, math.nan])  # one rank's share of it
    with monkeypatch.context() as patch:

        def damaged(squares: Callable[[float], list[float]], gradients: Any) -> Any:
            return norm(lambda found: squares(found + next(own)), gradients)

        patch.setattr(two.learner._shards, "norm", damaged)
        with pytest.raises(NumericsError, match="gradient norm is nan"):
            two.learner.step(twice)
    assert hashes(two) == before
    assert two.learner.step(twice) == made
    assert hashes(two) == expected


@pytest.mark.parametrize("proximal", ["sampled", "step_start"])
def test_memory_that_one_rank_lacks_is_the_whole_steps_affair(
    two: Training, folder: Path, proximal: Literal["sampled", "step_start"]
) -> None:
    """The step did not happen, on no rank; what follows has the bits that it has without it. With
    `step_start` memory lacks before the first update."""
    begin(two, folder)
    two.learner.step(batch_of(0))
    before = hashes(two)
    large = batch_of(1, token_budget=70)
    two.learner.configure(SECTION.optimizer, LossSection(proximal=proximal))
    with pytest.raises(OutOfMemoryError, match=r"rank 1: .*this rank is poor") as caught:
        two.learner.step(large)
    assert len(large.micro_batches[caught.value.index].token_ids_BT) > ROWS
    assert before == hashes(two)
    two.learner.configure(SECTION.optimizer, SECTION.loss)
    two.learner.step(batch_of(1))
    after = hashes(two)
    begin(two, folder)
    for seed in range(2):
        two.learner.step(batch_of(seed))
    assert hashes(two) == after


def test_more_ranks_than_were_meant_are_a_mistake(folder: Path) -> None:
    """Ranks are started by whoever makes the training, and the section says how many."""
    with pytest.raises(ValueError, match=r"trainer\.ranks is 2, but there are 1"):
        Training(folder, TrainerSection(ranks=2), threads=1)

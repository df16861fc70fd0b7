"""Two ranks that train adapters: a checkpoint of other hardware, one process's bits, a refusal."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.trainer import LoraSection, TrainerSection
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore, Manifest
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.layout import weight_hash
from tests.heavy.trainer.parallel_stand import batch_of, make_model, two_ranks

LORA = LoraSection(rank=2, alpha=4.0, targets="q_proj")


def test_a_merge_that_rounds_otherwise_is_the_version_until_it_learns(tmp_path: Path) -> None:
    """One bit off is taken, and published as it was. Where a weight without an adapter differs, the
    folder is another one, and nothing is loaded."""
    with closing(two_ranks(make_model(tmp_path / "model"), lora=LORA)) as two:
        two.learner.step(batch_of(0))
        own = {name: tensor.clone() for name, tensor in two.learner.weights().items()}
        state = {n: t.clone() for n, t in two.learner.optimizer_tensors().items()}
        two.learner.step(batch_of(1))
        expected = weight_hash(two.learner.weights())
        name = next(n for n in own if n.endswith("q_proj.weight"))
        towards = torch.tensor(torch.inf, dtype=own[name].dtype)
        other = own | {name: torch.nextafter(own[name], towards)}
        store = CheckpointStore(tmp_path / "checkpoints")
        manifest = Manifest(
            run="r", epoch=1, step=1, policy_version=1, weight_hash=weight_hash(other)
        )
        two.restore(store, store.save(manifest, other, state))
        assert weight_hash(other) == two.weight_hash == weight_hash(two.learner.weights())
        two.learner.step(batch_of(1))
        assert expected == weight_hash(two.learner.weights())
        plain = next(n for n in own if n.endswith("k_proj.weight"))
        with pytest.raises(ValueError, match="are not this folder's with adapters"):
            two.learner.load(own | {plain: own[plain] * 1.1}, state, 1)
        assert expected == weight_hash(two.learner.weights())


def test_two_ranks_round_as_one_process_does(tmp_path: Path) -> None:
    """In 16 bits, where an element's threshold decides: what they publish is what one process makes
    of the same adapters."""
    folder = make_model(tmp_path / "model")
    with closing(two_ranks(folder, lora=LORA)) as two:
        two.learner.step(batch_of(0))
        own = {name: tensor.clone() for name, tensor in two.learner.weights().items()}
        state = {n: t.clone() for n, t in two.learner.optimizer_tensors().items()}
        share = two.learner.figures()["adapter_arrived"]
    section = TrainerSection(lora=LORA)
    one = Training(folder, section, threads=1, dtype="bfloat16")
    assert one.model_hash != weight_hash(own)
    one.learner.load(own, state, 1)
    assert not one.learner._published
    assert weight_hash(one.learner.weights()) == weight_hash(own)
    assert one.learner.figures()["adapter_arrived"] == pytest.approx(share, rel=1e-9)


def test_what_no_rank_can_train_is_refused_by_its_name(tmp_path: Path) -> None:
    """As one process would say it: the field, not a dead rank."""
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets 'nothing'"):
        two_ranks(make_model(tmp_path / "model"), lora=LoraSection(rank=2, targets="nothing"))

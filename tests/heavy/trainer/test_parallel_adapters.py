"""Two ranks that train adapters: a checkpoint of other hardware, one process's bits, a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.compute.team import Team
from rlstreams.workers.config.trainer import LoraSection, TrainerSection
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore, Manifest
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.layout import weight_hash
from tests.heavy.trainer.parallel_stand import batch_of, leave, make_model, two_ranks

LORA = LoraSection(rank=2, alpha=4.0, targets="q_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """Two ranks, and all that they had behind their first step."""

    two: Training
    weights: dict[str, Tensor]
    state: dict[str, Tensor]
    arrived: float


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    """A second rank for all tests."""
    with closing(Team([""])) as made:
        yield made


@pytest.fixture
def stepped(folder: Path, team: Team) -> Iterator[Stepped]:
    two = two_ranks(folder, team=team, lora=LORA)
    two.learner.step(batch_of(0))
    yield Stepped(
        two=two,
        weights={name: tensor.clone() for name, tensor in two.learner.weights().items()},
        state={n: t.clone() for n, t in two.learner.optimizer_tensors().items()},
        arrived=two.learner.figures()["adapter_arrived"],
    )
    leave(two)


def test_a_merge_that_rounds_otherwise_is_the_version_until_it_learns(
    stepped: Stepped, tmp_path: Path
) -> None:
    """One bit off is taken, and published as it was. Where a weight without an adapter differs, the
    folder is another one, and nothing is loaded."""
    two, own, state = stepped.two, stepped.weights, stepped.state
    two.learner.step(batch_of(1))
    expected = weight_hash(two.learner.weights())
    name = next(n for n in own if n.endswith("q_proj.weight"))
    towards = torch.tensor(torch.inf, dtype=own[name].dtype)
    other = own | {name: torch.nextafter(own[name], towards)}
    store = CheckpointStore(tmp_path / "checkpoints")
    manifest = Manifest(run="r", epoch=1, step=1, policy_version=1, weight_hash=weight_hash(other))
    two.restore(store, store.save(manifest, other, state))
    assert weight_hash(other) == two.weight_hash == weight_hash(two.learner.weights())
    two.learner.step(batch_of(1))
    assert expected == weight_hash(two.learner.weights())
    plain = next(n for n in own if n.endswith("k_proj.weight"))
    with pytest.raises(ValueError, match="are not this folder's with adapters"):
        two.learner.load(own | {plain: own[plain] * 1.1}, state, 1)
    assert expected == weight_hash(two.learner.weights())


def test_two_ranks_round_as_one_process_does(stepped: Stepped, folder: Path) -> None:
    """In 16 bits, where an element's threshold decides: what they publish is what one process makes
    of the same adapters."""
    section = TrainerSection(lora=LORA)
    one = Training(folder, section, threads=1, dtype="bfloat16")
    assert one.model_hash != weight_hash(stepped.weights)
    one.learner.load(stepped.weights, stepped.state, 1)
    assert not one.learner._published
    assert weight_hash(one.learner.weights()) == weight_hash(stepped.weights)
    assert one.learner.figures()["adapter_arrived"] == pytest.approx(stepped.arrived, rel=1e-9)


def test_what_no_rank_can_train_is_refused_by_its_name(folder: Path) -> None:
    """As one process would say it: the field, not a dead rank."""
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets 'nothing'"):
        two_ranks(folder, lora=LoraSection(rank=2, targets="nothing"))

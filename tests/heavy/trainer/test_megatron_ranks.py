"""Steps of megatron-core on the CPU: one rank and two against Hugging Face, and done again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rlstreams.workers.compute.team import Team
from rlstreams.workers.config.trainer import LayoutSection, TrainerSection
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore, Manifest
from rlstreams.workers.trainer.training.training import Training
from tests import families
from tests.heavy.trainer.parallel_stand import SECTION, batch_of, hashes, leave, meet_again

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core needs Python 3.12"
)
DENSE, MIXTURE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
STEPS = 2
at_night = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def two() -> Iterator[Team]:
    """A second rank for all tests: most of its time is its start."""
    with closing(Team([""])) as team:
        yield team


@contextmanager
def begun(folder: Path, section: TrainerSection, team: Team | None) -> Iterator[Training]:
    """A trainer that in the end leaves its group, so that the team can begin again."""
    training = Training(folder, section, threads=1, team=team)
    yield training
    leave(training)


@pytest.mark.parametrize(
    ("family", "layout", "ranks"),
    [
        (MIXTURE, LayoutSection(ep=2), 2),
        # By day `test_mesh_losses` has tp and pp, and holds them to one rank.
        at_night(DENSE, LayoutSection(tp=2), 2),
        at_night(MIXTURE, LayoutSection(pp=2), 2),
        at_night(DENSE, LayoutSection(), 2),
        at_night(MIXTURE, LayoutSection(), 1),
    ],
)
def test_steps_are_those_of_hugging_face_and_equal_when_done_again(
    family: str, layout: LayoutSection, ranks: int, tmp_path: Path, two: Team
) -> None:
    """Two steps, mixtures along recorded routes: metrics to a thousandth, weights to a hundredth
    of what they moved. Done again, once after meeting anew, they are equal to the bit; and a
    checkpoint of either backend is one of the other."""
    folder = families.make(family, tmp_path, tie_word_embeddings=False)
    one = Training(folder, SECTION, threads=1)
    section = replace(SECTION, backend="megatron", ranks=ranks, layout=layout)
    with begun(folder, section, two if ranks == 2 else None) as many:
        assert many.model_hash == one.model_hash
        assert many.numerics.backend.startswith("megatron-core 0.19")
        batches = [batch_of(seed, is_routed=family == MIXTURE) for seed in range(STEPS)]
        start = {name: tensor.clone() for name, tensor in one.learner.weights().items()}
        first = []
        for batch in batches:
            alone, together = one.learner.step(batch), many.learner.step(batch)
            assert alone.metrics == pytest.approx(together.metrics, rel=1e-3)
            assert alone.loss == pytest.approx(together.loss, rel=1e-3)
            first.append(hashes(many))
        assert many.learner.off_load() > 0  # between any two steps
        many.learner.load_back()
        assert hashes(many) == first[-1]
        ours, theirs = many.learner.weights(), one.learner.weights()
        apart = sum(float((theirs[n] - ours[n]).abs().sum()) for n in start)
        moved = sum(float((theirs[n] - t).abs().sum()) for n, t in start.items())
        assert 100 * apart < moved
        save_file(dict(many.learner.optimizer_tensors()), tmp_path / "state")  # as a checkpoint is
        state = load_file(tmp_path / "state")
        kept = {n: t.clone() for n, t in ours.items()}
        manifest = Manifest(
            run="r", epoch=1, step=STEPS, policy_version=STEPS, weight_hash=first[-1][0]
        )
        many.save(store := CheckpointStore(tmp_path / "checkpoints"), manifest)
        assert store.load(manifest)[1].keys() == state.keys()
        many.learner.load(start, {}, 0)
        again = []
        for batch in batches:
            many.learner.step(batch)
            again.append(hashes(many))
            if ranks > 1:
                meet_again(many)  # as after memory ran out on a rank
        assert again == first
        assert state.keys() == one.learner.optimizer_tensors().keys()
        one.learner.load(kept, state, STEPS)
        batch = batch_of(STEPS, is_routed=family == MIXTURE)
        alone, together = one.learner.step(batch), many.learner.step(batch)
        assert alone.metrics == pytest.approx(together.metrics, rel=1e-3)

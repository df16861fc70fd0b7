"""An optimizer of one's own on two ranks: it is called with whole parameters, as on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.compute.team import Team
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import LayoutSection, OptimizerSection, TrainerSection
from rlstreams.workers.sandbox.recorded import Code
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore, Manifest
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.layout import weight_hash
from tests import families
from tests.heavy.trainer.parallel_stand import batch_of, hashes, leave, meet_again
from tests.readme_blocks import blocks

FIELD = "trainer.optimizer.kind"
PAGE = Path(__file__).parents[3] / "infra/docs/loss.md"
ADAMW = OptimizerSection(lr=1e-2, warmup_steps=0, max_grad_norm=0.2)
OWN = replace(ADAMW, kind="mine:update")
SECTION = TrainerSection(optimizer=ADAMW)
MUON = next(b.text for b in blocks(PAGE.read_text("utf-8")) if b.saved_as == "own/muon.py")
megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core needs Python 3.12"
)
RANDOM = """
import torch.distributed as dist


def update(parameter):
    odd = dist.get_rank() if parameter.name.endswith("k_proj.weight") else 0
    return parameter.values, {"odd": parameter.values + odd}
"""


def code_of(text: str) -> Code:
    return {f"{FIELD}: mine.py": text}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    return families.make("Qwen3ForCausalLM", made, num_attention_heads=8, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mixture")
    return families.make("Qwen3MoeForCausalLM", made, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    """A second rank for all tests."""
    with closing(Team([""])) as made:
        yield made


@contextmanager
def begun(
    folder: Path, team: Team, dtype: str = "float32", **changes: object
) -> Iterator[Training]:
    section = replace(SECTION, ranks=2, **changes)  # type: ignore[arg-type]
    training = Training(folder, section, threads=1, dtype=dtype, team=team)
    try:
        yield training
    finally:
        leave(training)


def use(training: Training, text: str) -> None:
    """This function from the next step on."""
    training.learner.configure(OWN, LossSection(), code_of(text))


def manifest_of(training: Training, step: int) -> Manifest:
    found = weight_hash(training.learner.weights())
    return Manifest(run="r", epoch=1, step=step, policy_version=step, weight_hash=found)


def apart(one: Training, two: Training, start: dict) -> tuple[float, float]:  # type: ignore[type-arg]
    """How far the weights of both are apart, and how far they moved; sums."""
    ours, theirs = one.learner.weights(), two.learner.weights()
    found = ((ours[n].float(), theirs[n].float(), t.float()) for n, t in start.items())
    sums = [(float((a - b).abs().sum()), float((a - t).abs().sum())) for a, b, t in found]
    return sum(a for a, _ in sums), sum(b for _, b in sums)


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("fsdp2", LayoutSection()),
        pytest.param("megatron", LayoutSection(tp=2), marks=megatron),
        pytest.param("megatron", LayoutSection(pp=2), marks=megatron),
    ],
)
def test_muon_of_two_ranks_is_that_of_one_but_for_rounding(
    backend: str, layout: LayoutSection, folder: Path, team: Team, tmp_path: Path
) -> None:
    """Of the page: a matrix in pieces would move otherwise. Done again, to the bit, once after
    ranks met anew. A checkpoint of two goes on with one, and with two."""
    one = Training(folder, SECTION, threads=1)
    start = {name: tensor.clone() for name, tensor in one.learner.weights().items()}
    use(one, MUON)
    with begun(folder, team, backend=backend, layout=layout) as two:
        use(two, MUON)
        found = []
        for seed in (0, 1):
            alone, together = one.learner.step(batch_of(seed)), two.learner.step(batch_of(seed))
            assert alone.loss == pytest.approx(together.loss, rel=2e-3, abs=1e-5)
            found.append(hashes(two))
        far, moved = apart(one, two, start)
        assert 0 < 1000 * far < moved
        two.save(store := CheckpointStore(tmp_path), manifest := manifest_of(two, 2))
        state = store.load(manifest)[1]
        assert state.keys() == one.learner.optimizer_tensors().keys()
        assert {key.rpartition(":")[2] for key in state} >= {"momentum", "exp_avg", "step"}
        one.restore(store, manifest)
        assert hashes(one) == found[-1]
        two.learner.load(start, {}, 0)
        for seed in (0, 1):
            two.learner.step(batch_of(seed))
            assert hashes(two) == found[seed]
            meet_again(two)
            use(two, MUON)
        expected = two.learner.step(batch_of(2)), hashes(two)
        alone = one.learner.step(batch_of(2))
        assert alone.loss == pytest.approx(expected[0].loss, rel=2e-3, abs=1e-5)
        two.restore(store, manifest)
        assert hashes(two) == found[-1]
        assert (two.learner.step(batch_of(2)), hashes(two)) == expected


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("fsdp2", LayoutSection()),
        pytest.param("megatron", LayoutSection(ep=2), marks=megatron),
    ],
)
def test_ours_called_by_ones_own_gives_the_bits_of_ours(
    backend: str, layout: LayoutSection, mixture: Path, team: Team
) -> None:
    """AdamW of whole parameters in bfloat16 is that of their rows, in weights and state, of stacked
    experts too; and its moments are handed over in both directions."""
    text, found = "def update(parameter):\n    return parameter.adamw()\n", []
    with begun(mixture, team, "bfloat16", backend=backend, layout=layout) as two:
        start = {name: tensor.clone() for name, tensor in two.learner.weights().items()}
        for of_steps in ((False, False, False), (True, True, True), (False, True, False)):
            two.learner.load(start, {}, 0)
            for seed, is_own in enumerate(of_steps):
                if is_own:
                    use(two, text)
                else:
                    two.learner.configure(ADAMW, LossSection())
                metrics = two.learner.step(batch_of(seed)).metrics
            found.append((metrics, hashes(two)))
    assert found[0] == found[1] == found[2]


@megatron
def test_one_rank_of_megatron_has_matrices_too(folder: Path) -> None:
    """Its layers have queries, keys and values of a group of heads in blocks of one tensor."""
    one = Training(folder, SECTION, threads=1)
    start = {name: tensor.clone() for name, tensor in one.learner.weights().items()}
    other = Training(folder, replace(SECTION, backend="megatron"), threads=1)
    for training in (one, other):
        use(training, MUON)
        training.learner.step(batch_of(0))
    far, moved = apart(one, other, start)
    leave(other)
    assert 0 < 1000 * far < moved


def test_one_that_gives_ranks_other_numbers_ends_the_step(folder: Path, team: Team) -> None:
    """Each would keep its rows of another matrix; state counts, from which the next is made."""
    with begun(folder, team) as two:
        use(two, RANDOM)
        says = rf"^step 1: {FIELD}: mine.py:5 gave other numbers for \S+\.k_proj\.weight on rank 1"
        with pytest.raises(ConfigError, match=says):
            two.learner.step(batch_of(0))

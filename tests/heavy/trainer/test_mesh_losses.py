"""Every loss on every mesh: two ranks on the CPU give what one gives, and redo it to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.compute.team import Team
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import LayoutSection, OptimizerSection, TrainerSection
from rlstreams.workers.trainer.learn.packing import Batch, MicroBatch
from rlstreams.workers.trainer.training.training import Training
from tests import families
from tests.heavy.trainer.own_code import BOUNDS, PPO
from tests.heavy.trainer.parallel_stand import batch_of, hashes, leave, meet_again

TOLERANCE = 1e-5
TOP_K = 3
CRITIC = LossSection(advantage="gae", gae_lambda=0.9)
TAUGHT = LossSection(kind="distill", advantage="one", correction="none")
LOSSES = {
    "critic": CRITIC,
    "critic alone": replace(CRITIC, value_warmup_steps=1),
    "reference": LossSection(kl_coef=0.1),
    "teacher": TAUGHT,
    "teacher of several tokens": replace(TAUGHT, distill_top_k=TOP_K),
}
# Without a mean over steps the first moment is the gradient. All begin with a critic, and go on
# under the other losses.
SECTION = TrainerSection(
    optimizer=OptimizerSection(lr=1e-2, warmup_steps=0, max_grad_norm=1e9, beta1=0.0),
    loss=CRITIC,
)
needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core needs Python 3.12"
)


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    """A second rank for all tests."""
    with closing(Team([""])) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    return families.make("Qwen3ForCausalLM", made, num_attention_heads=8, tie_word_embeddings=False)


def asked(loss: LossSection) -> Batch:
    """With all that this loss takes of a reference, drawn at random."""
    batch, draw = batch_of(0, 57), np.random.default_rng(0)

    def filled(part: MicroBatch) -> MicroBatch:
        shape = part.token_ids_BT.shape
        near_BT = part.behavior_logprobs_BT + draw.normal(0, 0.1, shape).astype(np.float32)
        ids_BTK = np.argsort(draw.random((*shape, 40)), -1)[..., :TOP_K].astype(np.int32)
        logprobs_BTK = np.log(draw.dirichlet(np.ones(TOP_K + 1), shape)[..., :TOP_K])
        return replace(
            part,
            reference_logprobs_BT=near_BT,
            top_ids_BTK=ids_BTK if loss.distill_top_k else None,
            top_logprobs_BTK=logprobs_BTK.astype(np.float32) if loss.distill_top_k else None,
        )

    return replace(batch, micro_batches=tuple(filled(part) for part in batch.micro_batches))


@pytest.mark.parametrize(
    ("backend", "layout", "names"),
    [
        ("fsdp2", LayoutSection(), list(LOSSES)),
        pytest.param(  # `test_context` has slices of rows by day, under a loss of whole sequences
            *("fsdp2", LayoutSection(cp=2), ["critic", "teacher of several tokens"]),
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(
                "megatron",
                layout,
                ["critic", "reference", "teacher of several tokens"],
                marks=needs_megatron,
            )
            for layout in (LayoutSection(tp=2), LayoutSection(pp=2))
        ),
    ],
)
def test_two_ranks_learn_what_one_learns(
    backend: str, layout: LayoutSection, names: list[str], folder: Path, team: Team
) -> None:
    """Loss, metrics and gradients in float32, the value head's too; done again, to the bit."""
    one = Training(folder, SECTION, threads=1)
    section = replace(SECTION, ranks=2, backend=backend, layout=layout)  # type: ignore[arg-type]
    two = Training(folder, section, threads=1, team=team)
    start = {name: tensor.clone() for name, tensor in one.learner.weights().items()}
    head = {name: t.clone() for name, t in one.learner.optimizer_tensors().items()}
    assert set(head) == {"value_head.weight:value", "value_head.bias:value"}
    for name in (*names, "critic"):  # last, so that it outlives what comes then
        batch, loss, found = asked(LOSSES[name]), LOSSES[name], []
        for training in (one, two, two):
            training.learner.load(start, head, 0)
            training.learner.configure(SECTION.optimizer, loss)
            found.append((training.learner.step(batch), hashes(training)))
        (alone, _), (together, first), again = found
        assert (together, first) == again, name
        assert alone.loss == pytest.approx(together.loss, abs=TOLERANCE), name
        assert alone.metrics == pytest.approx(together.metrics, abs=10 * TOLERANCE), name
        own, theirs = one.learner.optimizer_tensors(), two.learner.optimizer_tensors()
        assert own.keys() == theirs.keys()
        moments = {key: t for key, t in own.items() if key.endswith("exp_avg")}
        largest = max(float(moment.abs().max()) for moment in moments.values())
        assert largest > 1000 * TOLERANCE, name
        assert ("value_loss" in alone.metrics) == name.startswith("critic")
        for key, moment in moments.items():
            assert float((theirs[key] - moment).abs().max()) < TOLERANCE, (name, key)
    meet_again(two)  # as after memory ran out on a rank
    two.learner.load(start, head, 0)
    two.learner.configure(SECTION.optimizer, loss)
    assert (two.learner.step(batch), hashes(two)) == again
    leave(two)


def test_a_loss_of_ones_own_on_two_ranks(folder: Path, team: Team) -> None:
    """PPO of the user's gives the bits of ours; one that fails on a rank ends the step by its place
    on that rank, and no rank waits for it."""
    section = replace(SECTION, ranks=2)
    two = Training(folder, section, threads=1, team=team)
    start = {name: tensor.clone() for name, tensor in two.learner.weights().items()}
    head = {name: t.clone() for name, t in two.learner.optimizer_tensors().items()}
    own = LossSection(kind="my_loss:loss")
    code = {"trainer.loss.kind: my_loss.py": PPO, "trainer.loss.kind: bounds.py": BOUNDS}
    batch, found = asked(own), []
    for loss, text in ((LossSection(), {}), (own, code)):
        two.learner.load(start, head, 0)
        two.learner.configure(SECTION.optimizer, loss, text)
        found.append((two.learner.step(batch), hashes(two)))
    assert found[0] == found[1]
    short = batch.micro_batches[-1].num_loss_tokens
    fails = f"def loss(tokens):\n    assert len(tokens.policy_N) != {short}, 'short'\n"
    fails += "    return -tokens.policy_N\n"
    two.learner.configure(SECTION.optimizer, own, {"trainer.loss.kind: my_loss.py": fails})
    with pytest.raises(ConfigError, match=r"^step 2: trainer.loss.kind: my_loss.py:2: Assert"):
        two.learner.step(batch)
    two.close()

"""The optimizer step: right, deterministic, resumable, and nothing on NaN."""

import numpy as np
import pytest
import torch

from rlstreams.workers.compute import learn
from rlstreams.workers.compute.learn import Learner
from rlstreams.workers.compute.shards import Whole
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import OptimizerSection
from rlstreams.workers.model.model import configure_torch
from rlstreams.workers.trainer.learn.adam import Adam
from rlstreams.workers.trainer.learn.loss import policy_losses
from rlstreams.workers.trainer.learn.out_of_memory import OutOfMemoryError
from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.layout import weight_hash
from tests.unit.trainer.trainer_builders import TinyModel, batch_of, random_samples

configure_torch(1)
SECTION = OptimizerSection(lr=1e-2, warmup_steps=4, weight_decay=0.01)


def learner(seed=0, **options) -> Learner:
    return Learner.of(TinyModel(seed), OptimizerSection(lr=1e-2, **options), LossSection())


def made(seed=0, token_budget=40):
    return batch_of(random_samples(12, seed), token_budget=token_budget)


def hash_after(learner_, seeds) -> str:
    for seed in seeds:
        learner_.step(made(seed))
    return weight_hash(learner_.weights())


def test_a_changed_configuration_begins_with_the_next_step():
    """Loading brings moments back, not the learning rate or the decay of the old configuration."""
    first = learner(warmup_steps=0)
    first.step(made())
    second = Learner.of(
        TinyModel(), OptimizerSection(lr=0.125, warmup_steps=0, beta1=0.5), LossSection()
    )
    second.load(first.weights(), first.optimizer_tensors(), step=1)
    assert second.step(made(1)).metrics["lr"] == 0.125


def test_decay_is_of_every_parameter():
    """Norms and biases shrink as much: a step of zero gradients shows the decay alone."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    named = dict(model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    adam = Adam(named)
    adam.configure(OptimizerSection(weight_decay=0.5))
    for name, parameter in named.items():
        adam.take(name, torch.zeros_like(parameter))
    adam.update(0.1)
    assert set(named) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.detach(), before[name] * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("reduce", ["token", "sequence"])
def test_the_loss_is_that_of_each_sample_alone(reduce):
    """Unpadded sequences, scored one by one with a plain softmax, give the same batch loss: the
    mean of tokens, or of the samples' means."""
    model, batch, loss = TinyModel(), made(), LossSection(reduce=reduce)
    found = []
    for micro in batch.micro_batches:
        for row in range(len(micro.token_ids_BT)):
            num = int(micro.real_BT[row].sum())
            ids = torch.from_numpy(micro.token_ids_BT[row, :num])
            mask = torch.ones(num, num, dtype=torch.bool).tril()
            with torch.no_grad():
                logits = model(ids[None], mask[None, None], torch.arange(num)[None], False).logits
            logprobs = torch.log_softmax(logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
            answer = torch.from_numpy(micro.loss_mask_BT[row, 1:num])
            losses = policy_losses(
                logprobs[answer],
                torch.from_numpy(micro.proximal_logprobs_BT[row, 1:num])[answer],
                torch.from_numpy(micro.behavior_logprobs_BT[row, 1:num])[answer],
                torch.tensor(micro.advantages_B[row]),
                [int(answer.sum())],
                loss,
            )
            found.append(losses.losses_N)
    parts = torch.cat(found) if reduce == "token" else torch.stack([one.mean() for one in found])
    result = Learner.of(model, SECTION, loss).step(batch)
    assert abs(result.loss) > 1e-3
    assert result.loss == pytest.approx(float(parts.mean()), rel=1e-5)


def test_metrics_are_complete_and_finite():
    """A step reports what the ledger and the report show."""
    result = learner().step(made())
    expected = {"entropy", "clip_fraction", "weight_mean", "kl", "mismatch_mean", "mismatch_max"}
    expected |= {"ratio_max", "ess"}
    expected |= {f"rollout_{name}" for name in ("k1", "k3", "ppl_ratio", "chi2_token", "chi2_seq")}
    expected |= {f"rollout_{name}" for name in ("prob_diff_mean", "prob_diff_max", "pearson")}
    expected |= {
        "grad_norm",
        "lr",
        "num_loss_tokens",
        "tokens_real",
        "tokens_shared",
        "tokens_computed",
    }
    assert set(result.metrics) == expected
    assert np.isfinite(list(result.metrics.values())).all()
    assert result.metrics["grad_norm"] > 0


def test_a_checkpoint_of_another_model_is_refused():
    """Names that are not this model's are said, and nothing is loaded."""
    taught = learner()
    expected = weight_hash(taught.weights())
    with pytest.raises(WeightError, match=r"head\.weight is missing"):
        taught.load({"other": torch.zeros(1)}, {}, step=1)
    with pytest.raises(ValueError, match="unknown parameter: 'tail:exp_avg'"):
        taught.load(taught.weights(), {"tail:exp_avg": torch.zeros(1)}, step=1)
    assert (weight_hash(taught.weights()), taught.step_number) == (expected, 0)


def test_memory_that_ran_out_without_a_word_is_no_step():
    """Python's own error says nothing; the micro-batch is not left out in silence, nor is the
    gradient of the one before it left in."""
    short, forwards = learner(), []
    before = weight_hash(short.weights())

    def allocate(module: object, _args: object) -> None:
        forwards.append(module)
        if len(forwards) == 2:
            raise MemoryError

    hook = short._shards.model.embed.register_forward_pre_hook(allocate)
    with pytest.raises(OutOfMemoryError, match="micro-batch 1: MemoryError"):
        short.step(made())
    assert (0, before) == (short.step_number, weight_hash(short.weights()))
    hook.remove()
    short.step(made())
    assert weight_hash(short.weights()) == hash_after(learner(), [0])


def test_each_micro_batch_takes_its_shift_on_a_shared_gpu():
    """Forward and backward of one are one shift, and shifts change no bit."""
    alone, sharing, shifts = learner(), learner(), []

    def run(work):
        shifts.append(weight_hash(sharing._adam.gradients))
        return work()

    sharing.run = run
    batch = made()
    assert alone.step(batch).loss == sharing.step(batch).loss
    assert weight_hash(alone.weights()) == weight_hash(sharing.weights())
    assert len(shifts) == len(batch.micro_batches) == len(set(shifts)) > 1


def test_the_host_has_done_its_figures_before_it_waits(monkeypatch):
    """The gradient's norm is the first number that it reads back from a GPU."""
    done = []
    figures, norm = learn.rollout_figures, Whole.norm
    monkeypatch.setattr(
        learn, "rollout_figures", lambda batch: done.append("figures") or figures(batch)
    )
    monkeypatch.setattr(Whole, "norm", lambda *given: done.append("norm") or norm(*given))
    learner().step(made())
    assert done == ["figures", "norm"]

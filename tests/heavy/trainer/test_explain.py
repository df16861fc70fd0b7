"""`rlstreams config loss`: the formula that runs, and the numbers of a recorded step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from rlstreams.__main__ import main
from rlstreams.debug.loss.formula import formula, numbers
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.loss import Advantage, Kind, LossSection
from rlstreams.workers.config.trainer import OptimizerSection, TrainerSection
from tests.heavy.trainer.trainer_stand import (
    make_config,
    make_log,
    make_trainer,
    run_steps,
    scored,
    send,
    steps,
)
from tests.memory.bus import MemoryBus

CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "-w min(rho A, clip(rho, 0.8, 1.28) A), at most -w 3 A where A < 0; rho = exp(pi - prox)"),
    ({}, "w = min(exp(prox - mu), 2)"),
    ({"kind": "gspo", "clip_low": 3e-4}, "clip(s, 0.9997, 1.28)"),
    ({"kind": "dppo", "divergence": "kl"}, "moves off with A and kl > 0.2"),
    ({"kind": "m2po"}, "0 for tokens of largest (pi - mu)^2"),
    ({"normalize_std": False}, "A = r - mean of the group; without siblings 0"),
    ({"overlong_tokens": 90, "overlong_buffer_tokens": 30}, "r less up to 1 for 60 to 90 tokens"),
    ({"correction": "mask", "weight_floor": 0.5}, "exp(prox - mu), 0 outside of 0.5 to 2"),
    ({"weight_normalize": True}, "(min(exp(prox - mu), 2)) / its mean over the batch"),
    ({"off_policy_max": 0.5}, "0 for a sample with A < 0 and a mean of mu - pi above 0.5"),
    ({"veto_low": 1e-4}, "exp(prox - mu) is not 0.0001 to any"),
    (
        {"rejection": "k3", "rejection_level": "sequence_mean", "rejection_high": 0.01},
        "0 where the sample's mean k3 of prox - mu is above 0.01",
    ),
    ({"kl_coef": 0.1, "kl_weight": "ratio"}, "+ 0.1 w min(rho, 10) min(exp(d) - 1 - d, 10), d ="),
    ({"entropy_coef": 0.01, "entropy_share": 0.2}, "the 20% of the batch's tokens of highest"),
    ({"kind": "sft", "advantage": "one", "reward_min": 0.5}, "A = 1; 0 where r < 0.5"),
    ({"kind": "sft", "advantage": "reward"}, "-w A pi"),
    (
        {"advantage": "gae", "gae_lambda": 0.9},
        "GAE of r at the last token, gamma 1, lambda 0.9",
    ),
    ({"advantage": "gae"}, "+ 0.1 max((V - R)^2, (V' - R)^2) / 2, V' = V, at most 0.2 from V0;"),
    ({"advantage": "gae", "value_warmup_steps": 4}, "in the first 4 steps V alone learns"),
    ({"kind": "distill", "advantage": "one"}, "-w min(rho, 10) A (ref - pi), no gradient through"),
    (
        {"kind": "distill", "advantage": "one", "correction": "none", "distill_top_k": 8},
        "w A KL(student || teacher), over the teacher's 8 likeliest tokens and all others as one",
    ),
    (
        {
            "kind": "distill",
            "advantage": "one",
            "correction": "none",
            "distill_top_k": 8,
            "distill_beta": 0.25,
        },
        "w A (0.25 KL(teacher || m) + 0.75 KL(student || m)), m = 0.25 teacher + 0.75 student",
    ),
    ({"reduce": "constant", "constant_tokens": 64}, "mean over samples of their sums / 64"),
]


@pytest.mark.parametrize(("loss", "part"), CASES)
def test_every_setting_is_in_the_formula(loss: dict[str, Any], part: str) -> None:
    assert part in "\n".join(formula(TrainerSection(loss=LossSection(**loss))))


@pytest.mark.parametrize("kind", sorted({*get_args(Kind)} - {"distill"}))
@pytest.mark.parametrize("advantage", get_args(Advantage))
def test_every_name_has_a_text(kind: Kind, advantage: Advantage) -> None:
    """And the updates of a batch are counted."""
    section = TrainerSection(
        loss=LossSection(kind=kind, advantage=advantage, proximal="step_start"),
        optimizer=OptimizerSection(schedule="cosine", decay_steps=90),
        minibatches=4,
        batch_epochs=2,
    )
    text = "\n".join(formula(section))
    assert "16 groups in 4 mini-batches, 2 times: 8 updates a step" in text
    assert "then cosine to 0 at step 90" in text


def test_a_recorded_step_s_numbers(tmp_path: Path) -> None:
    """Advantages as the step recorded them, weights from the log-probs in the log."""
    log, config = make_log(), make_config(tmp_path, trainer__steps=1)
    trainer = make_trainer(log, config)
    send(log, *(scored(0, sample, 0, reward=float(sample)) for sample in range(2)))
    run_steps(log, trainer, 1)
    trainer.close()
    bus = MemoryBus(log, "demo")
    lines = list(numbers(bus, 1))
    (event,) = steps(log)
    assert f"r 1 -> A {event.samples[1].advantage:.4g}" in "\n".join(lines)
    assert f"loss {event.loss:.6g}; ratio_max {event.metrics['ratio_max']:.4g}" in lines[-1]
    assert sum("->" in line and line.startswith("  ") for line in lines) == 5
    with pytest.raises(ConfigError, match="there is no step 2: the log has steps up to 1"):
        list(numbers(bus, 2))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    example = str(Path(__file__).parents[3] / "infra/examples/demo.toml")
    assert main(["config", "loss", example, "--trainer.loss.kind", "sapo"]) == 0
    assert "sigmoid" in capsys.readouterr().out
    assert main(["config", "loss", example, "--trainer.loss.proximal", "behavior"]) != 0
    assert "would correct nothing" in capsys.readouterr().err

"""TRL's own loss on the same batches, by hand: `python -m tests.reference.against_trl`.

Needs `pip install trl accelerate`, which nothing else here does. Prints, for each loss, the largest
difference of loss and gradient over random batches in float64 and all of TRL's corrections.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.trainer.learn.kl import kl_terms, with_kl
from rlstreams.workers.trainer.learn.loss import policy_losses, reduced

ROWS, WIDTH, CAP, SEEDS = 6, 9, 3.0, 20
PLAIN: dict[str, Any] = {"clip_dual": 0.0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dapo": ({}, PLAIN),
    "grpo": ({"loss_type": "grpo"}, PLAIN | {"reduce": "sequence"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, PLAIN | {"reduce": "constant", "constant_tokens": 64}),
    "delta": ({"delta": 3.0}, {"clip_dual": 3.0}),
    "gspo": (
        {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4},
        {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "reduce": "sequence"},
    ),
    "cispo": ({"loss_type": "cispo", "high": 5.0}, {"kind": "cispo", "clip_high": 4.0}),
    "sapo": ({"loss_type": "sapo"}, {"kind": "sapo", "reduce": "sequence"}),
    "off-policy": ({"off": 0.2}, PLAIN | {"off_policy_max": 0.2}),
    "kl": ({"beta": 0.1}, PLAIN | {"kl_coef": 0.1}),
    "kl, ratio": ({"beta": 0.1, "bias": True}, PLAIN | {"kl_coef": 0.1, "kl_weight": "ratio"}),
}
MODES: dict[str, dict[str, Any]] = {
    "": {"correction": "none"},
    "token_truncate": {"weight_cap": CAP},
    "token_mask": {"correction": "mask", "weight_cap": CAP},
    "sequence_truncate": {"correction_level": "sequence", "weight_cap": CAP},
    "sequence_mask": {"correction": "mask", "correction_level": "sequence", "weight_cap": CAP},
}
# There TRL weighs otherwise: KL by rho alone, and a sequence's tokens by their mean gradient.
OTHERWISE = {("kl, ratio", m) for m in MODES if m} | {("gspo", m) for m in MODES if "token" in m}


def theirs(b: dict[str, Tensor], mode: str, by: dict[str, Any]) -> Tensor:
    from trl.trainer.grpo_trainer import GRPOTrainer

    logs = (b["prox"] - b["mu"]) * b["mask"]
    ratio = (logs.sum(-1, keepdim=True) if "sequence" in mode else logs).exp()
    ratio = ratio.masked_fill(ratio > CAP, 0.0) if "mask" in mode else ratio.clamp(max=CAP)
    trainer = object.__new__(GRPOTrainer)
    trainer.__dict__ |= {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (b["pi"], b["pi"].detach(), None),
        "aux_loss_enabled": False, "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": by.get("off"),
        "importance_sampling_level": by.get("level", "token"), "beta": by.get("beta", 0.0),
        "loss_type": by.get("loss_type", "dapo"), "epsilon_low": by.get("low", 0.2),
        "epsilon_high": by.get("high", 0.28), "use_vllm": bool(mode), "max_completion_length": 64,
        "vllm_importance_sampling_correction": True, "_entropy_bonus_enabled": False,
        "model": SimpleNamespace(training=True), "current_gradient_accumulation_steps": 1,
        "accelerator": SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "args": SimpleNamespace(
            use_bias_correction_kl=by.get("bias", False), delta=by.get("delta"),
            sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, steps_per_generation=1,
        ),
    }  # fmt: skip
    ids = torch.zeros_like(b["mask"])
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
        "completion_mask": b["mask"], "advantages": b["advantages"],
        "old_per_token_logps": b["prox"], "ref_per_token_logps": b["ref"],
        "importance_sampling_ratio": ratio, "sampling_per_token_logps": b["mu"],
        "num_items_in_batch": b["mask"].sum(),
    }  # fmt: skip
    loss: Tensor = trainer._compute_loss(None, inputs)
    return loss


def ours(b: dict[str, Tensor], by: LossSection) -> Tensor:
    is_real, counts = b["mask"].bool(), b["mask"].sum(1).tolist()
    pi, prox, mu, ref = (b[name][is_real] for name in ("pi", "prox", "mu", "ref"))
    advantages = b["advantages"][:, None].expand(ROWS, WIDTH)[is_real]
    losses = policy_losses(pi, prox, mu, advantages, counts, by)
    if by.kl_coef:
        losses = with_kl(losses, kl_terms(pi, ref, by), pi, prox, by)
    return reduced(
        losses.losses_N, counts, by,
        num_batch_tokens=sum(counts), num_batch_learnt=ROWS, num_batch_samples=ROWS,
    )  # fmt: skip


def batch(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64) * scale

    mu = -normal(1.0).abs() - 0.3
    prox = mu + normal(0.4)
    pi = prox + normal(0.4)
    lengths = torch.randint(1, WIDTH + 1, (ROWS, 1), generator=draw)
    mask = (torch.arange(WIDTH)[None] < lengths).long()
    return {
        "mu": mu, "prox": prox, "pi": pi.requires_grad_(), "ref": pi.detach() + normal(0.5),
        "advantages": normal(1.0)[:, 0], "mask": mask,
    }  # fmt: skip


if __name__ == "__main__":
    apart: dict[str, float] = defaultdict(float)
    for name, mode, number in itertools.product(CASES, MODES, range(SEEDS)):
        if (name, mode) in OTHERWISE:
            continue
        of_trl, of_us = CASES[name]
        drawn = batch(number)
        losses = theirs(drawn, mode, of_trl), ours(drawn, LossSection(**of_us, **MODES[mode]))
        slopes = [torch.autograd.grad(loss, drawn["pi"])[0] for loss in losses]
        found = (losses[0] - losses[1]).abs().detach(), (slopes[0] - slopes[1]).abs().max()
        apart[name] = max(apart[name], *map(float, found))
    for name, most in apart.items():
        sys.stdout.write(f"{name:10} {most:.1e}\n")

"""Passes of a micro-batch through the model: the look before a step, and the pass that learns.

Axes: `B` sequence, `T` token, `N` tokens of the loss, row by row.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.model.device import on_device
from rlstreams.workers.model.documents import Documents
from rlstreams.workers.model.one_order import backward
from rlstreams.workers.model.routing import Routes
from rlstreams.workers.model.token_scores import Score, TokenScores
from rlstreams.workers.sandbox.recorded import Code
from rlstreams.workers.trainer.learn.batch_factors import NOTHING, Look, look_of
from rlstreams.workers.trainer.learn.critic import with_values
from rlstreams.workers.trainer.learn.distill import taught
from rlstreams.workers.trainer.learn.kl import kl_terms, with_entropy, with_kl
from rlstreams.workers.trainer.learn.loss import policy_losses, proximal_of, reduced
from rlstreams.workers.trainer.learn.loss_totals import LossSums
from rlstreams.workers.trainer.learn.own import loss_of
from rlstreams.workers.trainer.learn.packing import MicroBatch


class Passes:
    """Passes of one rank's model under one loss; ranks that share a row call them together."""

    def __init__(self, scorer: Score, device: torch.device, loss: LossSection, code: Code) -> None:
        """
        Args:
            code: see `loss_of`.
        """
        self._scorer, self._device, self._loss = scorer, device, loss
        self._call = loss_of(loss, code)
        self._tensor = partial(on_device, device)

    @torch.no_grad()
    def look(self, micro_batch: MicroBatch) -> Look:
        """Log-probs, entropies and values of the loss tokens."""
        if not micro_batch.num_loss_tokens:
            return NOTHING
        with self._scorer.routing.replaying(self._routes(micro_batch)):
            scores = self.score(micro_batch)
        return look_of(scores)

    def accumulate(self, micro_batch: MicroBatch, sums: LossSums) -> None:
        """Add one micro-batch's share of the batch's gradient."""
        # Around the backward too: layers recomputed there choose their experts once more.
        with self._scorer.routing.replaying(self._routes(micro_batch)) as counted:
            self._learn(micro_batch, sums)
        if micro_batch.is_routed_BT is not None:
            sums.add_routes(
                num_layers=self._scorer.routing.num_layers,
                recorded=int((micro_batch.is_routed_BT & micro_batch.own_BT).sum()),
                forwarded=int(micro_batch.own_BT[:, 1:].sum()),
                flips=counted.num_flips,
            )

    def _routes(self, micro_batch: MicroBatch) -> Routes | None:
        """Routes for the routers to follow, moved to the device; None: the routers choose."""
        experts_BTLK, is_routed_BT = micro_batch.routed_experts_BTLK, micro_batch.is_routed_BT
        if experts_BTLK is None or is_routed_BT is None:
            return None
        if micro_batch.bin_tokens:
            experts_BTLK = micro_batch.in_bin(experts_BTLK)
            is_routed_BT = micro_batch.in_bin(is_routed_BT)
        return Routes(self._tensor(experts_BTLK), self._tensor(is_routed_BT))

    def _learn(self, micro_batch: MicroBatch, sums: LossSums) -> None:
        of = partial(self._of_loss, micro_batch)
        advantages_N = self._tensor(micro_batch.advantages_N)
        sampled_N, behavior_N = of("proximal_logprobs_BT"), of("behavior_logprobs_BT")
        scores = self.score(micro_batch)
        policy_N, counts_R = scores.logprobs_N, micro_batch.loss_tokens_by_row
        proximal_N = proximal_of(
            sampled_N,
            behavior_N,
            policy_N,
            self._loss,
            start_N=of("start_logprobs_BT"),
            ages_N=of("ages_BT"),
        )
        # `Training` has checked that samples have a reference; stand-ins are not compared with one.
        reference_N = of("reference_logprobs_BT") if self._loss.why_compared else None
        gains_N = None
        if self._loss.kind == "distill":
            assert reference_N is not None, "the samples were checked"
            teacher_NK = of("top_logprobs_BTK")
            gains_N, kl_N = taught(scores, proximal_N, reference_N, teacher_NK, self._loss)
            sums.add_reference(kl_N)
        losses = policy_losses(
            policy_N, proximal_N, behavior_N, advantages_N, counts_R, self._loss,
            of("factors_BT"), gains_N, call=self._call, ages_N=of("ages_BT"),
            entropy_N=scores.entropy_N, reference_N=reference_N,
        )  # fmt: skip
        if reference_N is not None and self._loss.kl_coef:
            kl_N = kl_terms(policy_N, reference_N, self._loss)
            losses = with_kl(losses, kl_N, policy_N, proximal_N, self._loss)
            sums.add_reference(kl_N)
        if self._loss.entropy_coef:
            losses = with_entropy(losses, policy_N, scores.entropy_N, self._loss)
        if (returns_N := of("returns_BT")) is not None:
            start_N, by = of("values_BT"), self._loss
            losses = with_values(losses, scores, start_N, returns_N, by, sums)
        share = reduced(
            losses.losses_N,
            counts_R,
            self._loss,
            num_batch_tokens=micro_batch.num_batch_loss_tokens,
            num_batch_learnt=micro_batch.num_batch_learnt,
            num_batch_samples=micro_batch.num_batch_samples,
            shares_R=None if (own := micro_batch.shares_R) is None else self._tensor(own),
        )
        backward(share)
        sums.add_share(share)
        sums.add(losses, scores, behavior_N)

    def _of_loss(self, micro_batch: MicroBatch, name: str) -> Any:  # noqa: ANN401
        """Values of an array at the loss tokens, row by row; None if there is no such array."""
        values_BT = getattr(micro_batch, name)
        return None if values_BT is None else self._tensor(values_BT[micro_batch.loss_mask_BT])

    def score(self, micro_batch: MicroBatch) -> TokenScores:
        """Scores of the loss tokens, row by row; also of the teacher's tokens, if any."""
        top_ids_NK = self._of_loss(micro_batch, "top_ids_BTK")
        top = () if top_ids_NK is None else (top_ids_NK.long(),)
        mask_BT, ids_BT, real_BT = (
            micro_batch.loss_mask_BT, micro_batch.token_ids_BT, micro_batch.real_BT
        )  # fmt: skip
        temperature_N = micro_batch.temperature_BT[mask_BT]
        if not micro_batch.bin_tokens:
            chosen_N = self._tensor(np.flatnonzero(mask_BT))
            padded = self._tensor(ids_BT), self._tensor(real_BT), chosen_N
            return self._scorer(*padded, self._tensor(temperature_N), None, *top)
        lengths = real_BT.sum(1).tolist()
        documents = Documents.of(lengths, micro_batch.bin_tokens, micro_batch.taken)
        chosen, back = documents.scored(mask_BT[real_BT])
        if back is not None:
            temperature_M = np.ones(len(chosen), np.float32)
            temperature_M[back] = temperature_N
            if top or (temperature_M[back] != temperature_N).any():  # one token has several scores
                chosen, back = chosen[back], None
            else:
                temperature_N = temperature_M
        scores = self._scorer(
            self._tensor(micro_batch.in_bin(ids_BT)),
            None,
            self._tensor(chosen),
            self._tensor(temperature_N),
            documents.to(self._device),
            *top,
        )
        return scores.at(None if back is None else self._tensor(back))

    def pass_by(self, micro_batch: MicroBatch) -> None:
        """A pass that the other ranks wait for; it adds zeros, whatever terms the loss has."""
        nothing = self.score(micro_batch).logprobs_N.sum() * 0.0
        nothing.backward()  # type: ignore[no-untyped-call]

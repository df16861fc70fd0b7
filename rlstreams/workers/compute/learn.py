"""One batch in, new weights out: forward, backward, clip, AdamW.

The same weights, optimizer state, step number and batch give the same bits, under
`configure_torch` on the same hardware: nothing here draws random numbers or depends on a clock or
on what ran before. Axes: `B` sequence, `T` token, `N` tokens of the loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import OptimizerSection
from rlstreams.workers.model.device import Run, at_once, on_device
from rlstreams.workers.model.documents import Documents
from rlstreams.workers.model.model import causal_mask
from rlstreams.workers.model.offload import OffLoad
from rlstreams.workers.model.one_order import backward
from rlstreams.workers.model.routing import Routes
from rlstreams.workers.model.token_scores import MakeMask, Score, TokenScorer, TokenScores
from rlstreams.workers.trainer.learn.adam import Adam, lr_at
from rlstreams.workers.trainer.learn.batch_factors import NOTHING, Look, look_of, with_factors
from rlstreams.workers.trainer.learn.critic import PREFIX, value_figures, with_gae, with_values
from rlstreams.workers.trainer.learn.distill import taught
from rlstreams.workers.trainer.learn.kept import Kept
from rlstreams.workers.trainer.learn.kl import kl_terms, with_entropy, with_kl
from rlstreams.workers.trainer.learn.loss import policy_losses, proximal_of, reduced
from rlstreams.workers.trainer.learn.loss_totals import LossSums, LossTotals, added
from rlstreams.workers.trainer.learn.out_of_memory import OutOfMemoryError, in_memory
from rlstreams.workers.trainer.learn.packing import Batch, MicroBatch
from rlstreams.workers.trainer.learn.rollout_figures import rollout_figures
from rlstreams.workers.trainer.learn.trainable import VALUE, AllWeights, Trainable, sorted_state


class NumericsError(Exception):
    """A step gave NaN or infinity; names step and number. The weights are as before the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step tells the ledger."""

    loss: float  # mean over the batch's loss tokens
    metrics: dict[str, float]
    seconds: dict[str, float] = field(compare=False)  # by part


class Learner:
    """A model that learns. Not thread-safe: one thread calls it at a time.

    `model` and `mask` are those of a `TokenScorer`. The model stays in eval mode: dropout would
    make it another policy than the one that sampled.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerSection,
        loss: LossSection,
        *,
        step: int = 0,
        mask: MakeMask = causal_mask,
        trainable: Trainable | None = None,
        scorer: Score | None = None,
        why_padded: str = "not asked for",
    ) -> None:
        """
        Args:
            scorer: of the same model; None makes one.
            why_padded: "": it takes documents (`bins.py`).
        """
        self.step_number = step  # steps done
        self.num_micro_batches = 0  # begun so far: progress, also within a long step
        self.why_padded = why_padded
        self.run: Run = at_once  # each micro-batch
        self._model = model.eval()
        self._device = next(model.parameters()).device
        self._off_load = OffLoad(self._device)
        self._tensor = partial(on_device, self._device)
        self._trained = AllWeights(model) if trainable is None else trainable
        self._scorer: Score = TokenScorer(model, mask) if scorer is None else scorer
        self._adam = Adam(self._trained.parameters())
        self._kept = Kept(self._adam, self._device)
        # What a checkpoint has otherwise than it is made here: the version, until the next step.
        self._published: dict[str, Tensor] = {}
        self.configure(optimizer, loss)

    def configure(self, optimizer: OptimizerSection, loss: LossSection) -> None:
        """Go on under this configuration from the next step; moments and step number stay."""
        self._section = optimizer
        self._loss = loss
        self._adam.configure(optimizer)

    def step(self, batch: Batch) -> StepResult:
        """Learn from one batch.

        Raises:
            NumericsError: loss or gradient is not finite; the step did not happen.
            OutOfMemoryError: memory ran out; the step did not happen.
        """
        started_s = time.monotonic()
        batch = self._prepared(batch)
        looked_s = time.monotonic() - started_s
        updates, published = batch.updates, self._published
        if len(updates) > 1:  # a later one may fail
            self._keep()
        lr = lr_at(self.step_number + 1, self._section)
        found, norms, optimizer_s = [], [], 0.0
        for members in updates:
            try:
                totals, grad_norm = self._update_by(batch, members)
            except (NumericsError, OutOfMemoryError):
                if len(updates) > 1:
                    self._go_back()
                    self._published = published
                raise
            found.append(totals)
            norms.append(grad_norm)
            updating_s = time.monotonic()
            self._update(lr)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the hash, which comes next, would wait as long
            optimizer_s += time.monotonic() - updating_s
        self.step_number += 1
        if len(updates) > 1:
            self._let_go()
        totals = found[0] if len(found) == 1 else added(found)
        metrics = (
            totals.means()
            | rollout_figures(batch)
            | value_figures(batch)
            | self.figures()
            | batch.figures()
            | {"grad_norm": sum(norms) / len(norms), "lr": lr}
        )
        if len(norms) > 1:
            metrics |= {"updates": float(len(norms)), "grad_norm_max": max(norms)}
        seconds = {
            "scoring_s": looked_s,
            "forward_backward_s": time.monotonic() - started_s - looked_s - optimizer_s,
            "optimizer_s": optimizer_s,
        }
        loss = self._loss_of(totals, len(norms))
        return StepResult(loss=loss, metrics=metrics, seconds=seconds)

    def _keep(self) -> None:
        self._kept.take()

    def _go_back(self) -> None:
        self._kept.go_back()

    def _let_go(self) -> None:
        self._kept.let_go()

    def _update_by(self, batch: Batch, members: Sequence[int]) -> tuple[LossTotals, float]:
        """The gradient of these micro-batches, and its norm.

        Raises:
            NumericsError, OutOfMemoryError: as `step`; there is no gradient.
        """
        parts = tuple(batch.micro_batches[index] for index in members)
        try:
            totals, grad_norm = self._gradient(replace(batch, micro_batches=parts))
        except OutOfMemoryError as err:
            raise OutOfMemoryError(members[err.index], err.told) from None
        if problem := _problem(self._loss_of(totals), grad_norm):
            self._forget()
            raise NumericsError(f"step {self.step_number + 1}: {problem}")
        return totals, grad_norm

    def _prepared(self, batch: Batch) -> Batch:
        """With what the loss needs of the whole batch before its first update."""
        by = self._loss
        looks = self._looks(batch) if by.looks_first else []
        return with_gae(with_factors(batch, looks, by), looks, by)

    def _looks(self, batch: Batch) -> list[Look]:
        """Of each micro-batch, under the weights as they are."""
        return [
            self._in_memory(index, partial(self._look, micro_batch))
            for index, micro_batch in enumerate(batch.micro_batches)
        ]

    @torch.no_grad()
    def _look(self, micro_batch: MicroBatch) -> Look:
        """Log-probs, entropies and values of the loss tokens."""
        self.num_micro_batches += 1
        if not micro_batch.num_loss_tokens:
            return NOTHING
        with self._scorer.routing.replaying(self._routes(micro_batch)):
            scores = self._score(micro_batch)
        return look_of(scores)

    def probe(self, batch: Batch) -> str:
        """What would be wrong with the numbers of this batch; "": nothing. Changes nothing.

        Raises:
            OutOfMemoryError: memory ran out.
        """
        totals, grad_norm = self._gradient(self._prepared(batch))
        self._forget()
        return _problem(self._loss_of(totals), grad_norm)

    def _forget(self) -> None:
        self._adam.clear()

    def _update(self, lr: float) -> None:
        self._published = {}
        self._adam.update(lr, PREFIX, self._loss.value_lr)

    def _loss_of(self, totals: LossTotals, updates: int = 1) -> float:
        is_mean = self._loss.reduce == "token"
        return totals.loss / totals.tokens if is_mean else totals.shares / updates

    def _gradient(self, batch: Batch) -> tuple[LossTotals, float]:
        """The batch's gradient, clipped, in the parameters; and its norm before."""
        self._adam.clear()
        sums = LossSums()
        for index, micro_batch in enumerate(batch.micro_batches):
            if micro_batch.num_loss_tokens:
                self._in_memory(index, partial(self._accumulate, micro_batch, sums))
            self.num_micro_batches += 1
        if self.step_number < self._loss.value_warmup_steps:
            self._adam.keep(PREFIX)
        norm = self._adam.clip(self._section.max_grad_norm)
        return sums.totals(), norm

    def _in_memory(self, index: int, work: Callable[[], Any]) -> Any:  # noqa: ANN401
        return in_memory(self._adam.clear, index, partial(self.run, work))

    def _accumulate(self, micro_batch: MicroBatch, sums: LossSums) -> None:
        """Add one micro-batch's share of the batch's gradient."""
        # The backward too: layers that are computed again there choose their experts again.
        with self._scorer.routing.replaying(self._routes(micro_batch)) as counted:
            self._learn(micro_batch, sums)
        if micro_batch.is_routed_BT is not None:
            sums.add_routes(
                num_layers=self._scorer.routing.num_layers,
                recorded=int(micro_batch.is_routed_BT.sum()),
                forwarded=int(micro_batch.real_BT[:, 1:].sum()),
                flips=counted.num_flips,
            )

    def _routes(self, micro_batch: MicroBatch) -> Routes | None:
        """What the routers are told, moved once; None: they choose."""
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
        scores = self._score(micro_batch)
        policy_N, counts_R = scores.logprobs_N, micro_batch.loss_tokens_by_row
        proximal_N = proximal_of(
            sampled_N,
            behavior_N,
            policy_N,
            self._loss,
            start_N=of("start_logprobs_BT"),
            ages_N=of("ages_BT"),
        )
        # `Training` has checked that samples have one; what is no sample has none to stay close to.
        reference_N = of("reference_logprobs_BT") if self._loss.why_compared else None
        gains_N = None
        if self._loss.kind == "distill":
            assert reference_N is not None, "the samples were checked"
            teacher_NK = of("top_logprobs_BTK")
            gains_N, kl_N = taught(scores, proximal_N, reference_N, teacher_NK, self._loss)
            sums.add_reference(kl_N)
        losses = policy_losses(
            policy_N, proximal_N, behavior_N, advantages_N, counts_R, self._loss,
            of("factors_BT"), gains_N,
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
            num_batch_rows=micro_batch.num_batch_rows,
            num_batch_samples=micro_batch.num_batch_samples,
        )
        backward(share)
        sums.add_share(share)
        sums.add(losses, scores, behavior_N)

    def _of_loss(self, micro_batch: MicroBatch, name: str) -> Any:  # noqa: ANN401
        """An array at the loss tokens, row by row; None of an optional one that is not there."""
        values_BT = getattr(micro_batch, name)
        return None if values_BT is None else self._tensor(values_BT[micro_batch.loss_mask_BT])

    def _score(self, micro_batch: MicroBatch) -> TokenScores:
        """Scores of the loss tokens, row by row; `TopScores` where a teacher names tokens."""
        top_ids_NK = self._of_loss(micro_batch, "top_ids_BTK")
        top = () if top_ids_NK is None else (top_ids_NK.long(),)
        mask_BT, ids_BT, real_BT = (
            micro_batch.loss_mask_BT, micro_batch.token_ids_BT, micro_batch.real_BT
        )  # fmt: skip
        temperature_N = self._tensor(micro_batch.temperature_BT[mask_BT])
        if not micro_batch.bin_tokens:
            chosen_N = self._tensor(np.flatnonzero(mask_BT))
            padded = self._tensor(ids_BT), self._tensor(real_BT), chosen_N, temperature_N
            return self._scorer(*padded, None, *top)
        documents = Documents.of(real_BT.sum(1).tolist(), micro_batch.bin_tokens)
        return self._scorer(
            self._tensor(micro_batch.in_bin(ids_BT)),
            None,
            self._tensor(np.flatnonzero(micro_batch.in_bin(mask_BT))),
            temperature_N,
            documents.to(self._device),
            *top,
        )

    def check(self) -> None:
        """Whether all that computes is there; of several ranks one may be gone."""

    def close(self) -> None:
        """Release what is not this process's own; of several ranks the others."""

    def weights(self) -> Mapping[str, Tensor]:
        """What is published, by name; the model's own tensors, which the next step changes."""
        return self._trained.weights() | self._published

    def figures(self) -> dict[str, float]:
        """Metrics of the weights as they are."""
        return self._trained.figures()

    def optimizer_tensors(self) -> Mapping[str, Tensor]:
        """AdamW's state, as `Adam.tensors` has it; of adapters also the `value`, which the weights
        do not tell.

        Learning rate, betas and the like are configuration, not state: they are not in it.
        """
        values = {f"{name}:{VALUE}": tensor for name, tensor in self._trained.extra().items()}
        return self._adam.tensors() | values

    def value_head(self) -> Mapping[str, Tensor]:
        """Of a critic, by name; empty without one."""
        return {n: t for n, t in self._trained.extra().items() if n.startswith(PREFIX)}

    def tensors(self) -> Iterator[Tensor]:
        """All that stays on the device between two steps."""
        learning = self._trained.parameters().values()
        yield from (*self._model.parameters(), *self._model.buffers(), *learning)
        yield from (*self._adam.gradients.values(), *self._adam.tensors().values())

    def off_load(self) -> int:
        """Move all of `tensors` to the host until `load_back`; gives its bytes, of all ranks."""
        return self._off_load.give_up(self.tensors())

    def load_back(self) -> None:
        """In place, bit for bit."""
        self._off_load.take_back()

    def load(
        self, weights: Mapping[str, Tensor], optimizer_tensors: Mapping[str, Tensor], step: int
    ) -> None:
        """Go on from a checkpoint of step `step`.

        Raises:
            WeightError: the weights are not this model's.
            ValueError: the optimizer state is not this model's.
        """
        states, extra = sorted_state(optimizer_tensors, self._adam.names)
        self._published = self._trained.load(weights, extra)
        self._adam.load(states)
        self.step_number = step


def _problem(loss: float, grad_norm: float) -> str:
    named = (("loss", loss), ("gradient norm", grad_norm))
    return next((f"{name} is {value}" for name, value in named if not math.isfinite(value)), "")

"""One batch in, new weights out: forward, backward, clip, update; on a mesh of ranks, or on one.

The same weights, optimizer state, step number and batch give the same bits, under
`configure_torch` on the same hardware and mesh: nothing here draws random numbers or depends on a
clock or on what ran before. Which rank computes which micro-batch follows from the batch alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from rlstreams.workers.compute.deal import Task, deal, for_hands
from rlstreams.workers.compute.layers import layers_of, whole_layers
from rlstreams.workers.compute.link import Meeting
from rlstreams.workers.compute.mesh import ByRank, Mesh, on_all
from rlstreams.workers.compute.passes import Passes
from rlstreams.workers.compute.spec import Layers, ModelSpec
from rlstreams.workers.compute.state import LearnerState
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import LoraSection, OptimizerSection, TrainerSection
from rlstreams.workers.model.device import BinRunner, at_once
from rlstreams.workers.model.model import causal_mask, configure_torch
from rlstreams.workers.model.token_scores import MakeMask, TokenScorer
from rlstreams.workers.sandbox.recorded import Code, OwnCodeError, OwnUpdateError
from rlstreams.workers.trainer.learn.adam import lr_at
from rlstreams.workers.trainer.learn.batch_factors import NOTHING, Look, with_factors
from rlstreams.workers.trainer.learn.critic import PREFIX, value_figures, with_gae
from rlstreams.workers.trainer.learn.loss_totals import LossSums, LossTotals, added
from rlstreams.workers.trainer.learn.out_of_memory import OutOfMemoryError, in_memory
from rlstreams.workers.trainer.learn.own import loss_place, updating
from rlstreams.workers.trainer.learn.packing import Batch
from rlstreams.workers.trainer.learn.rollout_figures import rollout_figures
from rlstreams.workers.trainer.learn.step import NumericsError, StepResult, problem_of

Meanwhile = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """Settings of a learner; the same on all ranks."""

    folder: Path
    section: TrainerSection
    device: str
    dtype: str
    threads: int
    host: str = ""

    @property
    def model(self) -> ModelSpec:
        """The model that this learner asks for."""
        section = self.section
        return ModelSpec(
            folder=self.folder,
            dtype=self.dtype,
            backend=section.backend,
            layout=section.layout,
            bin_tokens=section.micro_batch_tokens,
            asked_by="trainer",
            shares=section.shared_prefixes,
            recomputes=section.activation_checkpointing,
            has_values=section.loss.advantage == "gae",
            lora=section.lora,
        )

    def begin(self, mesh: Mesh, scorer: TokenScorer | None = None) -> Learner:
        """Make this process one rank of the learner.

        Args:
            scorer: see `layers_of`.
        """
        in_one_order = self.section.redo != "tolerate"
        configure_torch(self.threads, self.device, fused=True, in_one_order=in_one_order)
        layers, section = layers_of(self.model, mesh, scorer), self.section
        again = partial(layers_of, self.model, mesh)
        return Learner(layers, section.optimizer, section.loss, section.lora, mesh, again=again)


class Learner(LearnerState):
    """A model that learns. Not thread-safe: one thread calls it at a time.

    The model stays in eval mode: dropout would make it another policy than the one that sampled.
    """

    def __init__(
        self,
        layers: Layers,
        optimizer: OptimizerSection,
        loss: LossSection,
        lora: LoraSection,
        mesh: Mesh,
        *,
        step: int = 0,
        again: Callable[[], Layers] | None = None,
    ) -> None:
        """
        Args:
            again: makes the layers anew, after a pass failed half-way; None: a single rank.
        """
        super().__init__(layers, lora, mesh, step)
        self.num_micro_batches = 0  # begun so far: shows progress within a long step
        self.run: BinRunner = at_once  # runs each micro-batch
        self._again = again
        self._set(optimizer, loss, {})

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: OptimizerSection,
        loss: LossSection,
        *,
        step: int = 0,
        mask: MakeMask = causal_mask,
        lora: LoraSection = LoraSection(),  # noqa: B008  (frozen)
        scorer: TokenScorer | None = None,
        why_padded: str = "not asked for",
        why_unshared: str = "not asked for",
    ) -> Self:
        """A learner of one rank, on a model that is loaded already.

        Args:
            scorer: of the same model; None makes one, with this `mask`.
            why_padded: reason not to pack sequences into bins; "": they are packed (`bins.py`).
            why_unshared: reason that bins of a batch share no tokens; "": they may share.
        """
        scorer = TokenScorer(model, mask) if scorer is None else scorer
        why_not = {"why_padded": why_padded, "why_unshared": why_unshared}
        layers = whole_layers(model, scorer, lora=lora, **why_not)
        device = layers.shards.device.type
        return cls(layers, optimizer, loss, lora, Mesh(device=device), step=step)

    @on_all
    def configure(
        self, optimizer: OptimizerSection, loss: LossSection, code: Code | None = None
    ) -> None:
        """Go on under this configuration from the next step; moments and step number stay.

        Args:
            code: source of the user's functions.

        Raises:
            OwnCodeError: the loss cannot be loaded.
        """
        self._set(optimizer, loss, code or {})

    def _set(self, optimizer: OptimizerSection, loss: LossSection, code: Code) -> None:
        passes = Passes(self._shards.root, self._shards.device, loss, code)
        self._section, self._loss, self._code, self._passes = optimizer, loss, code, passes
        self._adam.configure(optimizer)

    @on_all
    def pass_over(self) -> None:
        """Count a step that was skipped: its number is used up, the weights stay."""
        self.step_number += 1

    def step(self, batch: Batch) -> StepResult:
        """Learn from one batch.

        Raises:
            NumericsError: loss or gradient is not finite; the step did not happen.
            OutOfMemoryError: memory ran out; the step did not happen.
        """
        result: StepResult = self._together(self._step, batch)
        return result

    def probe(self, batch: Batch) -> str:
        """Problem with the numbers that a step on this batch would give; "": none. Changes nothing.

        Raises:
            OutOfMemoryError: memory ran out.
        """
        problem: str = self._together(self._probe, batch)
        return problem

    def _together(self, work: Callable[[Any], Any], batch: Batch) -> Any:  # noqa: ANN401
        try:
            return work(ByRank(for_hands(batch, self._shards.hands)))
        except OutOfMemoryError as err:
            failed = err.index, err.detail
            if self.mesh.team is None:
                raise
        self.rejoin(self.mesh.team.new_meeting())
        raise OutOfMemoryError(*failed)

    @on_all
    def _probe(self, batch: Any) -> str:  # noqa: ANN401
        totals, grad_norm = self._gradient(self._prepared(batch))
        self._adam.clear()
        return self._problem(totals, grad_norm)

    @on_all
    def _step(self, batch: Any) -> StepResult:  # noqa: ANN401
        started_s = time.monotonic()
        batch = self._prepared(batch)
        looked_s = time.monotonic() - started_s
        lr = lr_at(self.step_number + 1, self._section)

        @cache
        def figures() -> dict[str, float]:
            own: dict[str, float] = rollout_figures(batch) | value_figures(batch) | batch.figures()
            return own

        found, norms, optimizer_s = self._updates(batch, lr, figures)
        self.step_number += 1
        totals = found[0] if len(found) == 1 else added(found)
        metrics = (
            totals.means()
            | figures()
            | self.figures()
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

    def _updates(
        self, batch: Batch, lr: float, meanwhile: Meanwhile
    ) -> tuple[list[LossTotals], list[float], float]:
        """All updates of the batch, or none; their totals and norms, and the optimizer's seconds.

        Args:
            meanwhile: what the host is to do while a GPU computes.

        Raises:
            NumericsError, OutOfMemoryError: as `step`; weights and moments are as before.
        """
        updates, published = batch.updates, self._published
        if len(updates) > 1:  # a later update may fail
            self._kept.take()
        found, norms, optimizer_s = [], [], 0.0
        for members in updates:
            try:
                totals, grad_norm = self._update_by(batch, members, meanwhile)
            except (NumericsError, OutOfMemoryError, RuntimeError):  # the last: of another rank
                if len(updates) > 1:
                    self._kept.go_back()
                    self._published, self._states = published, None
                raise
            found.append(totals)
            norms.append(grad_norm)
            updating_s = time.monotonic()
            self._published, self._states = {}, None
            shares = None if self._shards.is_whole else self._shards
            paths, gathered = self._plan.trained, self.mesh.gathered
            own = updating(self._section, self._code, shares, paths, gathered)
            with self.named(OwnUpdateError), own as by:
                self._adam.update(lr, PREFIX, self._loss.value_lr, by)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the hash, which comes next, would wait as long
            optimizer_s += time.monotonic() - updating_s
        if len(updates) > 1:
            self._kept.let_go()
        return found, norms, optimizer_s

    def _update_by(
        self, batch: Batch, members: Sequence[int], meanwhile: Meanwhile
    ) -> tuple[LossTotals, float]:
        """Compute the gradient of these micro-batches; their loss totals, and the gradient's norm.

        Raises:
            NumericsError, OutOfMemoryError: as `step`; there is no gradient.
        """
        parts = tuple(batch.micro_batches[index] for index in members)
        try:
            totals, grad_norm = self._gradient(replace(batch, micro_batches=parts), meanwhile)
        except OutOfMemoryError as err:
            raise OutOfMemoryError(members[err.index], err.detail) from None
        if problem := self._problem(totals, grad_norm):
            self._adam.clear()
            raise NumericsError(f"step {self.step_number + 1}: {problem}")
        return totals, grad_norm

    def _problem(self, totals: LossTotals, grad_norm: float) -> str:
        """Problem with the numbers of an update, with the place of a loss of the user's own."""
        problem = problem_of(self._loss_of(totals), grad_norm)
        place = loss_place(self._loss, self._code) if problem else ""
        return f"{problem}, by {place}" if place else problem

    def _prepared(self, batch: Batch) -> Batch:
        """The batch with the loss's inputs that need the whole batch before its first update."""
        by = self._loss
        looks = self._looks(batch) if by.looks_first else []
        return with_gae(with_factors(batch, looks, by), looks, by)

    def _looks(self, batch: Batch) -> list[Look]:
        """`Look` of each micro-batch under the weights as they are, from all ranks; by
        micro-batch."""
        found: dict[int, Look] = {}
        for task in self._hand(batch):
            look = self._in_memory(task.index, partial(self._passes.look, task.micro_batch))
            self.num_micro_batches += 1
            if not task.is_empty:
                found[task.index] = look
        every = [pair for theirs in self.mesh.gathered(found) for pair in theirs.items()]
        known = dict(every)
        return [known.get(index, NOTHING) for index in range(len(batch.micro_batches))]

    def _gradient(self, batch: Batch, meanwhile: Meanwhile = dict) -> tuple[LossTotals, float]:
        """Compute the batch's clipped gradient; loss totals, and the norm before clipping."""
        self._adam.clear()
        sums, tasks = LossSums(), self._hand(batch)
        for task in tasks:
            self._shards.expect(is_last=task is tasks[-1])
            self._in_memory(task.index, partial(self._pass, task, sums))
            self.num_micro_batches += 1
        meanwhile()  # what comes next waits for the GPU
        self._add_up()
        if self.step_number < self._loss.value_warmup_steps:
            self._adam.keep(PREFIX)
        gradients = {self._plan.trained[n]: t for n, t in self._adam.gradients.items()}
        norm = self._adam.clip(
            self._section.max_grad_norm, self._shards.norm(self.mesh.gathered, gradients)
        )
        totals = self.mesh.gathered(sums.totals())
        heard = [own for rank, own in enumerate(totals) if rank in self._shards.voices]
        return added(heard) if len(heard) > 1 else heard[0], norm

    def _hand(self, batch: Batch) -> list[Task]:
        """This rank's tasks of the batch."""
        hands = self._shards.hands
        return deal(batch, max(hands) + 1, alone=self._shards.is_whole)[hands[self.mesh.rank]]

    def _pass(self, task: Task, sums: LossSums) -> None:
        if task.is_empty:
            self._passes.pass_by(task.micro_batch)
        else:
            with self.named():
                self._passes.accumulate(task.micro_batch, sums)
        gradients = self._shards.gradients()
        for name, path in self._plan.trained.items():
            if path in gradients:
                self._adam.take(name, gradients[path])

    @contextmanager
    def named(self, kind: type[OwnCodeError] = OwnCodeError) -> Iterator[None]:
        """Name the step in an error of the user's code, which becomes one of `kind`."""
        try:
            yield
        except OwnCodeError as err:
            raise kind(f"step {self.step_number + 1}: {err}") from err

    def _add_up(self) -> None:
        """Sum the gradients over the ranks that have the same rows."""
        for name, path in self._plan.trained.items():
            if path in self._shards.replicated and name not in self._adam.gradients:
                self._adam.take(name, torch.zeros_like(self._shards.rows[path]))
        for name, gradient in self._adam.gradients.items():
            self._shards.add_up(self._plan.trained[name], gradient)

    def _loss_of(self, totals: LossTotals, updates: int = 1) -> float:
        is_mean = self._loss.reduce == "token"
        return totals.loss / totals.tokens if is_mean else totals.shares / updates

    def _in_memory(self, index: int, work: Callable[[], Any]) -> Any:  # noqa: ANN401
        return in_memory(self._adam.clear, index, partial(self.run, work))

    def leave(self) -> None:
        """See `LearnerState`."""
        self.__dict__.pop("_passes", None)
        super().leave()

    @on_all
    def rejoin(self, meeting: Meeting) -> None:
        """Bring the same state into a new group, after loading and cutting the model anew.

        A rank that finished its pass when another ran out of memory has not left its group yet.
        """
        self.leave()
        assert self._again is not None, "of several ranks"
        self.mesh.join(meeting)
        self._use(self._again())
        self._set(self._section, self._loss, self._code)
        for path, old in self._old.items():
            self._shards.put_back(path, old)
        del self._old

    def close(self) -> None:
        """End the other ranks, and destroy the group: a process has one at a time."""
        if self.mesh.team is not None:
            self.mesh.team.close()
        if self.mesh.size > 1:
            self.leave()
        else:
            self._shards.close()

"""One rank's part of a step: its micro-batches, its rows of weights and moments.

Rank 0 and its followers are the same here. Whatever gathers or sums is called by all of them in the
same order, as rank 0 tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rlstreams.workers.compute import group
from rlstreams.workers.compute.deal import Task
from rlstreams.workers.compute.learn import Learner
from rlstreams.workers.compute.link import Meeting
from rlstreams.workers.compute.shards import Plan, ShardedModel, Shards, plan_of
from rlstreams.workers.config.trainer import MEGATRON, TrainerSection
from rlstreams.workers.engines.selfcheck import load_scorer
from rlstreams.workers.model.bins import take_documents, use_bins
from rlstreams.workers.model.context import SlicedScorer, check_slices
from rlstreams.workers.model.model import configure_torch
from rlstreams.workers.model.recompute import recompute_activations
from rlstreams.workers.model.token_scores import Score, TokenScorer
from rlstreams.workers.trainer.learn.adam import LOW
from rlstreams.workers.trainer.learn.batch_factors import Look
from rlstreams.workers.trainer.learn.loss_totals import LossSums, LossTotals
from rlstreams.workers.trainer.learn.trainable import Trainable, trainable_of
from rlstreams.workers.weights.link.weight_hash import on_host

_SQUARED_AT_ONCE = 1 << 24  # elements; in float64 beside all else that memory holds by then


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """What makes a rank; the same on all, but for its number."""

    folder: Path
    section: TrainerSection
    device: str
    dtype: str
    threads: int
    host: str
    rank: int = 0

    @property
    def size(self) -> int:
        """Ranks."""
        return self.section.ranks

    def begin(self, meeting: Meeting) -> RankLearner:
        """This process as a rank."""
        in_one_order = self.section.redo != "tolerate"
        configure_torch(self.threads, self.device, fused=True, in_one_order=in_one_order)
        return RankLearner(self, meeting)


class RankLearner(Learner):
    """One rank's `Learner`."""

    def __init__(self, spec: RankSpec, meeting: Meeting, scorer: TokenScorer | None = None) -> None:
        """Meets the other ranks there, as `rejoin` does.

        Args:
            scorer: loaded already, on the CPU.

        Raises:
            ConfigError: a model that cannot be trained so.
        """
        self._spec = spec
        mesh = self._meet(meeting)
        self._plan, self._shards = self._cut(mesh, scorer)
        self._states: dict[str, Tensor] | None = None
        self._incoming: dict[str, dict[str, Tensor]] = {}
        super().__init__(
            self._shards.root,
            spec.section.optimizer,
            spec.section.loss,
            trainable=cast(Trainable, _Rows(self._plan, self._shards)),
            scorer=cast(Score, self._shards.root),
            why_padded=self.why_padded,
        )

    def value_head(self) -> Mapping[str, Tensor]:
        """Nothing: configuration refuses a critic on several ranks."""
        return {}

    def _meet(self, meeting: Meeting) -> DeviceMesh:
        spec = self._spec
        return group.join(meeting, spec.rank, spec.size, spec.device, spec.host)

    def _cut(
        self, mesh: DeviceMesh, scorer: TokenScorer | None = None
    ) -> tuple[Plan, ShardedModel]:
        spec = self._spec
        if spec.section.backend == MEGATRON:
            from rlstreams.workers.compute.megatron_shards import megatron_shards
            from rlstreams.workers.model.megatron.score import WHY_EAGER, WHY_PADDED

            self.why_padded, self.why_eager = WHY_PADDED, WHY_EAGER
            return megatron_shards(spec.folder, spec.section, spec.rank, spec.device, spec.dtype)
        # Head and body are told apart where the model is whole.
        scorer = scorer or load_scorer(spec.folder, spec.dtype)[0]
        trainable = trainable_of(scorer.model, spec.section.lora)
        plan, cp = plan_of(scorer.model, trainable), spec.section.layout.cp
        sliced = SlicedScorer(scorer, cp) if cp > 1 else None
        shards = Shards(sliced or scorer, mesh, cp=cp)
        root = cast(Score, shards.root)
        if sliced is None:
            tokens = spec.section.micro_batch_tokens
            self.why_padded, self.why_eager = use_bins(scorer, spec.device, tokens, root=root)
        else:
            self.why_padded = take_documents(scorer, spec.device, root)
            self.why_eager = "the ranks that share a row meet in the middle of each layer"
            check_slices(sliced, root, shards.device)
        recomputes = spec.section.activation_checkpointing
        scorer.head.holds_logits = not (self.why_padded or recomputes)
        if recomputes:
            recompute_activations(scorer.model)
        shards.reshard()
        return plan, shards

    def local_gradient(self, tasks: Sequence[Task]) -> tuple[LossTotals, float]:
        """This rank's part of the batch's gradient; its totals, and its sum of squares.

        Raises:
            OutOfMemoryError: memory ran out here; the other ranks hang until this one has left.
        """
        self._adam.clear()
        sums = LossSums()
        for task in tasks:
            self._in_memory(task.index, partial(self._pass, task, sums))
            self.num_micro_batches += not task.is_empty
        for name, gradient in self._adam.gradients.items():
            self._shards.add_up(self._plan.trained[name], gradient)
        return sums.totals(), self._squares()

    def local_look(self, tasks: Sequence[Task]) -> dict[int, Look]:
        """This rank's part of a look at the batch, by micro-batch. Raises as `local_gradient`."""
        found = {}
        for task in tasks:
            scores = self._in_memory(task.index, partial(self._look, task.micro_batch))
            if not task.is_empty:
                found[task.index] = scores
        return found

    def _pass(self, task: Task, sums: LossSums) -> None:
        if task.is_empty:
            # Whatever terms the loss has, this one adds zeros.
            nothing = self._score(task.micro_batch).logprobs_N.sum() * 0.0
            nothing.backward()  # type: ignore[no-untyped-call]
        else:
            self._accumulate(task.micro_batch, sums)
        gradients = self._shards.gradients()
        for name, path in self._plan.trained.items():
            if path in gradients:
                self._adam.take(name, gradients[path])

    @torch.no_grad()
    def _squares(self) -> float:
        squares = [
            part.double().square().sum()
            for name, gradient in self._adam.gradients.items()
            if self._spec.rank in self._shards.owners(self._plan.trained[name])
            for part in torch.split(gradient.flatten(), _SQUARED_AT_ONCE)
        ]
        return float(torch.stack(squares).sum()) if squares else 0.0

    @torch.no_grad()
    def local_clip(self, norm: float) -> None:
        """Scale this rank's gradient, where all of them together have this norm."""
        scale = min(self._section.max_grad_norm / (norm + 1e-6), 1.0)
        if math.isfinite(norm):
            for gradient in self._adam.gradients.values():
                gradient.mul_(scale)

    def _update(self, lr: float) -> None:
        self._states = None
        super()._update(lr)

    def _go_back(self) -> None:
        self._states = None
        super()._go_back()

    def tensors(self) -> Iterator[Tensor]:
        """See `Learner`; the rows, for the model's own parameters only describe them."""
        self._shards.reshard()
        yield from (*self._shards.rows.values(), *self._model.buffers())
        yield from (*self._adam.gradients.values(), *self._adam.tensors().values())

    def local_sums(self) -> dict[str, list[int]]:
        """By published name what the hash adds up of this rank's rows; not of merged adapters."""
        names = [n for n in self._plan.published if f"{n}.up" not in self._plan.adapters]
        sums = {name: self._shards.sums(self._plan.published[name]) for name in names}
        known = {name: one for name, one in sums.items() if one is not None}
        return dict(zip(known, on_host(list(known.values())), strict=True))

    def gather(self, path: str, key: str = "") -> Tensor | None:
        """A whole parameter on rank 0, or what the optimizer has of it under `key`."""
        rows: Tensor | None = self._shards.rows.get(path)
        dtype = self._plan.whole[path].dtype
        if key:
            rows = self.states.get(key)
            dtype = torch.int16 if key.endswith(f":{LOW}") else torch.float32
        return self._shards.gather(path, rows, dtype)

    @property
    def states(self) -> dict[str, Tensor]:
        """The optimizer's tensors, of this rank's rows."""
        if self._states is None:
            self._states = self._adam.tensors()
        return self._states

    def scatter(self, path: str, key: str, dtype: torch.dtype, whole: Tensor | None = None) -> None:
        """Take this rank's rows of what rank 0 has; of the optimizer until `adopt`."""
        rows: Tensor | None = self._shards.rows.get(path)
        if key and rows is not None:
            name, _, part = key.rpartition(":")
            known = self.states.get(key)  # written over: memory may not hold the state twice
            if known is None:
                known = torch.empty_like(rows, dtype=dtype, requires_grad=False)
            rows = self._incoming.setdefault(name, {})[part] = known
        self._shards.scatter(path, whole, rows)

    def adopt(self, step: int, numbers: Mapping[str, float]) -> None:
        """Go on from `step` with the optimizer's state as it came.

        Args:
            numbers: of the state, the same on every rank.
        """
        for key, value in numbers.items():
            name, _, part = key.rpartition(":")
            self._incoming.setdefault(name, {})[part] = torch.tensor(value, dtype=torch.float32)
        self._adam.load(self._incoming, copies=False)
        self._incoming, self._states = {}, None
        self.step_number = step

    def leave(self) -> None:
        """Give up model and group, where a pass failed in its middle; rows and moments stay."""
        if not hasattr(self, "_shards"):  # it has left
            return
        self._adam.clear()
        self._old = self._shards.rows
        self._shards.close()
        del self._shards, self._scorer, self._model
        group.leave()

    def rejoin(self, meeting: Meeting) -> None:
        """The same state again, in a new group: of a model that is loaded and cut anew.

        A rank that finished its pass when another ran out of memory has not left yet.
        """
        self.leave()
        self._plan, self._shards = self._cut(self._meet(meeting))
        self._model = self._shards.root
        self._scorer = cast(Score, self._shards.root)
        for path, rows in self._shards.rows.items():
            old = self._old[path]
            with torch.no_grad():
                rows.copy_(old)
            old.data = rows.data  # what the optimizer holds is now what the model is gathered from
            self._shards.rows[path] = old
        del self._old


class _Rows:
    """One rank's rows, as far as a `Learner` asks its `Trainable`: `Leader` does the rest."""

    def __init__(self, plan: Plan, shards: ShardedModel) -> None:
        trained = plan.trained.items()
        self._rows = {name: shards.rows[path] for name, path in trained if path in shards.rows}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that learn."""
        return self._rows

"""Rank 0's `Learner`: the same calls as of one process, done by all ranks together.

Nothing else of the trainer knows of ranks: weights, hashes and checkpoints have the same names,
shapes and bytes, and tensors come to rank 0 one at a time, as they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlstreams.workers.compute.deal import Task, deal
from rlstreams.workers.compute.rank_learner import RankLearner, RankSpec
from rlstreams.workers.compute.team import Team
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import OptimizerSection
from rlstreams.workers.model.token_scores import TokenScorer
from rlstreams.workers.trainer.learn.batch_factors import NOTHING, Look
from rlstreams.workers.trainer.learn.dither import Dither
from rlstreams.workers.trainer.learn.loss_totals import LossTotals, added
from rlstreams.workers.trainer.learn.out_of_memory import OutOfMemoryError
from rlstreams.workers.trainer.learn.packing import Batch
from rlstreams.workers.trainer.learn.trainable import (
    VALUE,
    arrived,
    check_base,
    is_same,
    merged,
    share_arrived,
    sorted_state,
)
from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.layout import LazyWeights, layout_difference, layout_of


class Gathered(LazyWeights):
    """Tensors that lie on all ranks; each is gathered when it is asked for, on rank 0's device."""

    def __init__(
        self,
        facts: Mapping[str, Tensor],
        fetch: Callable[[str], Tensor],
        sums: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        self.facts = facts
        self._fetch = fetch
        self._sums = sums

    def sums(self) -> Mapping[str, Tensor]:
        """See `LazyWeights`."""
        return self._sums()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.facts:
            raise KeyError(name)
        return self._fetch(name)

    def __contains__(self, name: object) -> bool:
        return name in self.facts

    def __iter__(self) -> Iterator[str]:
        return iter(self.facts)

    def __len__(self) -> int:
        return len(self.facts)


class Leader(RankLearner):
    """See the module. One thread calls it at a time."""

    def __init__(
        self,
        team: Team,
        spec: RankSpec,
        scorer: TokenScorer | None = None,
    ) -> None:
        """
        Args:
            scorer: of the whole model, on the CPU; it is cut. None: each rank reads its share.
        """
        self._team = team
        self._is_ready = False
        team.begin(spec, lambda at: super(Leader, self).__init__(spec, at, scorer))
        self._is_ready = True

    def _all(self, method: str, *args: object) -> tuple[Any, list[Any]]:
        """Every rank calls this method of `RankLearner`: rank 0's result, and the others'."""
        own = partial(getattr(RankLearner, method), self, *args)
        return self._team.together(own, method, *args)

    def configure(self, optimizer: OptimizerSection, loss: LossSection) -> None:
        """See `Learner`."""
        if self._is_ready:
            self._all("configure", optimizer, loss)
        else:  # the followers begin with the same sections
            super().configure(optimizer, loss)

    def _gradient(self, batch: Batch) -> tuple[LossTotals, float]:
        """See `Learner`; on every rank its own rows."""
        (totals, squares), others = self._dealt(batch, "local_gradient")
        norm = math.sqrt(squares + sum(theirs for _, theirs in others))
        self._all("local_clip", norm)
        voices = self._shards.voices
        heard = [theirs for rank, (theirs, _) in enumerate(others, 1) if rank in voices]
        return added([totals, *heard]), norm

    def _looks(self, batch: Batch) -> list[Look]:
        """See `Learner`; likewise."""
        found, others = self._dealt(batch, "local_look")
        for theirs in others:
            found |= theirs
        return [found.get(index, NOTHING) for index in range(len(batch.micro_batches))]

    def _dealt(self, batch: Batch, method: str) -> tuple[Any, list[Any]]:
        """What a pass over the batch gives on rank 0, and on the others.

        Raises:
            OutOfMemoryError: memory ran out on a rank; all have met anew.
        """
        of_rank = self._shards.hands
        dealt = deal(batch, max(of_rank) + 1)
        hands = [dealt[number] for number in of_rank]
        try:
            found = self._team.together(
                lambda: self._own(method, hands[0]), method, by_rank=[(h,) for h in hands[1:]]
            )
        except OutOfMemoryError as err:
            failed = err.index, err.told
        else:
            self.num_micro_batches += sum(t.micro_batch is not None for h in dealt[1:] for t in h)
            return found
        self._meet_again()
        raise OutOfMemoryError(*failed)

    def _own(self, method: str, hand: list[Task]) -> Any:  # noqa: ANN401
        """Rank 0's part. A rank that fails in a pass leaves the group, for others wait for it."""
        try:
            return getattr(self, method)(hand)
        except (RuntimeError, MemoryError, OutOfMemoryError) as err:
            failure = err.with_traceback(None)  # its frames hold the tensors
        self.leave()
        raise failure

    def _meet_again(self) -> None:
        self._all("rejoin", self._team.new_meeting())

    def _forget(self) -> None:
        self._all("_forget")

    def _update(self, lr: float) -> None:
        self._all("_update", lr)

    def _keep(self) -> None:
        self._all("_keep")

    def _go_back(self) -> None:
        self._all("_go_back")

    def _let_go(self) -> None:
        self._all("_let_go")

    def weights(self) -> Mapping[str, Tensor]:
        """See `Learner`; as they are when they are asked for, one at a time."""
        return Gathered(self._plan.facts, self._weight, self._sums)

    def optimizer_tensors(self) -> Mapping[str, Tensor]:
        """See `Learner`; likewise."""
        facts: dict[str, Tensor] = {}
        for key, rows in self.states.items():
            whole = self._plan.whole[self._plan.trained[key.rpartition(":")[0]]]
            facts[key] = rows if not rows.dim() else whole.to(rows.dtype)
        kinds = {key.rpartition(":")[2]: one for key, one in self.states.items()}
        for name, path in self._plan.trained.items():
            if path not in self._shards.rows:  # of another stage, alike
                whole = self._plan.whole[path]
                facts |= {
                    f"{name}:{kind}": whole.to(one.dtype) if one.dim() else one
                    for kind, one in kinds.items()
                }
        for name in self._plan.adapters:
            facts[f"{name}:{VALUE}"] = self._plan.whole[self._plan.trained[name]]
        return Gathered(facts, self._optimizer_tensor)

    def _sums(self) -> dict[str, Tensor]:
        """Of the published tensors that lie on the ranks as they are: each sums its own rows."""
        own, others = self._all("local_sums")
        ranks = [own, *others]
        return {
            name: torch.tensor([rank[name] for rank in ranks]).sum(0)
            for name in own
            if name not in self._published
        }

    def _weight(self, name: str) -> Tensor:
        if name in self._plan.constant:
            return self._plan.constant[name]
        if name in self._published:
            return self._published[name]
        base = self._whole(self._plan.published[name])
        return self._adapted(name, base)[0] if f"{name}.up" in self._plan.adapters else base

    @torch.no_grad()
    def _adapted(self, name: str, base: Tensor) -> tuple[Tensor, Sequence[Any]]:
        """The merged weight, and what it is made of beside `base`."""
        section = self._spec.section.lora
        down, up = (self._whole(self._plan.trained[f"{name}.{half}"]) for half in ("down", "up"))
        parts = (down, up, section.alpha / section.rank)
        # Adding nothing would still turn a weight of -0.0 into 0.0, and so another hash.
        if not bool(up.any()):
            return base, parts
        dither = Dither.of(name.removesuffix(".weight"), base.shape, base.device)
        return merged(base, *parts, dither), parts

    def figures(self) -> dict[str, float]:
        """See `Learner`."""
        adapted = [n for n in self._plan.facts if f"{n}.up" in self._plan.adapters]
        found = []
        for name in adapted:
            if self._plan.facts[name].dtype == torch.bfloat16:
                base = self._whole(self._plan.published[name])
                made, parts = self._adapted(name, base)
                found.append(arrived(base, made, *parts))
        return share_arrived(found)

    def _optimizer_tensor(self, key: str) -> Tensor:
        name, _, part = key.rpartition(":")
        path = self._plan.trained[name]
        if part == VALUE:
            return self._whole(path)
        number = self.states.get(key)
        if number is None and part == "step":  # of another stage, alike
            same = (one for own, one in self.states.items() if own.endswith(":step"))
            number = next(same).clone()  # a file takes no tensor twice
        return self._whole(path, key) if number is None or number.dim() else number

    def _whole(self, path: str, key: str = "") -> Tensor:
        whole: Tensor = self._all("gather", path, key)[0].detach()
        return whole

    def off_load(self) -> int:
        """See `Learner`; every rank its rows."""
        own, others = self._all("off_load")
        return int(sum((own, *others)))

    def load_back(self) -> None:
        """See `Learner`; likewise."""
        self._all("load_back")

    def load(
        self, weights: Mapping[str, Tensor], optimizer_tensors: Mapping[str, Tensor], step: int
    ) -> None:
        """See `Learner`. A checkpoint of any number of ranks is the same."""
        extra = self._checked(optimizer_tensors)
        difference = layout_difference(expected=layout_of(self.weights()), found=layout_of(weights))
        if difference:
            raise WeightError(f"weights do not fit the model: {difference}")
        if self._plan.adapters:
            self._load_adapters(weights, extra)
        else:
            for name, path in self._plan.published.items():
                self._spread(path, weights[name])
            for name, tensor in self._plan.constant.items():
                if not torch.equal(tensor, weights[name]):
                    raise WeightError(f"{name} is no parameter, and is another than the model's")
        states = {k: t for k, t in optimizer_tensors.items() if not k.endswith(f":{VALUE}")}
        for key, tensor in states.items():
            if tensor.dim():
                self._spread(self._plan.trained[key.rpartition(":")[0]], tensor, key)
        self._all("adopt", step, {key: float(t) for key, t in states.items() if not t.dim()})

    def _checked(self, optimizer_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The adapters' values among the optimizer's tensors.

        Raises:
            ValueError: they are not of these parameters.
        """
        _, extra = sorted_state(optimizer_tensors, self._plan.trained)
        for key, tensor in optimizer_tensors.items():
            whole = self._plan.whole[self._plan.trained[key.rpartition(":")[0]]]
            if tensor.dim() and tensor.shape != whole.shape:
                raise ValueError(f"{key!r} is {list(tensor.shape)}, expected {list(whole.shape)}")
        if extra.keys() != self._plan.adapters:
            raise ValueError(
                f"the checkpoint has {len(extra)} adapter tensors and trainer.lora asks for "
                f"{len(self._plan.adapters)}: it was written under another trainer.lora"
            )
        return extra

    def _load_adapters(self, weights: Mapping[str, Tensor], extra: Mapping[str, Tensor]) -> None:
        adapted = [name for name in weights if f"{name}.up" in self._plan.adapters]
        check_base(((n, self._weight(n)) for n in weights if n not in adapted), weights)
        for name, tensor in extra.items():
            self._spread(self._plan.trained[name], tensor)
        self._published = {}
        made = ((name, self._weight(name)) for name in adapted)
        self._published = {n: weights[n] for n, tensor in made if not is_same(weights[n], tensor)}

    def _spread(self, path: str, tensor: Tensor, key: str = "") -> None:
        given = (path, key, tensor.dtype)
        self._team.together(lambda: self.scatter(*given, tensor), "scatter", *given)

    def check(self) -> None:
        """See `Team.check`."""
        self._team.check()

    def close(self) -> None:
        """End the other ranks, and let the group go: a process has one at a time."""
        self._team.close()
        self.leave()

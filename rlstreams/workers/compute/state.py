"""State of a learner between two steps: weights, moments and adapters, however ranks share them.

No caller knows of ranks: weights, hashes and checkpoints have the same names, shapes and bytes on
any mesh, and tensors come to rank 0 one at a time, as they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlstreams.workers.compute.mesh import ByRank, Mesh, by_all, on_all
from rlstreams.workers.compute.spec import Layers
from rlstreams.workers.config.trainer import LoraSection
from rlstreams.workers.model.offload import OffLoad
from rlstreams.workers.trainer.learn.adam import LOW, Adam
from rlstreams.workers.trainer.learn.critic import PREFIX
from rlstreams.workers.trainer.learn.dither import Dither
from rlstreams.workers.trainer.learn.kept import Kept
from rlstreams.workers.trainer.learn.trainable import (
    NOT_OF_FOLDER,
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
from rlstreams.workers.weights.link.weight_hash import on_host


class Gathered(LazyWeights):
    """Tensors that lie on all ranks; each is gathered on access, on rank 0's device."""

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


class LearnerState:
    """See the module; `Learner` is one. A call of rank 0 is a call of all ranks."""

    def __init__(self, layers: Layers, lora: LoraSection, mesh: Mesh, step: int = 0) -> None:
        """
        Args:
            step: number of steps done.
        """
        self.mesh, self.number = mesh, 0
        self.step_number = step
        self._lora = lora
        self._use(layers)
        self._off_load = OffLoad(self._shards.device)
        trained = self._plan.trained.items()
        rows = self._shards.rows
        self._adam = Adam({name: rows[path] for name, path in trained if path in rows})
        self._kept = Kept(self._adam, self._shards.device)
        # Weights that a checkpoint has with other bits than `_merged` makes: kept until the next
        # step.
        self._published: dict[str, Tensor] = {}
        self._states: dict[str, Tensor] | None = None
        self._incoming: dict[str, dict[str, Tensor]] = {}

    def _use(self, layers: Layers) -> None:
        self._plan, self._shards = layers.plan, layers.shards
        self.why_padded, self.why_eager = layers.why_padded, layers.why_eager
        self.why_unshared = layers.why_unshared
        self.sums_once = layers.shards.sums_once

    @property
    def states(self) -> dict[str, Tensor]:
        """The optimizer's tensors, of this rank's rows."""
        if self._states is None:
            self._states = self._adam.tensors()
        return self._states

    def weights(self) -> Mapping[str, Tensor]:
        """Published weights by name, each as it is on access. On one rank they are the model's own
        tensors, which the next step changes."""
        found = Gathered(self._plan.facts, self._weight, self._sums)
        return dict(found) if self._shards.is_whole else found

    def optimizer_tensors(self) -> Mapping[str, Tensor]:
        """The optimizer's state, as `Adam.tensors` has it; for adapters and a value head also their
        `value`, which no published weight has.

        Learning rate, betas and the like are configuration, not state: they are not in it.
        """
        facts: dict[str, Tensor] = {}
        for key, one in dict(chain(*self._local_kinds())).items():
            whole = self._plan.whole[self._plan.trained[key.rpartition(":")[0]]]
            facts[key] = whole.to(one) if isinstance(one, torch.dtype) else torch.tensor(one)
        for name in self._plan.trained:
            if name in self._plan.extra:
                facts[f"{name}:{VALUE}"] = self._plan.whole[self._plan.trained[name]]
        found = Gathered(facts, partial(self._optimizer_tensor, facts))
        return dict(found) if self._shards.is_whole else found

    @by_all
    def _local_kinds(self) -> list[tuple[str, torch.dtype | float]]:
        """Of this rank's state: the dtype of tensors, and the numbers themselves."""
        return [(k, one.dtype if one.dim() else float(one)) for k, one in self.states.items()]

    def value_head(self) -> Mapping[str, Tensor]:
        """Parameters of the critic's value head by name; empty without one. Every rank has it."""
        names = [name for name in self._plan.trained if name.startswith(PREFIX)]
        return {name: self._shards.rows[self._plan.trained[name]].detach() for name in names}

    @on_all
    def figures(self) -> dict[str, float]:
        """Metrics of the weights as they are."""
        found = []
        for name in self._adapted_names():
            if self._plan.facts[name].dtype == torch.bfloat16:
                base = self._gathered(self._plan.published[name])
                parts = self._adapter(name)
                if base is not None and parts is not None:
                    found.append(arrived(base, self._merged(name, base, parts), *parts))
        return share_arrived(found)

    def _adapted_names(self) -> list[str]:
        return [name for name in self._plan.facts if f"{name}.up" in self._plan.extra]

    def _sums(self) -> dict[str, Tensor]:
        """Hash sums of published tensors that are not merged: each rank sums its rows."""
        ranks = self._local_sums()
        return {
            name: torch.tensor([rank[name] for rank in ranks]).sum(0)
            for name in ranks[0]
            if name not in self._published
        }

    @by_all
    def _local_sums(self) -> dict[str, list[int]]:
        """Hash sums of this rank's rows by published name; without merged adapters."""
        names = [n for n in self._plan.published if f"{n}.up" not in self._plan.extra]
        sums = {name: self._shards.sums(self._plan.published[name]) for name in names}
        known = {name: one for name, one in sums.items() if one is not None}
        return dict(zip(known, on_host(list(known.values())), strict=True))

    def _weight(self, name: str) -> Tensor:
        if name in self._plan.constant:
            return self._plan.constant[name]
        if name in self._published:
            return self._published[name]
        base = self._whole(self._plan.published[name])
        if f"{name}.up" not in self._plan.extra:
            return base
        parts = self._adapter(name)
        assert parts is not None, "this is rank 0"
        return self._merged(name, base, parts)

    def _adapter(self, name: str) -> tuple[Tensor, Tensor, float] | None:
        down, up = (self._gathered(self._plan.trained[f"{name}.{h}"]) for h in ("down", "up"))
        if down is None or up is None:
            return None
        return down.detach(), up.detach(), self._lora.alpha / self._lora.rank

    @torch.no_grad()
    def _merged(self, name: str, base: Tensor, parts: tuple[Tensor, Tensor, float]) -> Tensor:
        # Adding zero would turn a weight of -0.0 into 0.0, which has another hash.
        if not bool(parts[1].any()):
            return base
        dither = Dither.of(name.removesuffix(".weight"), base.shape, base.device)
        return merged(base, *parts, dither)

    def _optimizer_tensor(self, facts: Mapping[str, Tensor], key: str) -> Tensor:
        name, _, part = key.rpartition(":")
        path = self._plan.trained[name]
        if part == VALUE:
            return self._whole(path)
        return self._whole(path, key) if facts[key].dim() else facts[key]

    def _whole(self, path: str, key: str = "") -> Tensor:
        whole = self._gathered(path, key)
        assert whole is not None, "this is rank 0"
        return whole.detach()

    @on_all
    def _gathered(self, path: str, key: str = "") -> Tensor | None:
        """A whole parameter on rank 0, or its optimizer tensor `key`; None on other ranks."""
        rows: Tensor | None = self._shards.rows.get(path)
        dtype = self._plan.whole[path].dtype
        if key:
            rows = self.states.get(key)
            dtype = torch.int16 if key.endswith(f":{LOW}") else torch.float32
        found = self._shards.gather(path, rows, dtype)
        return found if self.mesh.rank == 0 else None

    def off_load(self) -> int:
        """Move all tensors between two steps from the devices to the hosts until `load_back`; the
        bytes moved, of all ranks."""
        return sum(self._give_up())

    @by_all
    def _give_up(self) -> int:
        return self._off_load.give_up(self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that stay on this rank's device between two steps."""
        self._shards.reshard()
        yield from (*self._shards.rows.values(), *self._shards.buffers())
        yield from (*self._adam.gradients.values(), *self._adam.tensors().values())

    @on_all
    def load_back(self) -> None:
        """Move the tensors back in place, bit for bit."""
        self._off_load.take_back()

    def load(
        self, weights: Mapping[str, Tensor], optimizer_tensors: Mapping[str, Tensor], step: int
    ) -> None:
        """Go on from a checkpoint of step `step`, of any number of ranks.

        Raises:
            WeightError: the weights are not this model's.
            ValueError: the optimizer state is not this model's. Nothing is loaded.
        """
        extra = self._checked(optimizer_tensors)
        difference = layout_difference(
            expected=layout_of(self._plan.facts), found=layout_of(weights)
        )
        if difference and self._adapted_names():
            raise ValueError(NOT_OF_FOLDER)
        if difference:
            raise WeightError(f"weights do not fit the model: {difference}")
        for name, tensor in self._plan.constant.items():
            if not torch.equal(tensor.cpu(), weights[name].cpu()):
                raise WeightError(f"{name} is no parameter, and is another than the model's")
        self._load_weights(weights, extra)
        states = {k: t for k, t in optimizer_tensors.items() if not k.endswith(f":{VALUE}")}
        for key, tensor in states.items():
            if tensor.dim():
                self._spread(self._plan.trained[key.rpartition(":")[0]], tensor, key)
        self._adopt(step, {key: float(t) for key, t in states.items() if not t.dim()})

    def _checked(self, optimizer_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors that the checkpoint has beside weights and moments.

        Raises:
            ValueError: the checkpoint is not of these parameters.
        """
        _, extra = sorted_state(optimizer_tensors, self._plan.trained)
        for name in sorted(self._plan.extra - extra.keys()):
            if name.startswith(PREFIX):
                raise ValueError(
                    f"the checkpoint has no {name}: it was written under another "
                    "trainer.loss.advantage than 'gae'"
                )
        shapes = {name: self._plan.whole[self._plan.trained[name]].shape for name in extra}
        adapters = {n for n in self._plan.extra if not n.startswith(PREFIX)}
        found = {n for n in extra if not n.startswith(PREFIX)}
        if found != adapters or any(extra[n].shape != shapes[n] for n in found):
            raise ValueError(
                f"the checkpoint has {len(found)} adapter tensors and trainer.lora asks for "
                f"{len(adapters)}, or of other shapes: it was written under another trainer.lora"
            )
        for key, tensor in optimizer_tensors.items():
            whole = self._plan.whole[self._plan.trained[key.rpartition(":")[0]]]
            if tensor.dim() and tensor.shape != whole.shape:
                raise ValueError(f"{key!r} is {list(tensor.shape)}, expected {list(whole.shape)}")
        return extra

    def _load_weights(self, weights: Mapping[str, Tensor], extra: Mapping[str, Tensor]) -> None:
        adapted = self._adapted_names()
        if adapted:
            check_base(((n, self._weight(n)) for n in weights if n not in adapted), weights)
        else:
            for name, path in self._plan.published.items():
                self._spread(path, weights[name])
        for name, tensor in extra.items():
            self._spread(self._plan.trained[name], tensor)
        self._published = {}
        made = ((name, self._weight(name)) for name in adapted)
        self._published = {
            n: weights[n].to(t.device) for n, t in made if not is_same(weights[n], t)
        }

    def _spread(self, path: str, tensor: Tensor, key: str = "") -> None:
        whole = ByRank([tensor, *[None] * (self.mesh.size - 1)])
        self._scatter(path, key, tensor.dtype, whole)

    @on_all
    @torch.no_grad()
    def _scatter(self, path: str, key: str, dtype: torch.dtype, whole: Any) -> None:  # noqa: ANN401
        """Take this rank's rows of rank 0's tensor; an optimizer's tensor waits for `_adopt`."""
        rows: Tensor | None = self._shards.rows.get(path)
        if key and rows is not None:
            name, _, part = key.rpartition(":")
            known = self.states.get(key)  # overwritten: memory may not hold the state twice
            if known is None:
                known = torch.empty_like(rows, dtype=dtype, requires_grad=False)
            rows = self._incoming.setdefault(name, {})[part] = known
        self._shards.scatter(path, whole, rows)

    @on_all
    def _adopt(self, step: int, numbers: Mapping[str, float]) -> None:
        """Go on from `step` with the optimizer's tensors received since.

        Args:
            numbers: scalars of the state, the same on every rank.
        """
        for key, value in numbers.items():
            name, _, part = key.rpartition(":")
            self._incoming.setdefault(name, {})[part] = torch.tensor(value, dtype=torch.float32)
        self._adam.load(self._incoming, copies=False)
        self._incoming, self._states = {}, None
        self.step_number = step

    def leave(self) -> None:
        """Release model and group, after a pass failed half-way; rows and moments stay."""
        if not hasattr(self, "_shards"):  # it has left
            return
        self._adam.clear()
        self._old = self._shards.rows
        self._shards.close()
        del self._shards
        self.mesh.leave()

    def check(self) -> None:
        """
        Raises:
            RankLostError: another rank has ended or is silent.
        """
        if self.mesh.team is not None:
            self.mesh.team.check()

    def slow_calls(self) -> str:
        """The other ranks that a function of the user's has kept for long; "": none."""
        return self.mesh.team.slow_calls() if self.mesh.team else ""

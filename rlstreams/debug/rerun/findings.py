"""A re-run step beside its record: what is equal, and the first place where it is not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlstreams.schemas.events import StepCompleted
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.trainer.intake.payloads import Payload
from rlstreams.workers.trainer.learn.cut import cut_bins, cut_rows
from rlstreams.workers.trainer.learn.packing import num_tokens
from rlstreams.workers.trainer.training.training import Trained
from rlstreams.workers.weights.file import file_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was compared."""

    name: str
    recorded: str
    again: str
    place: str = ""  # the first place where it differs, as far as the log knows it

    @property
    def is_equal(self) -> bool:
        """Whether both say the same."""
        return self.recorded == self.again


def compare(
    event: StepCompleted,
    again: Trained,
    payloads: Sequence[Payload],
    config: RunConfig,
    parameter: str,
) -> list[Finding]:
    """Everything that a step's event says of its computation, in the order in which it follows.

    Args:
        event: as it was recorded.
        again: as it came out now.
        payloads: its samples, in batch order.
        config: that it was recorded under.
        parameter: where the new weights first differ, see `differing`.
    """
    lengths = [num_tokens(p.scored.trajectory) for p in payloads]
    cut = (cut_bins if event.bins else cut_rows)(lengths, config.trainer.micro_batch_tokens)
    planned = cut.sizes
    return [
        Finding(
            name="weights before",
            recorded=event.previous_hash,
            again=again.previous_hash,
        ),
        Finding(
            name="batch bytes",
            recorded=event.batch_hash,
            again=again.batch_hash,
            place=_first_sample(event, again, payloads),
        ),
        Finding(
            name="micro-batches",
            recorded=str(event.micro_batches),
            again=str(event.micro_batches if _is_cut_of(event, planned) else planned),
            place=_first_border(event.micro_batches, planned),
        ),
        Finding(name="loss", recorded=repr(event.loss), again=repr(again.loss)),
        Finding(
            name="gradient norm",
            recorded=repr(event.metrics.get("grad_norm", math.nan)),
            again=repr(again.metrics["grad_norm"]),
        ),
        Finding(
            name="weights after",
            recorded=event.weight_hash,
            again=again.weight_hash,
            place=parameter,
        ),
    ]


def _first_sample(event: StepCompleted, again: Trained, payloads: Sequence[Payload]) -> str:
    """The first sample that is not the one that the step names."""
    for number, (ref, payload, advantage) in enumerate(
        zip(event.samples, payloads, again.advantages, strict=True)
    ):
        said = payload.scored.trajectory
        now = (said.group_id, said.sample, said.reward, advantage)
        then = (ref.group_id, ref.sample, ref.reward, ref.advantage)
        if now != then:
            return f"sample {number}, {ref.group_id}/{ref.sample} at {payload.raw.position}"
    return "in fields that the step does not name (log-probs, tokens)"


def _is_cut_of(event: StepCompleted, planned: Sequence[int]) -> bool:
    """Whether the step's micro-batches are the planned ones, or those cut where memory ran out."""
    return set(np.cumsum(planned).tolist()) <= set(np.cumsum(event.micro_batches).tolist())


def _first_border(recorded: Sequence[int], now: Sequence[int]) -> str:
    for number, (one, other) in enumerate(zip(recorded, now, strict=False)):
        if one != other:
            return f"micro-batch {number} held {one} samples, now {other}"
    return f"{len(recorded)} micro-batches, now {len(now)}"


def differing(event: StepCompleted, made: Mapping[str, Tensor], folders: Sequence[Path]) -> str:
    """The first parameter that is not the recorded version's, where its weights are available."""
    from safetensors.torch import load_file

    name = file_name(event.policy_version, event.weight_hash)
    paths = [folder / name for folder in folders if (folder / name).is_file()]
    if not paths:
        return f"the weights of version {event.policy_version} are not at hand to say where"
    recorded = load_file(paths[0])
    for parameter, tensor in made.items():
        other = recorded.get(parameter)
        if other is None or other.shape != tensor.shape:
            return f"parameter {parameter} has another shape"
        if not torch.equal(other, tensor):
            unequal = other != tensor
            first = tuple(int(i) for i in unequal.nonzero()[0])
            worst = float((other.float() - tensor.float()).abs().max())
            return (
                f"parameter {parameter}, first at {list(first)}: {int(unequal.sum()):,} of "
                f"{tensor.numel():,} values, at most {worst:.3g} apart"
            )
    return ""

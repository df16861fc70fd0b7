"""A loss or an optimizer of the user's own in the place of ours, with checks of its result.

A loss is called in the trainer's process, where autograd needs it. Its source is that of the claim
(`TrainerStarted.code`), so a redo computes what the step did (decision 0107).

Axes: `N` tokens of the loss, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlstreams.schemas.events import ScoredTrajectory
from rlstreams.streams.segments import num_sampled
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import OptimizerSection
from rlstreams.workers.config.user_code import LOSS, OPTIMIZER
from rlstreams.workers.sandbox.recorded import Code, OwnCodeError, OwnFunction, own_functions
from rlstreams.workers.trainer.learn.adam import (
    LOW,
    MOMENTS,
    PARAMETER,
    STEP,
    Parameter,
    Update,
    Updated,
)
from rlstreams.workers.trainer.learn.loss import LOSSES, Bounded, LossCall, LossTokens
from rlstreams.workers.trainer.learn.out_of_memory import is_out_of_memory
from rlstreams.workers.trainer.learn.packing import Batch, Float32s
from rlstreams.workers.trainer.learn.trainable import VALUE
from rlstreams.workers.weights.link.weight_hash import on_host, sums_of

_NUM_LOSS, _NUM_UPDATE = 3, 2  # results of a loss, of an optimizer
Digests = dict[str, object]  # by parameter: equal where names and bits of a result are


def loss_of(by: LossSection, code: Code) -> LossCall:
    """The loss that `by.kind` names, of ours or of the user's.

    Raises:
        OwnCodeError: the user's cannot be loaded. Without `code`, before a learner is configured,
            its call raises.
    """
    if not by.has_own_kind:
        return LOSSES[by.kind]
    if code:
        own_functions(by, code)
    return lambda tokens, by: own_losses(own_functions(by, code)[LOSS], tokens)


def update_of(section: OptimizerSection, code: Code) -> Update:
    """The optimizer that `section.kind` names, of ours or of the user's.

    Raises:
        OwnCodeError: the user's cannot be loaded.
    """
    if not section.is_own:
        return Parameter.adamw
    return partial(own_update, own_functions(section, code)[OPTIMIZER])


class Shares(Protocol):
    """Parameters of which each rank has some rows: a `ShardedModel` of several ranks."""

    def assembled(self, path: str, rows: Tensor) -> Tensor:
        """A parameter, or a tensor of its shape, whole on every rank; all ranks call it."""

    def own_rows(self, path: str, whole: Tensor) -> Tensor:
        """This rank's rows of such a tensor, copied."""


@contextmanager
def updating(
    section: OptimizerSection,
    code: Code,
    shares: Shares | None,
    paths: Mapping[str, str],
    gathered: Callable[[Digests], list[Digests]],
) -> Iterator[Update]:
    """As `update_of`, for one update of parameters that ranks may share.

    Args:
        shares: of this rank; None: its parameters are whole.
        paths: parameter -> path in `shares`.
        gathered: gathers a value of every rank, by rank.

    Raises:
        OwnCodeError: also at the end, if the user's gave a rank other bits than another.
    """
    by = update_of(section, code)
    if shares is None or not section.is_own:
        yield by
        return
    digests: Digests = {}
    yield partial(_of_whole, by, shares, paths, digests)
    known: dict[str, tuple[int, object]] = {}
    for rank, every in enumerate(gathered(digests)):
        for name, digest in every.items():
            first, same = known.setdefault(name, (rank, digest))
            if digest != same:
                raise own_functions(section, code)[OPTIMIZER].refused(
                    f"gave other numbers for {name} on rank {rank} than on rank {first}: draw no "
                    "random numbers, and keep nothing between calls"
                )


def _of_whole(
    by: Update,
    shares: Shares,
    paths: Mapping[str, str],
    digests: Digests,
    parameter: Parameter,
) -> Updated:
    """This rank's rows of the update of the whole parameter, which every rank computes.

    Args:
        digests: gets one of all that `by` returned.
    """
    name, path = parameter.name, paths[parameter.name]
    before = {k: shares.assembled(path, t) if t.dim() else t for k, t in parameter.state.items()}
    values, state = by(
        replace(
            parameter,
            values=shares.assembled(path, parameter.values),
            gradient=shares.assembled(path, parameter.gradient),
            state=before,
        )
    )
    keys = sorted(state)
    digests[name] = keys, on_host([sums_of(own) for own in (values, *(state[key] for key in keys))])
    return shares.own_rows(path, values), {
        key: shares.own_rows(path, own) if own.dim() else own for key, own in state.items()
    }


def loss_place(by: LossSection, code: Code) -> str:
    """Field and place of a loss of the user's own; "": it is one of ours."""
    function = own_functions(by, code).get(LOSS)
    return f"{function.field} of {function.place}" if function else ""


def own_losses(function: OwnFunction, tokens: LossTokens) -> Bounded:
    """The user's losses of these tokens, with their ratios and where they were clipped.

    Raises:
        OwnCodeError: it raised, or returned something else; names the place.
    """
    found = function(tokens, is_out_of_memory)
    if isinstance(found, tuple) and len(found) != _NUM_LOSS:
        raise function.refused(
            f"gave a tuple of {len(found)}: return the losses, or losses, ratios and is_clipped"
        )
    losses_N, ratios_N, is_clipped_N = found if isinstance(found, tuple) else (found, None, None)
    if ratios_N is None:
        ratios_N = tokens.ratios()
    if is_clipped_N is None:
        is_clipped_N = torch.zeros_like(tokens.weights_N, dtype=torch.bool)
    for name, own in (("losses", losses_N), ("ratios", ratios_N), ("is_clipped", is_clipped_N)):
        if not isinstance(own, Tensor):
            raise function.refused(f"gave {type(own).__name__} for {name}, not a tensor")
        if own.shape != tokens.policy_N.shape or own.device != tokens.policy_N.device:
            raise function.refused(
                f"gave {name} of shape {tuple(own.shape)} on {own.device}; the tokens have "
                f"{tuple(tokens.policy_N.shape)} on {tokens.policy_N.device}: give one for each "
                "token there, which trainer.loss.reduce makes one number of"
            )
    if not losses_N.is_floating_point() or not losses_N.requires_grad:
        raise function.refused(
            "gave losses without gradient: they must be computed from tokens.policy_N, not from "
            "a detached copy"
        )
    return losses_N, ratios_N, is_clipped_N.bool()


def own_update(function: OwnFunction, parameter: Parameter) -> Updated:
    """The user's update of a parameter.

    Raises:
        OwnCodeError: it raised, or returned something else; names place and parameter.
    """
    name = parameter.name
    try:
        found = function(parameter, is_out_of_memory)
    except OwnCodeError as err:
        kept = f"the state {', '.join(parameter.state)}" if parameter.state else "no state yet"
        shape = tuple(parameter.values.shape)
        raise OwnCodeError(f"{err}; it was called for {name} of shape {shape}, {kept}") from err
    if (
        not isinstance(found, tuple)
        or len(found) != _NUM_UPDATE
        or not isinstance(found[1], Mapping)
    ):
        kinds = ", ".join(type(one).__name__ for one in found) if isinstance(found, tuple) else ""
        raise function.refused(
            f"gave {f'({kinds})' if kinds else type(found).__name__} for {name}: return its new "
            "values and a dict of its state, as by `return values, {}`"
        )
    values, state = found[0], dict(found[1])
    tensors = {k: t for k, t in state.items() if k in MOMENTS or not _is_number(t)}
    for key, own in ({"values": values} | tensors).items():
        if problem := _misfit(own, parameter.values):
            must = "" if key == "values" else ": state is tensors of its form, and numbers"
            raise function.refused(f"gave {key} for {name} that {problem}{must}")
    kept_at = [own.untyped_storage().data_ptr() for own in tensors.values() if own.numel()]
    weights = {own.untyped_storage().data_ptr() for own in (values, parameter.values)}
    if len({*kept_at}) < len(kept_at) or not weights.isdisjoint(kept_at):
        raise function.refused(
            f"gave two of values, {', '.join(tensors)} for {name} that share their memory: "
            "clone one"
        )
    for key in state:
        if not str(key).isidentifier() or key in (LOW, PARAMETER, VALUE):
            raise function.refused(f"gave a state {key!r} for {name}: give it another name")
    if STEP in tensors:
        raise function.refused(f"gave a state {STEP!r} for {name} that is not a number")
    if not bool(values.isfinite().all()):
        raise function.refused(f"gave values for {name} that are not finite")
    return values.detach(), {
        key: own.detach().contiguous() if key in tensors else _number(own, key, parameter)
        for key, own in state.items()
    }


def _number(own: float | Tensor, key: str, parameter: Parameter) -> Tensor:
    """A number of a state as a checkpoint gives it back: a later update must have the same bits."""
    if key == STEP and parameter.is_fused:  # AdamW's, which the host need not wait for
        return torch.as_tensor(own, dtype=torch.float32, device=parameter.values.device).detach()
    return torch.tensor(float(own), dtype=torch.float32)


def _is_number(state: object) -> bool:
    return isinstance(state, int | float) or (isinstance(state, Tensor) and not state.dim())


def _misfit(own: object, values: Tensor) -> str:
    """Difference to a parameter's numbers in form; "": there is none."""
    if not isinstance(own, Tensor):
        return f"are {type(own).__name__}, not a tensor"
    there, here = ((t.shape, t.dtype, t.device) for t in (own, values))
    words = (f"{tuple(s)}, {d} on {p}" for s, d, p in (there, here))
    return "" if there == here else "are {}; the parameter is {}".format(*words)


def with_token_advantages(
    batch: Batch, rows: Sequence[Sequence[ScoredTrajectory]], of_tokens: Sequence[Float32s]
) -> Batch:
    """The batch with an advantage for each token; itself where samples have one each.

    Args:
        rows: of each sample, in batch order.
        of_tokens: as in `Advantages`.
    """
    if not of_tokens:
        return batch
    every: list[tuple[ScoredTrajectory, Float32s]] = []
    for own, of_sample in zip(of_tokens, rows, strict=True):
        lengths = [num_sampled(row.trajectory) for row in of_sample]
        every += zip(of_sample, np.split(own, np.cumsum(lengths)[:-1]), strict=True)
    parts = []
    for part, members in zip(batch.micro_batches, batch.cut.members, strict=True):
        advantages_BT = np.zeros(part.loss_mask_BT.shape, np.float32)
        for place, (row, own) in enumerate(every[index] for index in members):
            segments = row.trajectory.segments
            is_policy = np.array([segment.author == "policy" for segment in segments])
            sampled = np.repeat(is_policy, [len(segment.token_ids) for segment in segments])
            advantages_BT[place, : len(sampled)][sampled] = own
        parts.append(replace(part, advantages_BT=advantages_BT))
    return replace(batch, micro_batches=tuple(parts))

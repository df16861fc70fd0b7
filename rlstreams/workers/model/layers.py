"""A model's layers, computed otherwise than its library does: again in a backward, or compiled.

The library's own switch for recomputation works only in train mode, which would turn dropout on:
the policy that learns must be the one that sampled. So each layer that the library marks as fit for
it is wrapped here. A recomputation has the same inputs and draws no numbers, so the bits are the
same. A compiled layer takes a layer's place once its results were compared (decision 0078), on all
ranks or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlstreams.workers.model.base import REFUSALS, EngineError
from rlstreams.workers.model.one_order import computed_again

LAYER_TOLERANCE = 0.05  # of a layer's largest number, and of its norm
_FUSED = 64  # operations; the compiler's own bound
_SHAPES = 64  # recompilations: bins of other sizes, and scoring without a gradient


def marked_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that a model's library marks as such."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def recompute_activations(model: nn.Module) -> int:
    """Wrap the layers of a model of the library; returns their number.

    Raises:
        EngineError: the library marks no layer.
    """
    layers = marked_layers(model)
    recompute_layers(layers)
    if not layers:
        raise EngineError(
            f"trainer.activation_checkpointing is set, but a {type(model).__name__} has no layer "
            "that its library marks for it: set it to false"
        )
    return len(layers)


def recompute_layers(layers: Sequence[nn.Module]) -> None:
    """Wrap these layers."""
    for layer in layers:
        layer.forward = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=computed_again,
        )


class NotCompiledError(EngineError):
    """Layers stay as they are; `is_difference`: because compiled ones gave other results."""

    def __init__(self, why: str, *, is_difference: bool = False) -> None:
        super().__init__(why)
        self.is_difference = is_difference


class TryingRanks(NamedTuple):
    """The ranks that try their layers together."""

    gathered: Callable[[Any], list[Any]]  # one rank's value -> those of all ranks
    # Makes the context in which a layer needs no other rank; None: it needs none at all.
    apart: Callable[[], AbstractContextManager[None]] | None = None

    def agree(self, work: Callable[[], Any]) -> None:
        """Do what may fail on some ranks alone.

        Raises:
            NotCompiledError: on all ranks, if it failed on any.
        """
        failure = None
        try:
            work()
        except NotCompiledError as err:
            failure = err.is_difference, str(err)
        except (*REFUSALS, EngineError) as err:
            failure = False, f"{type(err).__name__}: {str(err)[:200]}"
        if failures := [own for own in self.gathered(failure) if own is not None]:
            is_difference, why = min(failures)
            raise NotCompiledError(why, is_difference=is_difference)


ALONE = TryingRanks(lambda own: [own])


def configure_compiler(fuses: bool) -> None:
    """Set the compiler up; `fuses`: several operations may become one kernel.

    torch 2.11 fuses operations of Gemma 3's layers into kernels whose gradients have norms of 1e5
    and more, different each time, in rows of some lengths (infra/decisions/0078).
    """
    import torch._dynamo.config
    import torch._inductor.config

    torch._dynamo.reset()  # earlier compilations would be reused
    torch._dynamo.config.recompile_limit = _SHAPES
    inductor: Any = torch._inductor.config
    # No timing chooses a kernel: a redo in another process compiles the same.
    inductor.deterministic = True
    # Rounds as the layers do: scores computed by them are compared with those of the learning pass.
    inductor.emulate_precision_casts = True
    inductor.max_fusion_size = _FUSED if fuses else 1


class KeptFault(Protocol):
    """The sentence of an earlier start by which fused layers of this model differed."""

    def known(self) -> str:
        """Return the sentence; empty: there is none."""

    def keep(self, why: str) -> None:
        """Keep it for later starts."""


class NothingKept:
    """A `KeptFault` that each start forgets."""

    def known(self) -> str:
        """See `KeptFault`."""
        return ""

    def keep(self, why: str) -> None:
        """See `KeptFault`."""


NOTHING_KEPT = NothingKept()


class LayerTrial:
    """Layers, compiled under the present configuration, and their uncompiled forwards."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        plain: Sequence[Callable[..., Any]],
        learns: bool,
        ranks: TryingRanks,
    ) -> None:
        compiled = [torch.compile(f, dynamic=False, fullgraph=True) for f in plain]
        self._of_layer = dict(zip(layers, zip(plain, compiled, strict=True), strict=True))
        self._passed = _passed if learns else _answered
        self.ranks = ranks

    @contextmanager
    def checked(self, size: int) -> Iterator[None]:
        """Have the next forward, of a row of that size, compare each compiled layer, run twice,
        with the uncompiled one."""
        check = partial(self._check, size)
        hooks = [
            layer.register_forward_pre_hook(check, with_kwargs=True) for layer in self._of_layer
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _check(
        self, size: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        run = partial(self._passed, layer, args, kwargs)
        own, layer.forward = self._of_layer[layer]
        if self.ranks.apart is not None:  # a rank that cannot compile must not be waited for
            with self.ranks.apart():
                self.ranks.agree(run)
        layer.forward = own
        expected = run()
        layer.forward = self._of_layer[layer][1]
        self.ranks.agree(partial(_compare, size, expected, run))


def _compare(size: int, expected: Sequence[Tensor], run: Callable[[], Sequence[Tensor]]) -> None:
    """
    Raises:
        NotCompiledError: compiled, a layer's results differ.
    """
    found = ""
    for _ in range(2):  # an error of the order of threads does not show each time
        for one, two, what in zip(expected, run(), _COMPARED, strict=False):
            off = max(_off(one, two, order) for order in (2.0, torch.inf))
            if not off <= LAYER_TOLERANCE:
                found = found or (
                    f"compiled, the {what} of a layer is {100 * off:.3g} % off in a row of "
                    f"{size} tokens"
                )
    if found:  # only now: other ranks run as often
        raise NotCompiledError(found, is_difference=True)


_COMPARED = ("output", "gradient", "weights' gradient")


def _off(expected: Tensor, found: Tensor, order: float) -> float:
    """The norm of the difference, in norms of the expected tensor."""
    one, other = expected.float(), found.float()
    norms = [torch.linalg.vector_norm(t, order) for t in (one - other, one)]
    return float(norms[0] / norms[1]) if norms[1] else float(norms[0] > 0)


def _answered(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """A layer's output."""
    output = layer.forward(*args, **kwargs)
    return (output if isinstance(output, Tensor) else output[0],)


@torch.enable_grad()
def _passed(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """A layer's output, the gradient of its input, and that of its weights in one tensor."""
    hidden = args[0].detach().requires_grad_()
    (output,) = _answered(layer, (hidden, *args[1:]), kwargs)
    weights = [p for p in layer.parameters() if p.requires_grad]
    gradient, *own = torch.autograd.grad(output, [hidden, *weights], hidden.detach())
    if not own:
        return output.detach(), gradient
    return output.detach(), gradient, torch.cat([g.flatten() for g in own])

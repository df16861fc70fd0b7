"""The ranks that compute together, as each of them has them: N of them, N = 1 included.

Every rank has the same objects and calls the same methods in the same order. Rank 0, which alone
knows a log, calls a method that is `on_all`, and by that every rank does; a rank alone just calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from rlstreams.workers.compute.link import Meeting
from rlstreams.workers.model.base import CPU

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

P = ParamSpec("P")
T = TypeVar("T")


class Others(Protocol):
    """The other ranks, as rank 0 tells and watches them (`Team`)."""

    def is_inside(self) -> bool:
        """Whether the calling thread is doing rank 0's part of what all do."""

    def together(
        self,
        own: Callable[[], Any],
        method: str,
        *args: object,
        by_rank: Sequence[tuple[object, ...]] = (),
        number: int = 0,
    ) -> tuple[Any, list[Any]]:
        """Every rank does the same; what rank 0 has, and the others."""

    def new_meeting(self) -> Meeting:
        """Where ranks may meet: a name that nobody has used."""

    def check(self) -> None:
        """
        Raises:
            RankLostError: one is gone or silent; all are ended.
        """

    def close(self) -> None:
        """End them; idempotent."""


@dataclass(slots=True, kw_only=True)
class Mesh:
    """One rank's place among all; `Mesh()` is alone."""

    rank: int = 0
    size: int = 1
    device: str = CPU
    host: str = ""  # address of this rank's interface to the others
    team: Others | None = None  # of rank 0, if there are others: by which it tells them
    devices: DeviceMesh | None = field(default=None, init=False)  # once all have met

    def join(self, meeting: Meeting) -> None:
        """Meet the others; returns when all are there."""
        from rlstreams.workers.compute import group  # torch.distributed

        self.devices = group.join(meeting, self.rank, self.size, self.device, self.host)

    def leave(self) -> None:
        """Let the group go; the caller holds nothing any more that was made with it. Idempotent."""
        if self.devices is None:
            return
        from rlstreams.workers.compute import group

        self.devices = None
        group.leave()

    def gathered(self, own: T) -> list[T]:
        """What every rank has, by rank; all call it."""
        if self.size == 1:
            return [own]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own)
        return found


@dataclass(frozen=True, slots=True)
class ByRank:
    """An argument of which each rank is given its own part."""

    parts: Sequence[Any]


class Meshed(Protocol):
    """What is made on every rank."""

    mesh: Mesh
    number: int  # among what its ranks hold

    def leave(self) -> None:
        """Give up what the group made, and the group: a pass failed here, and others hang in it."""


M = TypeVar("M", bound=Meshed)


def on_all(method: Callable[Concatenate[M, P], T]) -> Callable[Concatenate[M, P], T]:
    """A method that every rank calls: by rank 0's call, or in another one that all are in. Gives
    what this rank has.

    Raises:
        RankLostError: of rank 0: another one is gone, silent or failed.
        OutOfMemoryError: memory ran out on a rank; all came out, and have to meet anew.
    """

    @wraps(method)
    def call(self: M, *args: P.args, **kwargs: P.kwargs) -> T:
        assert not kwargs, "ranks are told places of arguments, not names"
        return _called(self, method, args)[0]

    return cast(Callable[Concatenate[M, P], T], call)


def by_all(method: Callable[Concatenate[M, P], T]) -> Callable[Concatenate[M, P], list[T]]:
    """The same, of rank 0 alone; gives what each rank has, by rank. Raises as `on_all`."""

    @wraps(method)
    def call(self: M, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        assert not kwargs, "ranks are told places of arguments, not names"
        return _called(self, method, args)

    call.rank_method = method  # type: ignore[attr-defined]  # what the others call
    return cast(Callable[Concatenate[M, P], list[T]], call)


def of_rank(target: Meshed, name: str, args: Sequence[Any]) -> Any:  # noqa: ANN401
    """What a follower is told to call."""
    method = getattr(type(target), name)
    return getattr(method, "rank_method", method)(target, *args)


def _called(self: Meshed, method: Callable[..., T], args: Sequence[Any]) -> list[T]:
    team = self.mesh.team
    if team is None or team.is_inside():
        return [method(self, *(_part(a, self.mesh.rank) for a in args))]
    by_rank = [tuple(_part(a, rank) for a in args) for rank in range(self.mesh.size)]
    own = partial(_done, self, partial(method, self, *by_rank[0]))
    found, others = team.together(own, method.__name__, by_rank=by_rank[1:], number=self.number)
    return [found, *others]


def _part(argument: Any, rank: int) -> Any:  # noqa: ANN401
    return argument.parts[rank] if isinstance(argument, ByRank) else argument


def _done(self: Meshed, work: Callable[[], T]) -> T:
    """Rank 0's part. A rank that fails in a pass leaves the group, for others wait for it."""
    from rlstreams.workers.trainer.learn.out_of_memory import OutOfMemoryError

    try:
        return work()
    except (RuntimeError, MemoryError, OutOfMemoryError) as err:
        failure = err.with_traceback(None)  # its frames hold the tensors
    self.leave()
    raise failure

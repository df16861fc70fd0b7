"""The ranks that compute together, as each of them sees them: N ranks, N = 1 included.

Every rank has the same objects and calls the same methods in the same order. Rank 0, the only one
that knows a log, calls a method that is `on_all`, and the followers then call it too; a rank alone
just calls it.
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
    """The other ranks, as rank 0 commands and watches them (`Team`)."""

    def is_inside(self) -> bool:
        """Whether the calling thread is running rank 0's part of a command to all."""

    def together(
        self,
        own: Callable[[], Any],
        method: str,
        *args: object,
        by_rank: Sequence[tuple[object, ...]] = (),
        number: int = 0,
    ) -> tuple[Any, list[Any]]:
        """Have every rank run the same method; rank 0's result, and those of the others by rank."""

    def new_meeting(self) -> Meeting:
        """A place where ranks may meet, under a name that was not used before."""

    def check(self) -> None:
        """
        Raises:
            RankLostError: a rank has ended or is silent; all are ended.
        """

    def slow_calls(self) -> str:
        """The ranks that a function of the user's has kept for long, each with the function."""

    def close(self) -> None:
        """End the other ranks; idempotent."""


@dataclass(slots=True, kw_only=True)
class Mesh:
    """One rank's place among all; `Mesh()` is a rank alone."""

    rank: int = 0
    size: int = 1
    device: str = CPU
    host: str = ""  # address of this rank's interface to the others
    team: Others | None = None  # rank 0's handle on the others; None: a follower, or alone
    devices: DeviceMesh | None = field(default=None, init=False)  # once all have met

    def join(self, meeting: Meeting) -> None:
        """Meet the others; returns when all are there."""
        from rlstreams.workers.compute import group  # torch.distributed

        self.devices = group.join(meeting, self.rank, self.size, self.device, self.host)

    def leave(self) -> None:
        """Destroy the group; the caller no longer holds anything made with it. Idempotent."""
        if self.devices is None:
            return
        from rlstreams.workers.compute import group

        self.devices = None
        group.leave()

    def gathered(self, own: T) -> list[T]:
        """The values of every rank, by rank; all ranks call it."""
        if self.size == 1:
            return [own]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own)
        return found


@dataclass(frozen=True, slots=True)
class ByRank:
    """An argument of which each rank receives its own part."""

    parts: Sequence[Any]


class Meshed(Protocol):
    """An object that exists on every rank."""

    mesh: Mesh
    number: int  # of this object among those of its ranks

    def leave(self) -> None:
        """Release the group and all that it made: others still hang in a pass that failed."""


M = TypeVar("M", bound=Meshed)


def on_all(method: Callable[Concatenate[M, P], T]) -> Callable[Concatenate[M, P], T]:
    """Make `method` one that every rank calls: by rank 0's call, or within another such method.

    Returns:
        This rank's result.

    Raises:
        RankLostError: on rank 0: another rank has ended, is silent or failed.
        OutOfMemoryError: memory ran out on a rank; all left the pass, and have to meet anew.
    """

    @wraps(method)
    def call(self: M, *args: P.args, **kwargs: P.kwargs) -> T:
        assert not kwargs, "ranks receive arguments by position, not by name"
        return _called(self, method, args)[0]

    return cast(Callable[Concatenate[M, P], T], call)


def by_all(method: Callable[Concatenate[M, P], T]) -> Callable[Concatenate[M, P], list[T]]:
    """As `on_all`, called by rank 0 alone; gives the results of all ranks, by rank."""

    @wraps(method)
    def call(self: M, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        assert not kwargs, "ranks receive arguments by position, not by name"
        return _called(self, method, args)

    call.rank_method = method  # type: ignore[attr-defined]  # called by the followers
    return cast(Callable[Concatenate[M, P], list[T]], call)


def of_rank(target: Meshed, name: str, args: Sequence[Any]) -> Any:  # noqa: ANN401
    """Call the method `name` of a follower's object, as rank 0 commanded."""
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
    """Rank 0's part. A rank that fails in a pass leaves the group, because others wait for it."""
    from rlstreams.workers.trainer.learn.out_of_memory import OutOfMemoryError

    try:
        return work()
    except (RuntimeError, MemoryError, OutOfMemoryError) as err:
        failure = err.with_traceback(None)  # its frames hold the tensors
    self.leave()
    raise failure

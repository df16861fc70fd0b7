"""The followers as rank 0 sees them: started, commanded, watched, ended.

A follower that died, or has been silent for too long (stopped, or its machine overloaded), is named
at once, even while rank 0 itself hangs in a collective with it: rank 0's part runs in a thread that
is abandoned then. No follower is replaced: the trainer ends, its supervisor starts it again, and it
redoes the step.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.process.child import Child
from rlstreams.workers.compute.hosts import Hosts, reach
from rlstreams.workers.compute.link import (
    ALIVE,
    BEGIN,
    FREE,
    LOOPBACK,
    PROGRAM,
    CommandResult,
    Link,
    Meeting,
    start_follower,
)
from rlstreams.workers.compute.mesh import Mesh, Meshed
from rlstreams.workers.model.base import RankLostError
from rlstreams.workers.model.one_order import NoOrderError
from rlstreams.workers.trainer.learn.out_of_memory import OutOfMemoryError

T = TypeVar("T")
M = TypeVar("M", bound=Meshed)
SILENT_S = 30.0  # a follower reports once a second
END_S = 10.0  # for the thread that reads a link
_DEATH_S = 1.0  # from the end of a link to that of its process
_LOOK_EVERY_S = 0.05
# Where one rank fails, a second one fails with it: time for the rank at fault to answer.
_EXPLAIN_S = 5.0
TOGETHER_S = 1800.0  # limit for one command to all ranks: a step, loading the model
_TRANSPORT = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
_FREE_S = 120.0  # until all ranks left a pass that one of them could not finish


def team_of(
    gpus: Sequence[str], *, host: str = LOOPBACK, hosts: Hosts | None = None
) -> Team | None:
    """The team of these GPUs (see `claim_devices`) and hosts; None where rank 0 is alone."""
    return Team(gpus, host=host, hosts=hosts) if gpus or hosts else None


class FollowerError(RankLostError):
    """A follower of a team, or a command to all ranks, failed."""


def _started(program: str, gpu: str) -> tuple[Child, socket.socket]:
    """Start a follower on this host; the child, and our end of its link."""
    ours, theirs = socket.socketpair()
    with theirs:
        return start_follower(theirs, gpu, program=program), ours


class _Follower:
    """One follower process, here or on another host."""

    def __init__(
        self,
        rank: int,
        end: socket.socket,
        at: Child | str,
        changed: threading.Event,
        owner: str,
    ) -> None:
        """
        Args:
            at: the child; or the address of the rank server that started it and will end it.
        """
        self.rank = rank
        self.child = None if isinstance(at, str) else at
        where = f"on {at}" if isinstance(at, str) else f"process {at.pid}"
        self.name = f"rank {rank} of the {owner} ({where})"
        self.silent_s = 0.0
        self.slow_call = ""  # as `recorded.slow_call` in that process
        self.answers: queue.SimpleQueue[CommandResult] = queue.SimpleQueue()
        self.is_gone = False
        self._changed = changed
        self.link = Link(end, SILENT_S)
        if self.child is None:
            with contextlib.suppress(OSError):  # closed already
                self.link.send(ALIVE)  # the follower waits for it: no bytes before were a pickle
        self._reader = threading.Thread(target=self._read, name=f"rank-{rank}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while (received := self.link.receive()) is not None:
            self.silent_s = 0.0
            said_slow = isinstance(received, str) and received != ALIVE
            self.slow_call = received if said_slow else ""  # who answers is in none
            if not isinstance(received, str):
                self.answers.put(received)
                self._changed.set()
        self.is_gone = True
        self._changed.set()

    def end(self) -> None:
        """Kill the process, stopped or not."""
        if self.child is None:
            self.link.hang_up()
        else:
            self.child.end()
        self._reader.join(timeout=END_S)
        self.link.close()

    def death(self) -> str:
        """Cause of the process's end, for people."""
        if self.child is None:
            return "closed its link: its host's log says how it ended, or its host is gone"
        self.child.wait(_DEATH_S)
        return self.child.cause() or "closed its link"


class Team:
    """All followers. One thread gives commands; any thread may call `check`."""

    def __init__(
        self,
        gpus: Sequence[str],
        *,
        host: str = LOOPBACK,
        program: str = PROGRAM,
        together_s: float = TOGETHER_S,
        owner: str = "trainer",
        hosts: Hosts | None = None,
    ) -> None:
        """Start them.

        Args:
            gpus: by follower of this host, the GPU that it may see; "" for none in particular.
            host: address of the interface over which NCCL's ranks find each other.
            owner: role that the ranks belong to, for errors.
            hosts: hosts of further ranks, numbered after those of this host; this host reaches them
                by one interface, whose address then replaces `host`.

        Raises:
            ConfigError, RankLostError: of `reach`; no follower is started.
        """
        self.host = host
        ends = reach(hosts) if hosts else []
        self._store: tuple[object, int] | None = None
        if ends:
            from rlstreams.workers.compute import group  # torch.distributed

            self.host = ends[0].getsockname()[0]
            self._store = group.serve(self.host)
        self._owner = owner
        self._silent_s = SILENT_S
        self._together_s = together_s
        self._folder = tempfile.TemporaryDirectory(prefix="rlstreams-ranks-")  # this user's alone
        self._num_meetings = 0
        self._changed = threading.Event()
        self._inside: set[int] = set()  # id of rank 0's own thread
        self._own = ThreadPoolExecutor(
            1, "rank-0", initializer=lambda: self._inside.add(threading.get_ident())
        )
        self._num_begun = 0
        self._is_closed = False
        places: list[tuple[Child | str, socket.socket]] = []
        places += [_started(program, gpu) for gpu in gpus]
        if hosts:
            places += [(hosts.addresses[n // hosts.ranks], end) for n, end in enumerate(ends)]
        self._followers = [
            _Follower(rank, end, at, self._changed, owner)
            for rank, (at, end) in enumerate(places, 1)
        ]
        self.mesh = Mesh(size=self.size, team=self)
        self._watcher = threading.Thread(target=self._tick, name="ranks", daemon=True)
        self._watcher.start()

    @property
    def size(self) -> int:
        """Ranks, rank 0 included."""
        return len(self._followers) + 1

    @property
    def processes(self) -> list[int]:
        """Process ids of this host's followers, by rank."""
        return [follower.child.pid for follower in self._followers if follower.child]

    def new_meeting(self) -> Meeting:
        """A place where ranks may meet, under a name that was not used before."""
        self._num_meetings += 1
        name = f"group-{self._num_meetings}"
        if self._store is None:
            return Meeting(str(Path(self._folder.name) / name))
        return Meeting(name, self.host, self._store[1])

    def check(self) -> None:
        """
        Raises:
            FollowerError: a follower has ended or is silent; all are ended.
        """
        for follower in self._followers:
            problem = ""
            if follower.is_gone and not self._is_closed:
                problem = f"{follower.name} {follower.death()}"
            elif follower.silent_s > self._silent_s:
                problem = (
                    f"{follower.name} has said nothing for {self._silent_s:g} s: it is stopped, "
                    "or its host is overloaded or cut off"
                )
            if problem:
                self.close()
                raise FollowerError(f"{problem}; all ranks end")

    def slow_calls(self) -> str:
        """The ranks that a function of the user's has kept for long, each with the function."""
        return ", ".join(f"{f.name} is {f.slow_call}" for f in self._followers if f.slow_call)

    def is_inside(self) -> bool:
        """Whether the calling thread is running rank 0's part of a command to all."""
        return threading.get_ident() in self._inside

    def begin(self, spec: Any, own: Callable[[Mesh], M]) -> M:  # noqa: ANN401
        """Have every rank make the object of `spec`: by `spec.begin` there, by `own` here.

        Args:
            spec: a `LearnerSpec` or `ScorerSpec`.

        Raises:
            FollowerError, ConfigError, EngineError: a rank cannot; the team is closed.
        """
        mesh, meeting = self.mesh, self.new_meeting()
        mesh.device, mesh.host = spec.device, self.host
        self._num_begun += 1
        others = [(spec, rank, self.size, meeting) for rank in range(1, self.size)]

        def begun() -> M:
            if mesh.devices is None:
                mesh.join(meeting)
            return own(mesh)

        try:
            made = self.together(begun, BEGIN, by_rank=others, number=self._num_begun)[0]
        except BaseException:
            self.close()
            mesh.leave()
            raise
        made.number = self._num_begun
        return made

    def together(
        self,
        own: Callable[[], T],
        method: str,
        *args: object,
        by_rank: Sequence[tuple[object, ...]] = (),
        number: int = 0,
    ) -> tuple[T, list[Any]]:
        """Have every rank run the same: each follower `method` of its object, rank 0 `own`.

        Args:
            by_rank: arguments of each follower, after `args`.
            number: of the object.

        Returns:
            The result of `own`, and the followers' results by rank.

        Raises:
            OutOfMemoryError: memory ran out on a rank; all left the pass, and have to meet anew.
            FollowerError: a rank has ended, is silent, or was not done within `together_s`.
        """
        self.check()
        self._changed.clear()
        for place, follower in enumerate(self._followers):
            given = args + (by_rank[place] if by_rank else ())
            with contextlib.suppress(OSError):  # closed or stopped: `check` names it
                follower.link.send((number, method, given))
        future = self._own.submit(own)
        future.add_done_callback(lambda _: self._changed.set())
        answers = self._wait(future)
        return future.result(), [answer.result for answer in answers]

    def _wait(self, future: Future[Any]) -> list[CommandResult]:
        """Wait until all ranks are done, or one cannot be; the followers' answers by rank."""
        answers: dict[int, CommandResult] = {}
        explain_until_s = 0.0
        for _ in self._looks(future, answers, self._together_s, "did not do its part"):
            if (found := self._out_of_memory(future, answers)) is not None:
                self._free(future, answers)
                raise found
            if self._failed(future, answers) is not None:
                explain_until_s = explain_until_s or time.monotonic() + _EXPLAIN_S
                if time.monotonic() > explain_until_s:
                    break
        if (failed := self._failed(future, answers)) is not None:
            raise failed
        return [answers[follower.rank] for follower in self._followers]

    def _looks(
        self, future: Future[Any], answers: dict[int, CommandResult], limit_s: float, undone: str
    ) -> Iterator[None]:
        """Yield at each message, until rank 0's part is done and each follower has answered.

        Raises:
            FollowerError: a rank has ended or is silent, or is not done within `limit_s`: `undone`.
        """
        until_s = time.monotonic() + limit_s
        while True:
            self._changed.wait(_LOOK_EVERY_S)
            self._changed.clear()
            for follower in self._followers:
                with contextlib.suppress(queue.Empty):
                    answers[follower.rank] = follower.answers.get_nowait()
            self.check()
            if self._is_closed:  # by another thread
                raise FollowerError(f"the ranks of the {self._owner} were ended meanwhile")
            is_done = future.done() and len(answers) == len(self._followers)
            yield  # for the last state too
            if is_done:
                return
            if time.monotonic() > until_s:
                late = [f for f in self._followers if f.rank not in answers]
                names = [f.name + f", {f.slow_call}," * bool(f.slow_call) for f in late]
                self.close()
                who = ", ".join(names) or f"rank 0 of the {self._owner}"
                raise FollowerError(f"{who} {undone} within {limit_s:g} s; all ranks end")

    @staticmethod
    def _out_of_memory(
        future: Future[Any], answers: Mapping[int, CommandResult]
    ) -> OutOfMemoryError | None:
        """The error of the lowest rank that ran out of memory."""
        if future.done() and isinstance(error := future.exception(), OutOfMemoryError):
            return OutOfMemoryError(error.index, f"rank 0: {error.detail}")
        for rank, answer in sorted(answers.items()):
            if answer.exhausted:
                index, detail = answer.exhausted
                return OutOfMemoryError(index, f"rank {rank}: {detail}")
        return None

    def _failed(
        self, future: Future[Any], answers: Mapping[int, CommandResult]
    ) -> BaseException | None:
        own = future.exception() if future.done() else None
        # An error of the transport follows from another rank's end; any other kind is this rank's
        # own.
        if own is not None and type(own).__name__ not in _TRANSPORT:
            return own
        for rank, answer in sorted(answers.items()):
            message = f"{answer.kind}: {answer.failure}"
            if answer.kind == NoOrderError.__name__:
                return NoOrderError(message)
            name = self._followers[rank - 1].name
            if answer.kind == ConfigError.__name__:
                return ConfigError(f"{answer.failure} (said by {name})")
            if answer.kind:
                return FollowerError(f"{name} failed: {message}")
        return own

    def _free(self, future: Future[Any], answers: dict[int, CommandResult]) -> None:
        """Get all ranks out of a pass that one of them could not finish.

        Raises:
            FollowerError: a rank does not leave the pass.
        """
        from rlstreams.workers.compute import group  # torch.distributed

        for follower in self._followers:
            with contextlib.suppress(OSError):
                follower.link.send((0, FREE, ()))
        group.abort()
        undone = "did not come out of a pass, in which another rank ran out of memory,"
        for _ in self._looks(future, answers, _FREE_S, undone):
            pass

    def _tick(self) -> None:
        while not self._is_closed:
            time.sleep(_LOOK_EVERY_S)
            for follower in self._followers:  # rank 0's own pauses do not count
                follower.silent_s += _LOOK_EVERY_S

    def close(self) -> None:
        """End the followers; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for follower in self._followers:
            follower.end()
        self._own.shutdown(wait=False, cancel_futures=True)
        self._folder.cleanup()
        self._store = None

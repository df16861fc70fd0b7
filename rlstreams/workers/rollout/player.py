"""The port `Player`: plays a prompt, and makes the records that end it.

Two fulfil it: `sampling.Sampler` plays a dialogue by itself, `session_player.SessionPlayer` has an
agent play. The role knows this port alone.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rlstreams.schemas.events import Prompt
from rlstreams.streams.log.record import Outgoing, Record
from rlstreams.workers.loop.commit_requests import CommitRequests
from rlstreams.workers.loop.context import Context
from rlstreams.workers.policy.puller import Loads
from rlstreams.workers.rollout.clock import SampleClock


class Rolled(Protocol):
    """Result of a coroutine of `Player.roll_out`."""

    @property
    def versions(self) -> Set[int]:
        """Policy versions that its trajectory will name: it waits until their loads are known."""


R = TypeVar("R", bound=Rolled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Concluded:
    """A prompt that was played, with the records that end it."""

    record: Record[Prompt]
    outputs: tuple[Outgoing, ...] | None  # that end it; None: `Player.over` gives them later
    counts: Mapping[str, float] = field(default_factory=dict)  # for the worker's report


class Player(Protocol[R]):
    """Called from the role's loop, and never waits; its coroutines run on the engine's loop."""

    @property
    def clock(self) -> SampleClock:
        """Clock of its deadlines; stopped and started on the engine's loop."""

    @property
    def commits(self) -> CommitRequests | None:
        """Requests that wait for the commit of their records; None: there are none."""

    @property
    def num_apart(self) -> int:
        """Samples that take no room of the engine's: they wait for a judge, or for others."""

    @property
    def num_unjudged(self) -> int:
        """Samples of `num_apart` that wait for their reward."""

    @property
    def num_late(self) -> int:
        """Samples of `num_apart` that are no longer under way: concluded, without outputs."""

    @property
    def waits_for(self) -> str:
        """Names of those that samples wait for while the engine is idle for them; "": none."""

    @property
    def num_waiting(self) -> int:
        """Samples under way that are no work of this process now; `waits_for` names the cause."""

    @property
    def address(self) -> str:
        """Where other workers pass on requests for sessions that came here; "": there are none."""

    async def open(self, loads: Callable[[], Loads]) -> None:
        """Be ready to play.

        Args:
            loads: of each version that the engine held; asked on the role's thread alone.
        """

    async def stop(self) -> None:
        """End what it keeps running on the engine's loop, before the engine is closed."""

    def close(self) -> None:
        """Let go of all else."""

    def sift(self, waiting: list[Record[Prompt]]) -> list[Record[Prompt]]:
        """Return the prompts that are still to be played; `over` has the others."""

    def ready(
        self, waiting: Sequence[Record[Prompt]], num_running: int
    ) -> Sequence[Record[Prompt]]:
        """Return the prompts that may begin now, beside `num_running` others."""

    def roll_out(self, record: Record[Prompt]) -> Coroutine[Any, Any, R]:
        """Play one prompt; called on the role's loop, run on the engine's.

        Raises:
            EngineError, RewardError, UserCodeError, TimeoutError: see each player.
        """

    def concluded(
        self, record: Record[Prompt], rolled: R, loads: Loads, context: Context, judge: str
    ) -> Concluded:
        """Make the records that end a prompt that was played.

        Args:
            judge: see `agreement.judged_by`.
        """

    def over(self, context: Context, judge: str) -> Iterable[Concluded]:
        """Prompts that `sift` left out or that waited, once they are over; each once."""

    def give_up(self, numbers: Set[int]) -> None:
        """Forget these partitions: others work there now."""

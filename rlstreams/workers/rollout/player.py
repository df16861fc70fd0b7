"""The port `Player`: how a prompt is played, and which records end it.

Two fulfil it: `sampling.Sampler` plays a dialogue by itself, `session_player.SessionPlayer` has an
agent play. The role knows this port alone.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rlstreams.schemas.events import Prompt
from rlstreams.streams.log.record import Outgoing, Record
from rlstreams.workers.loop.asked import Asked
from rlstreams.workers.loop.context import Context
from rlstreams.workers.policy.puller import Loads
from rlstreams.workers.rollout.clock import SampleClock


class Rolled(Protocol):
    """What a coroutine of `Player.roll_out` returns."""

    @property
    def versions(self) -> Set[int]:
        """Policy versions that its trajectory will name: it waits until their loads are known."""


R = TypeVar("R", bound=Rolled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Concluded:
    """What became of a prompt."""

    record: Record[Prompt]
    outputs: tuple[Outgoing, ...] | None  # that end it; None: it waits, `Player.over` will say
    counts: Mapping[str, float] = field(default_factory=dict)  # for the worker's report


class Player(Protocol[R]):
    """Called from the role's loop, and never waits; its coroutines run on the engine's loop."""

    @property
    def clock(self) -> SampleClock:
        """Of its deadlines; stopped and started on the engine's loop."""

    @property
    def asked(self) -> Asked | None:
        """What waits to see its records committed; None: nothing does."""

    @property
    def num_apart(self) -> int:
        """Samples that take no room of the engine's: they wait for a judge, or for others."""

    @property
    def num_late(self) -> int:
        """Of these, those that are not under way any more: they were concluded without outputs."""

    @property
    def waits_for(self) -> str:
        """Whom samples wait for that the engine does not work for; "": nobody."""

    @property
    def num_waiting(self) -> int:
        """Samples under way that nobody works on yet: `waits_for` names whom they wait for."""

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
        """Of prompts that are to be played, those that still are; `over` has the others."""

    def ready(
        self, waiting: Sequence[Record[Prompt]], num_running: int
    ) -> Sequence[Record[Prompt]]:
        """Of these, those that may be begun now, beside so many that run."""

    def roll_out(self, record: Record[Prompt]) -> Coroutine[Any, Any, R]:
        """Play one; called on the role's loop, run on the engine's.

        Raises:
            EngineError, RewardError, UserCodeError, TimeoutError: see each player.
        """

    def concluded(
        self, record: Record[Prompt], rolled: R, loads: Loads, context: Context, judge: str
    ) -> Concluded:
        """What becomes of one that was played.

        Args:
            judge: see `agreement.judged_by`.
        """

    def over(self, context: Context, judge: str) -> Iterable[Concluded]:
        """Prompts that `sift` left out or that waited, once they are over; each once."""

    def give_up(self, numbers: Set[int]) -> None:
        """Forget what is known of these partitions: others work there now."""

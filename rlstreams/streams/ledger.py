"""Ledger: the one fold of topic `steps`. Pure: it takes events in the log's order.

`StepCompleted` alone is the authority on trained samples, and a claim (`TrainerStarted`) on its
writer. Whatever the broker let through, an event counts only if the newest claim before it is
of its own epoch: its writer was not fenced. A claim counts if its epoch follows the newest one's.
Of the steps of one number the first counts, if it is the next one. A branch (`RunBranched`) goes on
from a step of another run: it counts as the first event of all. All other events are void to every
reader, for all of them fold the topic here. The audit alone keeps a fold of its own: it checks this
one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from rlstreams.schemas.events import (
    NO_VERSION,
    ClosedGroups,
    Event,
    GroupsDropped,
    PartitionPosition,
    RedoDrifted,
    RunBranched,
    StepCompleted,
    StepsRedone,
    TrainerHeartbeat,
    TrainerStarted,
)
from rlstreams.streams.log.fencing import is_next_epoch
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import STEPS

LedgerEvent: TypeAlias = (
    TrainerStarted
    | StepCompleted
    | GroupsDropped
    | TrainerHeartbeat
    | RedoDrifted
    | StepsRedone
    | RunBranched
)
_E = TypeVar("_E", bound=Event)
OWNED = (StepCompleted, GroupsDropped, RedoDrifted)  # events that their trainer goes on from
EXPIRED = "expired"  # a drop's reason: retention has removed records of open groups
DISOWNABLE = 32  # number of newest events that a trainer may still disown
NOWHERE = Position(STEPS.name, 0, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFact:
    """A completed step: its version, its event's position, and the records that its redo reads."""

    step: int
    epoch: int
    policy_version: int
    weight_hash: str  # of the newest drift at this step, else as the step recorded it
    position: Position
    oldest: Mapping[int, int]  # partition of scored-trajectories -> lowest offset of a sample


def _ignore(_event: Event, _position: Position) -> None:
    """Do nothing: the listener of a caller that needs no such events."""


def _notify(
    listeners: Iterable[Callable[[_E, Position], None]], event: _E, position: Position
) -> None:
    for listener in listeners:
        listener(event, position)


_Closed: TypeAlias = tuple[ClosedGroups, tuple[PartitionPosition, ...]]
_EMPTY = ClosedGroups(watermark=0)


class _Closings:
    """The closed set and the positions after the newest events that changed them.

    Events that their trainer disowns, soon after they came, have no effect.
    """

    def __init__(self, closed: ClosedGroups = _EMPTY) -> None:
        self._base: _Closed = (closed, ())
        # Offset of an event, its closed set, its positions (None: it names none).
        self._recent: deque[tuple[int, ClosedGroups, tuple[PartitionPosition, ...] | None]] = (
            deque()
        )
        self.disowned: set[int] = set()  # offsets
        self.now: _Closed = self._base

    def take(
        self,
        offset: int,
        closed: ClosedGroups,
        positions: tuple[PartitionPosition, ...] | None,
    ) -> None:
        self._recent.append((offset, closed, positions))
        self.now = self._after(self.now, [self._recent[-1]])
        if len(self._recent) > DISOWNABLE:
            self._base = self._after(self._base, [self._recent.popleft()])

    def disown(self, offsets: Iterable[int]) -> None:
        self.disowned.update(offsets)
        self.now = self._after(self._base, self._recent)

    def _after(
        self,
        base: _Closed,
        events: Iterable[tuple[int, ClosedGroups, tuple[PartitionPosition, ...] | None]],
    ) -> _Closed:
        closed, positions = base
        for offset, said, named in events:
            if offset not in self.disowned:
                closed = _union(closed, said)
                positions = positions if named is None else named
        return closed, positions


def _union(closed: ClosedGroups, said: ClosedGroups) -> ClosedGroups:
    """Return the union of two closed sets: a closed group stays closed."""
    watermark = max(closed.watermark, said.watermark)
    above = {number for number in {*closed.above, *said.above} if number >= watermark}
    return ClosedGroups(watermark=watermark, above=tuple(sorted(above)))


class Ledger:
    """State after the events so far. Its size grows with the claims and the open groups.

    Args:
        begins_anywhere: the events may begin behind the first claim or the first step, and leave
            steps out, as a recording of some steps does. Otherwise no event counts before the
            first claim, and a step only if its number follows the last one's.
        keeps_steps: also keep `steps`, and `hashes` and `made_by` of all versions.
    """

    def __init__(self, *, begins_anywhere: bool = False, keeps_steps: bool = False) -> None:
        self._begins_anywhere = begins_anywhere
        self._keeps_steps = keeps_steps
        self._on_step: list[Callable[[StepCompleted, Position], None]] = []
        self._on_drop: list[Callable[[GroupsDropped, Position], None]] = []
        self._on_redone: list[Callable[[StepsRedone, Position], None]] = []
        self._on_branch: list[Callable[[RunBranched, Position], None]] = []
        self._above: frozenset[int] = frozenset()
        self._closings = _Closings()
        self.branch: RunBranched | None = None  # the step of another run that this one continues
        self.claims: dict[int, TrainerStarted] = {}  # by epoch
        self.claim: TrainerStarted | None = None  # the newest
        self.heartbeat: TrainerHeartbeat | None = None  # of the newest claim
        self.last_step = 0  # the newest completed step; before the first 0, or the branch's base
        self.last_void_step = 0  # the newest void step
        self.drifted_step = 0  # the newest step whose weights a redo replaced
        self.num_drifts = 0
        self.policy_version = NO_VERSION  # the newest version
        self.weight_hash = ""  # of the newest version
        self.closed = ClosedGroups(watermark=0)
        self.positions: tuple[PartitionPosition, ...] = ()
        self.num_dropped: Counter[str] = Counter()  # groups by reason
        self.num_void = 0
        self.newest_void = ""  # kind, position and reason of the newest void event
        self.steps: dict[int, StepFact] = {}
        self.hashes: dict[int, str] = {}  # by version: a number never gets a second content
        # Step by version; 0: the model that the run began with. A version has its step's number
        # until a redo drifts: a step then makes a second version.
        self.made_by: dict[int, int] = {}

    def listen(
        self,
        *,
        on_step: Callable[[StepCompleted, Position], None] = _ignore,
        on_drop: Callable[[GroupsDropped, Position], None] = _ignore,
        on_redone: Callable[[StepsRedone, Position], None] = _ignore,
        on_branch: Callable[[RunBranched, Position], None] = _ignore,
    ) -> None:
        """Add listeners, called after the present ones: folds of one reader share a ledger.

        Each is called with an event that counts, once it is folded, and with its position.
        """
        self._on_step.append(on_step)
        self._on_drop.append(on_drop)
        self._on_redone.append(on_redone)
        self._on_branch.append(on_branch)

    def apply(self, event: Event, position: Position = NOWHERE) -> bool:
        """Fold one event; return False if it is void, or not of this topic."""
        if not isinstance(event, LedgerEvent):
            return False
        if why := self._void_because(event):
            self.num_void += 1
            if isinstance(event, StepCompleted):
                self.last_void_step = max(self.last_void_step, event.step)
            self.newest_void = f"{type(event).__name__} at {position}: {why}"
            return False
        match event:
            case TrainerStarted():
                self._claim(event)
            case StepCompleted():
                self._step(event, position)
                _notify(self._on_step, event, position)
            case GroupsDropped():
                self._drop(event, position)
                _notify(self._on_drop, event, position)
            case RedoDrifted():
                self._drift(event)
            case StepsRedone():
                _notify(self._on_redone, event, position)
            case RunBranched():
                self._begin(event)
                _notify(self._on_branch, event, position)
            case TrainerHeartbeat():
                self.heartbeat = event
                if event.disowned:
                    self._closings.disown(event.disowned)
                    self._settle()
        return True

    def is_disowned(self, step: int) -> bool:
        """Whether the trainer that a kept step names as its writer disowns it."""
        return step in self.steps and self.steps[step].position.offset in self._closings.disowned

    @property
    def begins_behind(self) -> int:
        """The step behind which this run's own steps begin; 0, unless it is a branch."""
        return self.branch.step if self.branch else 0

    @property
    def epoch(self) -> int:
        """Epoch of the newest claim; 0 before the first claim."""
        return self.claim.epoch if self.claim else 0

    @property
    def step_target(self) -> int:
        """The last step of the run by the newest claim; 0 before the first claim."""
        return self.claim.step_target if self.claim else 0

    @property
    def at_target(self) -> bool:
        """Whether the run has made all of its steps."""
        return 0 < self.step_target <= self.last_step

    @property
    def num_closed(self) -> int:
        """Number of closed training groups."""
        return self.closed.watermark + len(self._above)

    @property
    def highest_closed(self) -> int:
        """The highest group number that is closed; -1 if none is."""
        return max(self._above, default=self.closed.watermark - 1)

    def is_closed(self, group: int) -> bool:
        """Whether the training group of this number is closed."""
        return group < self.closed.watermark or group in self._above

    def _void_because(self, event: LedgerEvent) -> str:
        """Return why an event does not count; "": it counts."""
        if isinstance(event, RunBranched):
            has_begun = self.branch or self.claim or self.last_step
            return "a branch begins with it, and this run had begun" if has_begun else ""
        if isinstance(event, TrainerStarted):
            is_next = is_next_epoch(event, self.epoch, begins_anywhere=self._begins_anywhere)
            is_next = is_next or self.claim is None
            return "" if is_next else f"a claim of epoch {event.epoch} after one of {self.epoch}"
        if why := self._not_owned(event.epoch):
            return why
        if isinstance(event, StepCompleted):
            after = event.step > self.last_step
            is_next = after if self._begins_anywhere else event.step == self.last_step + 1
            return "" if is_next else f"step {event.step} after step {self.last_step}"
        if isinstance(event, RedoDrifted) and not self._begins_anywhere:
            is_of_last = 0 < event.step == self.last_step
            return "" if is_of_last else f"a drift of step {event.step} after {self.last_step}"
        return ""

    def _not_owned(self, epoch: int) -> str:
        if self.claim is None:
            return "" if self._begins_anywhere else "nobody has claimed the run before it"
        if epoch != self.epoch:
            return f"it is of epoch {epoch}, the newest claim is of epoch {self.epoch}"
        return ""

    def _begin(self, event: RunBranched) -> None:
        self.branch = event
        self.last_step = event.step
        self._closings = _Closings(event.closed)
        self._settle()
        if self._keeps_steps and (start := event.hashes.get("model")):
            self.hashes[0] = start
        self._made(event.policy_version, event.weight_hash, event.step)

    def _claim(self, event: TrainerStarted) -> None:
        self.claim = self.claims[event.epoch] = event
        self.heartbeat = None
        if event.policy_version > self.policy_version:
            self._made(event.policy_version, event.weight_hash, event.next_step - 1)

    def _step(self, event: StepCompleted, position: Position) -> None:
        self.last_step = event.step
        self._closings.take(position.offset, event.closed, event.positions)
        self._settle()
        self._made(event.policy_version, event.weight_hash, event.step)
        if self._keeps_steps:
            self.steps[event.step] = StepFact(
                step=event.step,
                epoch=event.epoch,
                policy_version=event.policy_version,
                weight_hash=event.weight_hash,
                position=position,
                oldest=oldest_offsets(event),
            )

    def _drop(self, event: GroupsDropped, position: Position) -> None:
        self.num_dropped.update(group.reason for group in event.groups)
        has_expired = any(group.reason == EXPIRED for group in event.groups)
        # Where groups expired, no reader needs the records at the positions any more.
        self._closings.take(position.offset, event.closed, () if has_expired else None)
        self._settle()

    def _drift(self, event: RedoDrifted) -> None:
        """Replace the newest step's weights: the next step starts from the drifted ones."""
        self.drifted_step = event.step
        self.num_drifts += 1
        self._made(event.policy_version, event.actual_hash, event.step)
        if event.step in self.steps:
            fact = self.steps[event.step]
            self.steps[event.step] = replace(fact, weight_hash=event.actual_hash)

    def _settle(self) -> None:
        self.closed, self.positions = self._closings.now
        self._above = frozenset(self.closed.above)

    def _made(self, policy_version: int, weight_hash: str, step: int) -> None:
        self.policy_version, self.weight_hash = policy_version, weight_hash
        if self._keeps_steps:
            self.hashes.setdefault(policy_version, weight_hash)
            self.made_by.setdefault(policy_version, step)


def oldest_offsets(event: StepCompleted) -> dict[int, int]:
    """Return, by partition of scored-trajectories, the lowest offset of a sample of the step."""
    oldest: dict[int, int] = {}
    for sample in event.samples:
        oldest[sample.partition] = min(sample.offset, oldest.get(sample.partition, sample.offset))
    return oldest

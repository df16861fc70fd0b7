"""The fold of the audit: records of every topic in, what is known of every sample out.

The three large topics are read by projection: a dozen fields of a record, not its tensors. What is
kept of each sample is in `samples`; `classes` says from it where each sample is. A record that
cannot be read is counted and named, and costs nothing but itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlstreams.schemas import DecodeError, UnknownEventError
from rlstreams.schemas.binary import HEADER_BYTES, MARKER, NO_TEXTS, SchemaTexts
from rlstreams.schemas.events import (
    DeadLetter,
    Event,
    PolicyLoaded,
    PolicyPublished,
    Prompt,
    ScoredTrajectory,
    Trajectory,
)
from rlstreams.schemas.projection import Projection
from rlstreams.schemas.rollouts import EVALUATE
from rlstreams.streams.audit.ledger import Ledger, UnreadStep
from rlstreams.streams.audit.replayed import Replay
from rlstreams.streams.audit.report import Breaches, BreachKind
from rlstreams.streams.audit.samples import (
    MAX_SAMPLES,
    NOWHERE,
    Sample,
    Samples,
    place_of,
    position_at,
)
from rlstreams.streams.audit.staleness import Staleness
from rlstreams.streams.audit.versions import Versions
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.group_ids import MAX_DIGITS
from rlstreams.streams.log.record import ID_HEADER, REPLAY_HEADER, Partition, Position, RawRecord
from rlstreams.streams.log.topics import PROMPTS, SCORED, STEPS, TRAJECTORIES

NAMED = 20  # duplicates, void and unreadable records that a report names
POLICY = "policy"  # author of a segment
NEVER = 1 << 62  # no offset is higher

_PROMPT = Projection(Prompt, "group_id", "sample", "group_size", "purpose")
_SEGMENTS = ("author", "policy_version", "weight_hash")
_TRAJECTORY = Projection(
    Trajectory,
    *("group_id", "sample", "reward", "worker", "finished_at_ms"),
    *(f"segments.{field}" for field in (*_SEGMENTS, "load_id")),
)
_SCORED = Projection(
    ScoredTrajectory,
    *("trajectory_partition", "trajectory_offset"),
    *(f"trajectory.{field}" for field in ("group_id", "sample", "reward")),
    *(f"trajectory.segments.{field}" for field in (*_SEGMENTS, "token_ids.shape")),
)
# Where a sample notes the place of its first record.
FIELDS = {PROMPTS.name: "prompt", TRAJECTORIES.name: "trajectory", SCORED.name: "scored"}


class AuditFold:
    """Takes a run's records: `steps` first, each topic in the order of its partitions.

    Args:
        expired: first offset left by retention, for partitions where that is not 0.
        schemas: of the bus that the records come from.
    """

    def __init__(
        self, expired: Mapping[Partition, int] | None = None, schemas: SchemaTexts = NO_TEXTS
    ) -> None:
        self.expired = expired or {}
        self._schemas = schemas
        self.replay = Replay()
        self.breaches = Breaches()
        self.samples = Samples()
        self.ledger = Ledger(self.samples, self.breaches)
        self.staleness = Staleness(self.ledger, self.breaches)
        self.versions = Versions()
        self.newest_group = -1
        self.dense_up_to: int | None = None
        self.duplicates: list[str] = []  # the first few, named
        self.num_duplicates = 0
        self.unreadable: list[str] = []  # the first few, named
        self.num_unreadable = 0
        self._origins: set[Position] = set()  # of replayed records of the small topics
        # Topic and place of each record that a dead letter is about: by sample, or of no sample.
        self._letters: dict[Sample, set[tuple[str, int]]] = {}
        self._nameless: set[tuple[str, int]] = set()
        # Scores that are not of their sample's first trajectory, by place: the sample, the place
        # that they name, their facts. And what they may be of: later trajectories, unreadable ones.
        self._unlike: dict[int, tuple[Sample, int, int]] = {}
        self._copies: dict[int, int] = {}
        self._unread_trajectories: set[int] = set()

    def foresee(self, raw: RawRecord) -> Event | UnreadStep | None:
        """Note which version a record of `steps` made; gives what `train` takes, now or later.

        Versions that were used may be newer than the steps that this audit accounts for.
        """
        try:
            event = self._decoded(raw)
        except DecodeError as err:
            self._unreadable(raw, err)
            if not _may_be_event(raw, err):
                return None
            self.versions.num_unread += 1
            print_ = bytes(raw.value[len(MARKER) : HEADER_BYTES]).hex()
            return UnreadStep(f"fingerprint {print_}: {err}")
        if event is not None:
            self.versions.ledger(event)
        return event

    def train(self, step: Event | UnreadStep, position: Position) -> None:
        """Account for the samples of an event of `steps`."""
        self.ledger.apply(step, position)
        self.staleness.trained()

    def take(self, raw: RawRecord) -> None:
        """Take a record of any topic but `steps`."""
        topic, partition, offset = raw.position
        try:
            if topic not in FIELDS:
                self._event(raw)
                return
            place = place_of(partition, offset)
            if REPLAY_HEADER in raw.headers:
                origin = self.replay.take(raw)
                if origin is not None and self.replay.is_by_origin:
                    place = place_of(origin.partition, origin.offset)
            if topic == SCORED.name:
                self._scored(raw, place)
            elif topic == TRAJECTORIES.name:
                self._trajectory(raw, place)
            else:
                self._prompt(raw, place)
        except DecodeError as err:
            self._unreadable(raw, err)
            if topic in FIELDS:
                self._by_header(raw, place)

    def begins(self, partition: Partition) -> int:
        """Below this offset nothing of a partition can be known: retention removed it, or it was
        not recorded.
        """
        if self.replay.is_by_origin:
            return self.replay.first.get(partition, NEVER)
        return self.expired.get(partition, 0)

    def mark_issued(self) -> None:
        """Every group up to the newest one so far must have been seen when the report is made."""
        self.dense_up_to = self.newest_group

    def settle(self) -> None:
        """Forget what closed groups no longer need; join dead letters with samples."""
        self.staleness.forget_closed()
        if not self._nameless:
            return
        for sample in self.samples:
            for topic, field in FIELDS.items():
                origin = topic, getattr(sample, field)
                if origin in self._nameless:
                    self._nameless.remove(origin)
                    self._set_aside(sample, origin)

    def is_end_of_trained(self, sample: Sample) -> bool:
        """Whether a dead letter for this trained sample is about what was trained.

        The trainer trains a sample of which one record is fine, and sets aside a copy that is not;
        the copy is a duplicate. So a letter is against the ledger if it is about the very record
        that the step took, or about the sample's first one in another topic, which that was made
        from; also where retention hides that one.
        """
        made_of = {
            SCORED.name: sample.used,
            TRAJECTORIES.name: sample.trajectory,
            PROMPTS.name: sample.prompt,
        }
        letters = self._letters[sample]
        return any(made_of.get(topic, NOWHERE) in (place, NOWHERE) for topic, place in letters)

    def check_scores(self, breaches: Breaches) -> None:
        """A score holds its trajectory's reward, versions and hashes, as the log has them."""
        for place, (sample, named, facts) in self._unlike.items():
            of = position_at(TRAJECTORIES.name, named)
            if named in self._unread_trajectories or of.offset < self.begins(
                Partition(of.topic, of.partition)
            ):
                continue
            known = sample.facts if named == sample.trajectory else self._copies.get(named)
            if known == facts:
                continue
            what = "no trajectory of it" if known is None else "another reward, version or hash"
            where = position_at(SCORED.name, place)
            breaches.add(BreachKind.FORGED_SCORE, sample.name, f"{where} names {of}: {what}")

    def _decoded(self, raw: RawRecord) -> Event | None:
        """Its event; None for one that a replay that went back had written before."""
        origin = self.replay.take(raw)
        if origin in self._origins:
            self.num_duplicates += 1
            return None
        event = decoded(raw, self._schemas).event
        if origin is not None:
            self._origins.add(origin)
        elif raw.position.topic == STEPS.name:
            self.replay.has_own_steps = True
        return event

    def _event(self, raw: RawRecord) -> None:
        event = self._decoded(raw)
        if isinstance(event, DeadLetter):
            self._letter(event)
        elif isinstance(event, PolicyLoaded):
            self.versions.loaded(event)
        elif isinstance(event, PolicyPublished):
            self.versions.published(event, raw.position)

    def _prompt(self, raw: RawRecord, place: int) -> None:
        group_id, number, size, purpose = _PROMPT.read(raw.value, self._schemas)
        sample = self._sample(raw, group_id, number)
        if sample is None:
            return
        group = sample.group
        if group.number is None and purpose != EVALUATE:
            self.breaches.add(BreachKind.BAD_ID, group_id, f"issued for {purpose!r}")
        if self._is_first(sample, raw, place):
            group.size = group.size or max(1, min(size, MAX_SAMPLES))
            if group.number is not None and group.number > self.newest_group:
                self.newest_group = group.number

    def _trajectory(self, raw: RawRecord, place: int) -> None:
        values = _TRAJECTORY.read(raw.value, self._schemas)
        group_id, number, reward, worker, finished_ms, authors, versions, hashes, loads = values
        sample = self._sample(raw, group_id, number)
        if sample is None:
            return
        facts = _facts(reward, versions, hashes)
        if not self._is_first(sample, raw, place):
            self._copies[place] = facts
            return
        sample.facts = facts
        for author, *weights, load_id in zip(authors, versions, hashes, loads, strict=True):
            if author == POLICY:
                self.versions.used((worker, load_id), tuple(weights), sample, finished_ms)

    def _scored(self, raw: RawRecord, place: int) -> None:
        values = _SCORED.read(raw.value, self._schemas)
        partition, offset, group_id, number, reward, authors, versions, hashes, shapes = values
        sample = self._sample(raw, group_id, number)
        if sample is None:
            return
        self._is_first(sample, raw, place)
        named, facts = place_of(partition, offset), _facts(reward, versions, hashes)
        if named != sample.trajectory or facts != sample.facts:
            self._unlike[place] = sample, named, facts
        columns = enumerate(zip(authors, versions, shapes, strict=True))
        segments = [
            (index, version, shape[0] if shape else 0)
            for index, (author, version, shape) in columns
            if author == POLICY
        ]
        self.staleness.scored(sample, place, segments)

    def _letter(self, event: DeadLetter) -> None:
        sample = self.samples.sample(event.group_id, event.sample)
        origin = event.origin_topic, place_of(event.origin_partition, event.origin_offset)
        if sample is not None:
            self._set_aside(sample, origin)
        elif event.origin_topic in FIELDS and origin[1] != NOWHERE:
            self._nameless.add(origin)

    def _set_aside(self, sample: Sample, origin: tuple[str, int]) -> None:
        sample.is_dead = True
        self._letters.setdefault(sample, set()).add(origin)

    def _sample(self, raw: RawRecord, group_id: str, number: int) -> Sample | None:
        sample = self.samples.sample(group_id, number)
        if sample is None:
            name = f"{group_id}/{number}"
            self.breaches.add(BreachKind.BAD_ID, name, f"record at {raw.position}")
        return sample

    def _is_first(self, sample: Sample, raw: RawRecord, place: int) -> bool:
        """Note where the sample's first record of a topic lies; every later one is a duplicate."""
        field = FIELDS[raw.position.topic]
        if getattr(sample, field) == NOWHERE:
            setattr(sample, field, place)
            return True
        self.num_duplicates += 1
        if len(self.duplicates) < NAMED:
            self.duplicates.append(f"{sample.name} again at {raw.position}")
        return False

    def _unreadable(self, raw: RawRecord, error: DecodeError) -> None:
        self.num_unreadable += 1
        if len(self.unreadable) < NAMED:
            self.unreadable.append(f"{raw.position}: {error}")

    def _by_header(self, raw: RawRecord, place: int) -> None:
        """Note that an unreadable record is there: its header says of which sample."""
        if raw.position.topic == TRAJECTORIES.name:
            self._unread_trajectories.add(place)
        text = bytes(raw.headers.get(ID_HEADER) or b"").decode("ascii", "replace")
        group_id, _, rest = text.partition("/")
        number = rest.partition("/")[0]
        if self.samples.group(group_id) is None or not number.isdigit():
            return
        sample = self._sample(raw, group_id, int(number[:MAX_DIGITS]))
        if sample is not None:
            self._is_first(sample, raw, place)


def _facts(reward: float, versions: Sequence[int], hashes: Sequence[str]) -> int:
    """What a score may not change of its trajectory, in one number; also where a reward is NaN."""
    return hash((repr(reward), *versions, *hashes))


def _may_be_event(raw: RawRecord, error: DecodeError) -> bool:
    """Framed as ours are, and not known to be an event that this release has no use for."""
    is_framed = raw.value[: len(MARKER)] == MARKER and len(raw.value) >= HEADER_BYTES
    return is_framed and not isinstance(error, UnknownEventError)

"""The fold of the audit: it takes the records of every topic, and keeps the facts of every sample.

The three large topics are read by projection: a dozen fields of a record, not its tensors. The
facts of each sample are in `samples`; `classes` puts each sample in its class. A record that cannot
be read is counted and named, and costs nothing but itself.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod

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
from rlstreams.streams.audit.ledger import AuditLedger, UnreadStep
from rlstreams.streams.audit.report import Breaches, BreachKind, CountedNames
from rlstreams.streams.audit.samples import (
    MAX_SAMPLES,
    NOWHERE,
    AuditSample,
    AuditSamples,
    Origin,
)
from rlstreams.streams.audit.sessions import SessionsAudit
from rlstreams.streams.audit.staleness import Staleness
from rlstreams.streams.audit.versions import ANY_WORKER, Versions
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.group_ids import MAX_DIGITS
from rlstreams.streams.log.record import (
    ID_HEADER,
    REPLAY_HEADER,
    Partition,
    Position,
    RawRecord,
    place_of,
    position_at,
)
from rlstreams.streams.log.topics import PROMPTS, SCORED, STEPS, TRAJECTORIES

POLICY = "policy"  # author of a segment

_PROMPT = Projection(Prompt, "group_id", "sample", "group_size", "purpose")
_SEGMENTS = ("author", "policy_version", "weight_hash")
_TRAJECTORY = Projection(
    Trajectory,
    *("group_id", "sample", "reward", "judged_by", "worker", "finished_at_ms"),
    *(f"segments.{field}" for field in (*_SEGMENTS, "load_id")),
)
_SCORED = Projection(
    ScoredTrajectory,
    *("trajectory_partition", "trajectory_offset"),
    *(f"trajectory.{field}" for field in ("group_id", "sample", "reward", "judged_by")),
    *(f"trajectory.segments.{field}" for field in (*_SEGMENTS, "token_ids.shape")),
)
# Attribute of a sample for the place of its first record, by topic.
FIELDS = {PROMPTS.name: "prompt", TRAJECTORIES.name: "trajectory", SCORED.name: "scored"}


class AuditFold:
    """Takes a run's records: `steps` first, each topic in the order of its partitions.

    Args:
        expired: first offset left by retention, for partitions where that is not 0.
        schemas: schemas of the bus that the records come from.
    """

    def __init__(
        self, expired: Mapping[Partition, int] | None = None, schemas: SchemaTexts = NO_TEXTS
    ) -> None:
        self.expired = expired or {}
        self._schemas = schemas
        self.breaches = Breaches()
        self.samples = AuditSamples()
        self.ledger = AuditLedger(self.samples, self.breaches)
        self.staleness = Staleness(self.ledger, self.breaches)
        self.versions = Versions()
        self.newest_group = -1
        self.dense_up_to: int | None = None
        self.duplicates = CountedNames()
        self.unreadable = CountedNames()
        self.sessions = SessionsAudit(self.breaches, self.duplicates, self.expired)
        self._nameless: set[Origin] = set()  # origins of dead letters that name no sample
        self.by_headers: set[tuple[str, AuditSample]] = set()  # stages known by headers alone
        # By place, scores that are not of their sample's first trajectory: the sample, the place
        # that they name, their facts. By place, facts of other trajectories; None: unreadable.
        self._unlike: dict[int, tuple[AuditSample, int, int]] = {}
        self._others: dict[int, int | None] = {}
        # By topic whose events name positions: whether a replay wrote any record.
        self._has_replayed: defaultdict[str, bool] = defaultdict(bool)

    @property
    def replayed(self) -> str:
        """The topic that a replay wrote and that the audit would judge by; "": none.

        Its events name positions of the recorded log. Samples are judged by `steps`, and by the
        scores as long as there is no step: roles may go on with replayed prompts, trajectories or
        scores, and their steps name this log's positions.
        """
        topic = STEPS.name if STEPS.name in self._has_replayed else SCORED.name
        return topic if self._has_replayed.get(topic) else ""

    def foresee(self, raw: RawRecord) -> Event | UnreadStep | None:
        """Note the version that a record of `steps` made; return what `train` takes, now or later.

        Versions that were used may be newer than the steps that this audit accounts for.
        """
        self._note_replay(raw)
        try:
            event = decoded(raw, self._schemas).event
        except DecodeError as err:
            self.unreadable.add(f"{raw.position}: {err}")
            is_framed = raw.value[: len(MARKER)] == MARKER and len(raw.value) >= HEADER_BYTES
            if isinstance(err, UnknownEventError) or not is_framed:
                return None  # not framed as ours are, or an event of no use to this release
            self.versions.num_unread += 1
            print_ = bytes(raw.value[len(MARKER) : HEADER_BYTES]).hex()
            return UnreadStep(f"fingerprint {print_}: {err}")
        self.versions.ledger(event)
        self.ledger.foresee(event)
        return event

    def train(self, step: Event | UnreadStep, position: Position) -> None:
        """Account for the samples of an event of `steps`."""
        self.ledger.apply(step, position)
        self.staleness.trained()

    def take(self, raw: RawRecord) -> None:
        """Take a record of any topic but `steps`."""
        topic, partition, offset = raw.position
        place = place_of(partition, offset)
        if topic == SCORED.name:
            self._note_replay(raw)
        try:
            if topic not in FIELDS:
                self._event(raw)
            elif topic == SCORED.name:
                self._scored(raw, place)
            elif topic == TRAJECTORIES.name:
                self._trajectory(raw, place)
            else:
                self._prompt(raw, place)
        except DecodeError as err:
            self.unreadable.add(f"{raw.position}: {err}")
            if topic in FIELDS:
                self._by_header(raw, place)

    def begins(self, topic: str, partition: int) -> int:
        """Return the offset below which retention removed a partition's records."""
        return self.expired.get(Partition(topic, partition), 0)

    def mark_issued(self) -> None:
        """Note the newest group so far: the report expects every group up to it."""
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
                    sample.letters += (origin,)

    def check_scores(self, breaches: Breaches) -> None:
        """Check that each score holds its trajectory's reward, versions and hashes."""
        for place, (sample, named, facts) in sorted(self._unlike.items()):
            _, partition, offset = of = position_at(TRAJECTORIES.name, named)
            if offset < self.begins(TRAJECTORIES.name, partition):
                continue
            known = sample.facts if named == sample.trajectory else self._others.get(named, 0)
            if known is not None and known != facts:
                detail = f"{position_at(SCORED.name, place)} is not of the trajectory at {of}"
                breaches.add(BreachKind.FORGED_SCORE, sample.name, detail)

    def _note_replay(self, raw: RawRecord) -> None:
        topic = raw.position.topic
        self._has_replayed[topic] |= REPLAY_HEADER in raw.headers

    def _event(self, raw: RawRecord) -> None:
        event = decoded(raw, self._schemas).event
        if self.sessions.take(event, raw.position):
            return
        if isinstance(event, PolicyLoaded):
            self.versions.loaded(event)
        elif isinstance(event, PolicyPublished):
            self.versions.published(event, raw.position)
        elif isinstance(event, DeadLetter):
            sample = self.samples.sample(event.group_id, event.sample)
            origin = event.origin_topic, place_of(event.origin_partition, event.origin_offset)
            if sample is not None:
                sample.letters += (origin,)
            elif event.origin_topic in FIELDS and origin[1] != NOWHERE:
                self._nameless.add(origin)

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
            if group.number is not None:
                self.newest_group = max(self.newest_group, group.number)

    def _trajectory(self, raw: RawRecord, place: int) -> None:
        values = _TRAJECTORY.read(raw.value, self._schemas)
        group_id, number, reward, judge, worker, finished_ms, *segments = values
        authors, versions, hashes, loads = segments
        sample = self._sample(raw, group_id, number)
        if sample is None:
            return
        facts = _facts(reward, judge, versions, hashes)
        if not self._is_first(sample, raw, place):
            self._others[place] = facts
            return
        sample.facts = facts
        if sample.name in self.sessions.heard:
            whole = decoded(raw, self._schemas).event
            assert isinstance(whole, Trajectory), "its projection was read"
            self.sessions.trajectory(sample.name, whole, raw.position)
        # An agent's calls may be of several workers, of which the last one writes its sample.
        whose = ANY_WORKER if sample.name in self.sessions.heard else worker
        for author, version, text, load_id in zip(authors, versions, hashes, loads, strict=True):
            if author == POLICY:
                self.versions.used((whose, load_id), (version, text), sample, finished_ms)

    def _scored(self, raw: RawRecord, place: int) -> None:
        values = _SCORED.read(raw.value, self._schemas)
        partition, offset, group_id, number, reward, judge, *columns = values
        authors, versions, hashes, shapes = columns
        sample = self._sample(raw, group_id, number)
        if sample is None:
            return
        if self._is_first(sample, raw, place):
            sample.judged_by = sys.intern(judge)
        facts = _facts(reward, judge, versions, hashes)
        is_replayed = REPLAY_HEADER in raw.headers  # it names a place of the recorded log
        named = sample.trajectory if is_replayed else place_of(partition, offset)
        is_alone = is_replayed and named == NOWHERE  # its trajectory was not replayed
        if not is_alone and (named != sample.trajectory or facts != sample.facts):
            self._unlike[place] = sample, named, facts
        segments = [
            (index, version, prod(shape))
            for index, (author, version, shape) in enumerate(
                zip(authors, versions, shapes, strict=True)
            )
            if author == POLICY
        ]
        self.staleness.scored(sample, place, segments)

    def _sample(self, raw: RawRecord, group_id: str, number: int) -> AuditSample | None:
        sample = self.samples.sample(group_id, number)
        if sample is None:
            name = f"{group_id}/{number}"
            self.breaches.add(BreachKind.BAD_ID, name, f"record at {raw.position}")
        return sample

    def _is_first(self, sample: AuditSample, raw: RawRecord, place: int) -> bool:
        """Note the place of the sample's first record of a topic; a later one is a duplicate."""
        field = FIELDS[raw.position.topic]
        is_first = bool(getattr(sample, field) == NOWHERE) or (field, sample) in self.by_headers
        if is_first:
            setattr(sample, field, place)
            self.by_headers.discard((field, sample))
        else:
            self.duplicates.add(f"{sample.name} again at {raw.position}")
        return is_first

    def _by_header(self, raw: RawRecord, place: int) -> None:
        """Note an unreadable record as its sample's, by its header, until a readable one comes."""
        if raw.position.topic == TRAJECTORIES.name:
            self._others[place] = None
        text = bytes(raw.headers.get(ID_HEADER) or b"").decode("ascii", "replace")
        group_id, _, rest = text.partition("/")
        number = rest.partition("/")[0]
        if self.samples.group(group_id) is not None and number.isdigit():
            sample = self._sample(raw, group_id, int(number[:MAX_DIGITS]))
            field = FIELDS[raw.position.topic]
            if sample is not None and getattr(sample, field) == NOWHERE:
                setattr(sample, field, place)
                self.by_headers.add((field, sample))


def _facts(reward: float, judge: str, versions: Sequence[int], hashes: Sequence[str]) -> int:
    """Return one number for the facts that a score may not change; a NaN reward equals itself."""
    return hash((repr(reward), judge, *versions, *hashes))

"""A recording behind the port `Bus`: every reader of a run reads a recording, without a broker.

Positions are those of the recorded log. Offsets that are not in the recording are passed over, as
those of compacted records and transaction markers are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlstreams.schemas import SchemaTexts
from rlstreams.streams.log.bus import Appender, Closing, GroupConsumer, Producer
from rlstreams.streams.log.errors import NoGroupsError, OffsetGoneError, TopicMismatchError
from rlstreams.streams.log.record import Committed, Partition, RawRecord
from rlstreams.streams.recording.manifest import RecordedTopic, RecordingError
from rlstreams.streams.recording.reader import Recording


class RecordingBus(Closing):
    """The port `Bus` on `recording`, which its owner closes; methods as in `Bus`."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def reader(self, offsets: Mapping[Partition, int] | None = None) -> RecordingReader:
        """See `Bus`."""
        return RecordingReader(self._recording, offsets or {})

    def partitions(self, topic: str) -> int:
        """See `Bus`."""
        return self._topic(topic).partitions

    def topic_ids(self, topics: Sequence[str]) -> Mapping[str, str]:
        """Return the id that each topic had."""
        return {topic: self._topic(topic).id for topic in topics}

    def settings(self, topic: str) -> Mapping[str, str]:
        """Return unlimited retention: a recording removes nothing."""
        self._topic(topic)
        return {"retention.ms": "-1", "retention.bytes": "-1"}

    def cluster_id(self) -> str:
        """Return the id of the recorded cluster."""
        return self._recording.manifest.cluster_id

    def schemas(self) -> SchemaTexts:
        """Return the schemas that its files hold."""
        return self._recording.schemas

    def beginnings(self, topic: str) -> Mapping[Partition, int]:
        """Return the offsets at which recording began."""
        return {p: span[0] for p, span in self._spans(topic)}

    def ends(self, topic: str) -> Mapping[Partition, int]:
        """Return the offsets at which recording stopped."""
        return {p: span[1] for p, span in self._spans(topic)}

    def written_since(self, partition: Partition, at_ms: int) -> tuple[int, int]:
        """Return the partition's whole span: a recording has no index by time."""
        return dict(self._spans(partition.topic))[partition]

    def committed(self, group: str, topic: str) -> Mapping[Partition, Committed]:
        """Raise NoGroupsError: positions of groups are not recorded."""
        self._topic(topic)
        raise NoGroupsError(f"{self._recording.folder} has no positions of {group} in {topic}")

    def producer(self, transactional_id: str) -> Producer:
        """Raises RecordingError: a recording is only read."""
        raise RecordingError(f"{self._recording.folder} is only read, also by {transactional_id}")

    def appender(self) -> Appender:
        """Raises RecordingError: a recording is only read."""
        raise RecordingError(f"{self._recording.folder} is only read")

    def consumer(self, group: str, topics: Sequence[str]) -> GroupConsumer:
        """Raises RecordingError: a recording has no groups."""
        raise RecordingError(
            f"{self._recording.folder} has no groups: replay it for {group} of {list(topics)}"
        )

    def close(self) -> None:
        """Do nothing: the recording's owner closes it."""

    def _topic(self, name: str) -> RecordedTopic:
        found = self._recording.manifest.topics.get(name)
        if found is None:
            there = ", ".join(self._recording.manifest.topics) or "no topic"
            raise TopicMismatchError(
                f"{name} is not in {self._recording.folder}, which holds {there}"
            )
        return found

    def _spans(self, topic: str) -> Iterator[tuple[Partition, tuple[int, int]]]:
        for number in range(self.partitions(topic)):
            partition = Partition(topic, number)
            yield partition, self._recording.spans.get(partition, (0, 0))


class RecordingReader(Closing):
    """The port `Reader` on a recording; never waits."""

    def __init__(self, recording: Recording, offsets: Mapping[Partition, int]) -> None:
        self._recording = recording
        self._at: dict[Partition, int] = {}
        self._records: Iterator[RawRecord] = iter(())
        self.seek(offsets)

    def poll(self, max_records: int, timeout_s: float) -> Sequence[RawRecord]:
        """See `Reader`."""
        found: list[RawRecord] = []
        while len(found) < max_records:
            raw = next(self._records, None)
            if raw is None:
                spans = self._recording.spans
                self._at = {p: max(at, spans.get(p, (0, 0))[1]) for p, at in self._at.items()}
                break
            found.append(raw)
            self._at[raw.partition] = raw.offsets[-1] + 1
        return found

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        """Read exactly these partitions from these offsets on.

        Raises:
            OffsetGoneError: an offset before the recording's first; names that one.
        """
        for partition, offset in offsets.items():
            first, _ = self._recording.spans.get(partition, (0, 0))
            if offset < first:
                raise OffsetGoneError(
                    f"{partition}@{offset} was not recorded: {self._recording.folder} begins at "
                    f"{first}"
                )
        self._at = dict(offsets)
        self._records = self._recording.records(start=offsets)

    def positions(self) -> Mapping[Partition, int]:
        """Return the next offset to deliver by partition."""
        return dict(self._at)

    def close(self) -> None:
        """Release the row groups being read."""
        self._records = iter(())

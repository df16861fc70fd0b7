"""A recording behind the port `Bus`: whatever reads a run reads a recording, without a broker.

Positions are those of the recorded log. What is not in the recording is passed over, as compaction
and transaction markers are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlstreams.schemas import SchemaTexts
from rlstreams.streams.log.bus import Closing, GroupConsumer, Producer
from rlstreams.streams.log.errors import OffsetGoneError, TopicMismatchError
from rlstreams.streams.log.record import Committed, Partition, RawRecord
from rlstreams.streams.recording.errors import RecordingError
from rlstreams.streams.recording.reader import Recording


class RecordingBus(Closing):
    """Reads `recording`, which stays its owner's to close."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._spans = recording.index.spans()

    def reader(self, offsets: Mapping[Partition, int] | None = None) -> RecordingReader:
        """A reader, seeked to `offsets` if given."""
        return RecordingReader(self, self._recording, offsets)

    def partitions(self, topic: str) -> int:
        """Number of partitions that the topic had.

        Raises:
            TopicMismatchError: the topic was not recorded.
        """
        found = self._recording.manifest.topics.get(topic)
        if found is None:
            there = ", ".join(self._recording.manifest.topics) or "no topic"
            raise TopicMismatchError(
                f"{topic} is not in {self._recording.folder}, which holds {there}"
            )
        return found.partitions

    def topic_ids(self, topics: Sequence[str]) -> Mapping[str, str]:
        """The id that each topic had."""
        return {
            topic: self._recording.manifest.topics[topic].id
            for topic in topics
            if self.partitions(topic)
        }

    def settings(self, topic: str) -> Mapping[str, str]:
        """A recording removes nothing."""
        self.partitions(topic)
        return {"retention.ms": "-1", "retention.bytes": "-1"}

    def cluster_id(self) -> str:
        """The id of the cluster that it was recorded from."""
        return self._recording.manifest.cluster_id

    def schemas(self) -> SchemaTexts:
        """Those that its files hold: whatever was read as an event has its schema beside it."""
        return self._recording.schemas

    def beginnings(self, topic: str) -> Mapping[Partition, int]:
        """Where recording began."""
        return {p: self._span(p)[0] for p in self._partitions(topic)}

    def ends(self, topic: str) -> Mapping[Partition, int]:
        """Where recording stopped."""
        return {p: self._span(p)[1] for p in self._partitions(topic)}

    def committed(self, group: str, topic: str) -> Mapping[Partition, Committed]:
        """Groups are not recorded."""
        self.partitions(topic)
        return {}

    def producer(self, transactional_id: str) -> Producer:
        """Nothing is written to a recording through this port.

        Raises:
            RecordingError: always.
        """
        raise RecordingError(f"{self._recording.folder} is only read, also by {transactional_id}")

    def consumer(self, group: str, topics: Sequence[str]) -> GroupConsumer:
        """A recording has no groups.

        Raises:
            RecordingError: always.
        """
        raise RecordingError(
            f"{self._recording.folder} has no groups: replay it for {group} of {list(topics)}"
        )

    def close(self) -> None:
        """Nothing to do."""

    def _partitions(self, topic: str) -> list[Partition]:
        return [Partition(topic, number) for number in range(self.partitions(topic))]

    def _span(self, partition: Partition) -> tuple[int, int]:
        span = self._spans.get(partition)
        return (0, 0) if span is None else (span.first, span.next)


class RecordingReader(Closing):
    """The port `Reader` on a recording."""

    def __init__(
        self, bus: RecordingBus, recording: Recording, offsets: Mapping[Partition, int] | None
    ) -> None:
        self._bus = bus
        self._recording = recording
        self._at: dict[Partition, int] = {}
        self._records: Iterator[RawRecord] = iter(())
        if offsets:
            self.seek(offsets)

    def poll(self, max_records: int, timeout_s: float) -> Sequence[RawRecord]:
        """Whole records, at most `max_records`; never waits.

        Raises:
            DamagedError: a block was changed.
        """
        found: list[RawRecord] = []
        while len(found) < max_records:
            raw = next(self._records, None)
            if raw is None:
                for partition, end in self._ends().items():
                    self._at[partition] = max(self._at[partition], end)
                break
            found.append(raw)
            self._at[raw.partition] = raw.offsets[-1] + 1
        return found

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        """Read exactly these partitions from these offsets on.

        Raises:
            OffsetGoneError: outside of what was recorded; names the range that is there.
        """
        for partition, offset in offsets.items():
            first = self._bus.beginnings(partition.topic).get(partition, 0)
            if offset < first:
                raise OffsetGoneError(
                    f"{partition}@{offset} was not recorded: {self._recording.folder} begins at "
                    f"{first}"
                )
        self._at = dict(offsets)
        self._records = self._recording.records(start=offsets)

    def positions(self) -> Mapping[Partition, int]:
        """Next offset to deliver by partition."""
        return dict(self._at)

    def close(self) -> None:
        """Release the files."""
        self._records = iter(())

    def _ends(self) -> dict[Partition, int]:
        return {p: self._bus.ends(p.topic).get(p, 0) for p in self._at}

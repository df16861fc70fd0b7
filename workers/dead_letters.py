"""The dead-letter border: what cannot be handled becomes a fact of its own."""

from __future__ import annotations

from schemas.events import TRAIN, DeadLetter, Prompt, ScoredTrajectory, Trajectory
from streams.codec import now_ms
from streams.record import ID_HEADER, PURPOSE_HEADER, RawRecord
from workers.context import Context


def dead_letter(
    context: Context,
    raw: RawRecord,
    sample: Prompt | Trajectory | None,
    *,
    reason: str,
    detail: str,
    permanent: bool,
) -> DeadLetter:
    """`raw`, set aside.

    Args:
        sample: the decoded sample; None where the bytes could not be read, then the record's
            headers say which sample it was, if they can.
        reason: a stable code: "decode", "validation", "reward", "scoring", ...
        permanent: another attempt at the same row would fail alike.
    """
    group_id, number = (sample.group_id, sample.sample) if sample else _from_header(raw)
    purpose = sample.purpose if sample else raw.headers.get(PURPOSE_HEADER, TRAIN.encode()).decode()
    return DeadLetter(
        group_id=group_id,
        sample=number,
        purpose=purpose,
        row=sample.row if sample else -1,
        dataset_epoch=sample.dataset_epoch if sample else 0,
        replacement=sample.replacement if sample else 0,
        reason=reason,
        detail=detail[:4000],
        permanent=permanent,
        role=context.role,
        worker=context.worker,
        origin_topic=raw.position.topic,
        origin_partition=raw.position.partition,
        origin_offset=raw.position.offset,
        key=raw.key,
        value=bytes(raw.value),
        at_ms=now_ms(),
    )


def sample_of(event: object) -> Prompt | Trajectory | None:
    """The sample that an event is about."""
    if isinstance(event, ScoredTrajectory):
        return event.trajectory
    return event if isinstance(event, Prompt | Trajectory) else None


def _from_header(raw: RawRecord) -> tuple[str, int]:
    text = raw.headers.get(ID_HEADER, b"").decode("utf-8", "replace")
    group_id, _, rest = text.partition("/")
    number = rest.partition("/")[0]
    return (group_id, int(number)) if number.isdigit() else ("", -1)

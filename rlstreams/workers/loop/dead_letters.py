"""The dead-letter boundary: a record that cannot be handled becomes an event of its own."""

from __future__ import annotations

from enum import StrEnum

from rlstreams.schemas import DecodeError
from rlstreams.schemas.events import (
    TRAIN,
    DeadLetter,
    Prompt,
    ScoredTrajectory,
    Trajectory,
)
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.record import Outgoing, RawRecord, Record
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS
from rlstreams.workers.loop.context import Context

MAX_DETAIL = 4000  # characters
_MAX_ID = 64  # characters; no run's id is as long, and brokers refuse a record with a long key


class Reason(StrEnum):
    """Stable codes, for operators' filters and for requests."""

    DECODE = "decode"  # bytes that are no event: foreign, corrupt, cut short, a part missing
    VALIDATION = "validation"  # an event with an impossible field
    PROMPT_TOO_LONG = "prompt_too_long"  # no room for an answer
    ENGINE = "engine"  # refused or failed by the engine, at every attempt
    DEADLINE = "deadline"  # not rolled out within `rollout.sample_deadline_s`
    REWARD = "reward"  # the verifier raised, hung, died or returned no number
    ENVIRONMENT = "environment"  # it raised, hung, died, or answered nonsense
    AGENT = "agent"  # its own code failed, or it made no call
    INFRASTRUCTURE = "infrastructure"  # engine, gateway or machine failed it
    ABANDONED = "abandoned"  # the agent reported that it will not go on
    SCORING = "scoring"  # refused or failed by the scorer, alone in its window
    NUMERICS = "numerics"  # a step with it is not finite, also with it alone
    MEMORY = "memory"  # a step with it alone does not fit in the trainer's memory
    KILLS_WORKER = "kills_worker"  # every worker that read it died
    TRANSACTION = "transaction"  # the broker refused its outputs


def dead_letter(
    context: Context,
    raw: RawRecord,
    sample: Prompt | Trajectory | None,
    *,
    reason: str,
    detail: str,
    permanent: bool,
) -> DeadLetter:
    """The dead letter of `raw`.

    Args:
        sample: the decoded sample; None where the bytes could not be read: then the dead letter
            names no sample, and closes no group, whatever the record's headers are.
        reason: a `Reason`.
        permanent: whether another attempt at the same row would fail alike.
    """
    return DeadLetter(
        group_id=sample.group_id[:_MAX_ID] if sample else "",
        sample=sample.sample if sample else -1,
        purpose=sample.purpose if sample else TRAIN,
        row=sample.row if sample else -1,
        dataset_epoch=sample.dataset_epoch if sample else 0,
        replacement=sample.replacement if sample else 0,
        reason=str(reason),
        detail=detail[:MAX_DETAIL],
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


def set_aside(
    context: Context,
    record: Record[Prompt] | Record[Trajectory],
    *,
    reason: str,
    detail: str,
    permanent: bool = False,
) -> Outgoing:
    """The dead letter of a record that was read, to be sent."""
    letter = dead_letter(
        context, record.raw, record.event, reason=reason, detail=detail, permanent=permanent
    )
    return outgoing(DEAD_LETTERS, letter)


def refusal(context: Context, raw: RawRecord, event: object, error: Exception) -> DeadLetter:
    """Dead letter of a record that was refused on reading: no event, or one with an impossible
    field.

    Only a refused prompt is permanent: it comes from the row, so another one would be alike. A
    damaged or impossible answer is no evidence against its row.
    """
    sample = sample_of(event)
    is_undecodable = isinstance(error, DecodeError)
    return dead_letter(
        context,
        raw,
        sample,
        reason=Reason.DECODE if is_undecodable else Reason.VALIDATION,
        detail=str(error),
        permanent=isinstance(sample, Prompt) and raw.position.topic == PROMPTS.name,
    )


def sample_of(event: object) -> Prompt | Trajectory | None:
    """The sample that an event is about."""
    if isinstance(event, ScoredTrajectory):
        return event.trajectory
    return event if isinstance(event, Prompt | Trajectory) else None

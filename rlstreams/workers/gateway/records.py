"""The records of one start of a session, and their way into the log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from rlstreams.schemas.calls import REWARD
from rlstreams.schemas.events import (
    CallCommitted,
    CallFailed,
    CallReplayed,
    Event,
    OutcomeReported,
    Prompt,
    SessionClosed,
    SessionOpened,
    Tensor,
)
from rlstreams.streams.digests import text_id
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.parts import PART_BYTES
from rlstreams.streams.log.record import Outgoing, Record
from rlstreams.streams.log.topics import CALLS, OUTCOMES
from rlstreams.streams.sessions.experts import row_versions, stitched
from rlstreams.streams.sessions.session import Session
from rlstreams.workers.engines.base import sampled_by
from rlstreams.workers.engines.sampled import Sampled
from rlstreams.workers.gateway.auxiliary import Auxiliary
from rlstreams.workers.gateway.canonical import answer_message
from rlstreams.workers.gateway.dialogue import PromptIds
from rlstreams.workers.gateway.port import CallAnswer, CallRefusedError, CallRequest, Report
from rlstreams.workers.gateway.shared import SharedParts

E = TypeVar("E", bound=Event)


class SessionRecords:
    """Makes the records, and has them committed, each to its prompt's partition number."""

    def __init__(
        self,
        shared: SharedParts,
        record: Record[Prompt],
        session_id: str,
        start: int,
        auxiliary: Auxiliary,
    ) -> None:
        """
        Args:
            record: the prompt.
            auxiliary: calls that are never learnt from.
        """
        self._shared = shared
        self._record = record
        self._auxiliary = auxiliary
        self.session_id = session_id
        self.start = start
        self._has_progress = False  # some call of this start is in the log

    def opened(
        self, agent: str, agent_hash: str, client_group: str, *, branches: bool
    ) -> SessionOpened:
        """The record that the agent is started."""
        prompt, at = self._record.event, self._record.position
        return SessionOpened(
            session_id=self.session_id,
            group_id=prompt.group_id,
            sample=prompt.sample,
            group_size=prompt.group_size,
            purpose=prompt.purpose,
            row=prompt.row,
            dataset_epoch=prompt.dataset_epoch,
            replacement=prompt.replacement,
            start=self.start,
            agent=agent,
            agent_hash=agent_hash,
            seed=prompt.seed,
            prompt_partition=at.partition,
            prompt_offset=at.offset,
            worker=self._shared.worker,
            instance=self._shared.instance,
            at_ms=now_ms(),
            client_group=client_group,
            branches=branches,
        )

    def call(
        self, request: CallRequest, prompt: PromptIds, sampled: Sampled, answer: CallAnswer
    ) -> CallCommitted:
        """The record of a call, without the fields that its commit adds: ids, segments, times."""
        shared, behind = self._shared, len(prompt.token_ids) - len(prompt.new_ids)
        first_row = max(0, behind - 1)  # rows before are the parent's
        return CallCommitted(
            session_id=self.session_id,
            group_id=self._record.event.group_id,
            call_id="",
            start=self.start,
            ordinal=-1,
            request_hash="",
            occurrence=0,
            parent=prompt.parent,
            why_root=prompt.why_root,
            prompt_tokens=len(prompt.token_ids),
            new_ids=Tensor.of(prompt.new_ids),
            segments=(),
            finish_reason=answer.finish_reason,
            attempt=sampled.attempt,
            dialect=request.dialect,
            request=shared.packed(request.body),
            response=shared.packed(json.dumps(answer_message(answer.parsed)).encode()),
            overruled=json.dumps(answer.overruled) if answer.overruled else "",
            is_trained=not self._auxiliary.has(request),
            routed_experts=experts_of(sampled, first_row),
            routed_experts_start=first_row,
            engine=sampled_by(shared.engine.name, sampled.segments),
            worker=shared.worker,
            instance=shared.instance,
        )

    def replayed(self, recorded: CallCommitted) -> CallReplayed:
        """The record that a request is answered from the log."""
        return CallReplayed(
            session_id=self.session_id,
            group_id=recorded.group_id,
            start=self.start,
            call_id=recorded.call_id,
            at_ms=now_ms(),
        )

    def failed(self, request_hash: str, occurrence: int, err: CallRefusedError) -> CallFailed:
        """The record that a request gets no answer."""
        return CallFailed(
            session_id=self.session_id,
            group_id=self._record.event.group_id,
            start=self.start,
            request_hash=request_hash,
            occurrence=occurrence,
            status=err.status,
            reason=str(err),
            at_ms=now_ms(),
        )

    def closed(self, log: Session, kind: str, detail: str) -> SessionClosed:
        """The record that the session is over."""
        prompt = self._record.event
        return SessionClosed(
            session_id=self.session_id,
            group_id=prompt.group_id,
            sample=prompt.sample,
            start=self.start,
            kind=kind,
            detail=detail,
            num_calls=len(log.nodes),
            opened_at_ms=log.opened.at_ms if log.opened is not None else 0,
            worker=self._shared.worker,
            instance=self._shared.instance,
            at_ms=now_ms(),
        )

    def outcome(
        self,
        report: Report,
        grader: str,
        *,
        named: str = "",
        replaced: str | None = None,
        start: int = -1,
        number: int = 0,
    ) -> OutcomeReported:
        """The record of an outcome of this session.

        Args:
            named: its id; "": derived from the rest.
            replaced: id of the outcome that it takes the place of.
            start: of the agent, if it is its own word.
            number: of its words before this one.
        """
        numbers = repr(report.reward), str(sorted(report.parts.items()))
        about = report.note, str(report.call_id), str(replaced), str(start), str(number)
        return OutcomeReported(
            session_id=self.session_id,
            group_id=self._record.event.group_id,
            outcome_id=named or text_id(self.session_id, grader, *numbers, *about),
            kind=REWARD,
            reward=report.reward,
            grader=grader,
            call_id=report.call_id,
            parts=dict(report.parts),
            note=report.note,
            supersedes=replaced,
            by=self._shared.worker,
            at_ms=now_ms(),
            start=start,
        )

    def note(self, event: Event) -> None:
        """Have an event committed, before all later ones, without a wait."""
        self._shared.commits.note(self._record.raw, self.outgoing(event))

    def outgoing(self, event: Event) -> Outgoing:
        """The event as it is sent."""
        topic = OUTCOMES if isinstance(event, OutcomeReported) else CALLS
        return outgoing(topic, event, partition=self._record.position.partition)

    async def committed(self, event: E, *, is_progress: bool = True) -> E:
        """The event, once it is committed."""
        records = [self.outgoing(event)]
        commits = self._shared.commits
        await commits.committed(self._record.raw, lambda: records, is_progress=is_progress)
        return event

    async def settled(self, is_settled: Callable[[], bool]) -> None:
        """Return once `is_settled` was true on the role's thread, and all is committed that was
        announced by then."""
        commits = self._shared.commits
        await commits.committed(
            self._record.raw, lambda: () if is_settled() else None, is_progress=False
        )

    async def appended(self, event: CallCommitted | CallReplayed) -> None:
        """Return once the broker has acknowledged it, outside of transactions.

        A record that takes several parts is committed instead.

        Raises:
            StreamsError: it is not, or that is unknown; this process has to end.
        """
        record = self.outgoing(event)
        if len(record) > PART_BYTES:
            await self.committed(event)
            return
        await asyncio.wrap_future(self._shared.appender.append(record))
        if isinstance(event, CallCommitted) and not self._has_progress:
            self._has_progress = True  # once is enough, and each time would wake up the role
            self._shared.commits.note(self._record.raw, is_progress=True)


def experts_of(sampled: Sampled, start: int) -> Tensor | None:
    """Routed experts of the tokens from `start` of the sequence on; None: not all are known."""
    if all(segment.routed_experts is None for segment in sampled.segments):
        return None
    ends = sampled.num_prompt + np.cumsum([len(segment.token_ids) for segment in sampled.segments])
    spans = [
        (segment.policy_version, int(end))
        for segment, end in zip(sampled.segments, ends, strict=True)
        if len(segment.token_ids)
    ]
    versions = row_versions(int(ends[-1]), spans)
    parts = []  # of the rows that are wanted: those before are its parent's
    for one in sampled.segments:
        if one.routed_experts is not None:
            first = one.routed_experts_start
            rows = one.routed_experts[: max(0, len(versions) - first)]  # tokens may have been cut
            parts.append((one.policy_version, max(0, first - start), rows[max(0, start - first) :]))
    whole, mask = stitched(versions[start:], parts)
    return None if whole is None or mask is not None else Tensor.of(whole, "zstd")

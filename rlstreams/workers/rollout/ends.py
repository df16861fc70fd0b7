"""The records that end a session: its trajectory, or a dead letter and why. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rlstreams.schemas.calls import (
    ABANDONED,
    AGENT,
    ENVIRONMENT_FAILED,
    EXPIRED,
    GRADER,
    INFRASTRUCTURE,
    REWARD,
)
from rlstreams.schemas.events import OutcomeReported, Prompt, Trajectory
from rlstreams.streams.digests import text_id
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.record import Outgoing, Record
from rlstreams.streams.log.topics import OUTCOMES, TRAJECTORIES
from rlstreams.streams.sessions.chain import Chain, experts_of, main_chain, segments_of
from rlstreams.streams.sessions.session import Session
from rlstreams.streams.sessions.verdict import Verdict
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.dead_letters import Reason, set_aside
from rlstreams.workers.rollout.late import Decided
from rlstreams.workers.sandbox.reward import Judgement, check_judgement

REASONS: Mapping[str, Reason] = {
    AGENT: Reason.AGENT,
    ENVIRONMENT_FAILED: Reason.ENVIRONMENT,
    GRADER: Reason.REWARD,
    INFRASTRUCTURE: Reason.INFRASTRUCTURE,
    ABANDONED: Reason.ABANDONED,
}


def trajectory_of_session(
    record: Record[Prompt],
    log: Session,
    chain: Chain,
    verdict: Verdict,
    engine: str,
    context: Context,
    judge: str,
) -> Trajectory:
    """The sample of a session's chain, with its reward."""
    experts, mask = experts_of(chain)
    prompt, at = record.event, record.position
    return Trajectory(
        group_id=prompt.group_id,
        sample=prompt.sample,
        attempt=0,
        group_size=prompt.group_size,
        purpose=prompt.purpose,
        row=prompt.row,
        dataset_epoch=prompt.dataset_epoch,
        replacement=prompt.replacement,
        segments=segments_of(chain),
        reward=verdict.reward,
        reward_parts=verdict.parts,
        reward_note=verdict.note,
        routed_experts=experts,
        routed_experts_mask=mask,
        engine=", ".join(dict.fromkeys(call.engine for call in chain.calls if call.engine))
        or engine,
        worker=context.worker,
        instance=context.instance,
        prompt_partition=at.partition,
        prompt_offset=at.offset,
        started_at_ms=log.opened.at_ms if log.opened is not None else 0,
        finished_at_ms=now_ms(),
        judged_by=judge,
    )


def outputs_of(one: Decided, engine: str, context: Context, judge: str) -> tuple[Outgoing, ...]:
    """The records that end a session whose waiting is over, in one transaction with its prompt's
    position: a trajectory; or a dead letter, and the expiry of each missing outcome."""
    record, log, verdict = one.record, one.session, one.verdict
    expired = tuple(
        outgoing(
            OUTCOMES,
            OutcomeReported(
                session_id=log.session_id,
                group_id=record.event.group_id,
                outcome_id=text_id(log.session_id, name),
                kind=EXPIRED,
                reward=0.0,
                grader=name,
                by=context.worker,
                at_ms=now_ms(),
            ),
            partition=record.position.partition,
        )
        for name in verdict.missing
    )
    detail = verdict.note
    if verdict.kind == REWARD:
        try:
            check_judgement(Judgement(reward=verdict.reward, parts=verdict.parts))
            chain = main_chain(log, verdict.terminal)
            made = trajectory_of_session(record, log, chain, verdict, engine, context, judge)
            return (outgoing(TRAJECTORIES, made),)
        except ValueError as err:
            detail = str(err)
    reason = REASONS.get(verdict.kind, Reason.REWARD)
    return (*expired, set_aside(context, record, reason=reason, detail=detail))

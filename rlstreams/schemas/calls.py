"""Facts about agents: a session's starts, each model call, how it closed, what it earned.

A *session* is one agent that works on one task. A *call* is one request to the model. An *outcome*
is a reward of a session, or a failure to judge it. All records of a session lie in its prompt's
partition number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlstreams.schemas.rollouts import Segment
from rlstreams.schemas.tensor import Tensor

# Kinds of a session's close (`SessionClosed.kind`) and of an outcome (`OutcomeReported.kind`).
ENDED = "ended"  # the agent said that it is done
LIMIT = "limit"  # it reached a limit: calls, tokens, seconds, room in the context
AGENT = "agent"  # its own code failed
ENVIRONMENT_FAILED = "environment"  # a sandbox or a tool of it failed
GRADER = "grader"  # the grader that should judge it failed
INFRASTRUCTURE = "infrastructure"  # engine, gateway or machine failed
ABANDONED = "abandoned"  # nobody will go on with it
REWARD = "reward"  # of an outcome: it has a reward
EXPIRED = "expired"  # of an outcome: nobody spoke until the deadline
JUDGED = (ENDED, LIMIT)  # closes that a reward may follow; after others there is none
CLOSED_KINDS = (ENDED, LIMIT, AGENT, ENVIRONMENT_FAILED, GRADER, INFRASTRUCTURE, ABANDONED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """An agent begins to work on a task, or begins anew. The first record has its identity."""

    session_id: str  # "{group_id}/{sample}" of a prompt; else what the gateway gave a client
    group_id: str
    sample: int
    group_size: int
    purpose: str
    row: int
    dataset_epoch: int
    replacement: int
    start: int  # counts the starts of its agent, from 0
    agent: str  # its name in the configuration
    agent_hash: str  # SHA-256 of its command, code and settings; "": not known
    seed: int
    prompt_partition: int = -1
    prompt_offset: int = -1
    worker: str = ""
    instance: str = ""
    at_ms: int = 0
    client_group: str = ""  # by which a client from outside compares its sessions; "": it is ours
    branches: bool = False  # whether calls beside its main chain are learnt from, too


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCommitted:
    """One model call, written before its answer leaves. The first record of a `call_id` counts."""

    session_id: str
    group_id: str
    call_id: str  # first 16 bytes of SHA-256 over session, request hash and occurrence; hexadecimal
    start: int  # of the agent, as in SessionOpened
    ordinal: int  # of this commit in its session, from 0
    request_hash: str  # SHA-256 of the canonical request, hexadecimal
    occurrence: int  # of this request in one start of the agent, from 0
    parent: str | None  # the call whose prompt and answer this prompt begins with; None: a root
    why_root: str  # why it continues no call that is there; "": none was there, or it has a parent
    prompt_tokens: int  # of the whole prompt
    new_ids: Tensor  # int32 [tokens]: the prompt behind the parent's answer; of a root all of it
    segments: tuple[Segment, ...]  # what was sampled; author "policy"
    finish_reason: str  # "stop", "length" or "tool_calls"
    attempt: int = 0
    dialect: str = ""  # "chat", "responses", "messages"
    request: bytes = b""  # JSON as it came, zstd
    response: bytes = b""  # JSON of the whole answer, zstd
    overruled: str = ""  # JSON object: parameters of the request that the run's took the place of
    constrained: str = ""  # what bent the distribution beyond the log-probs: "grammar"; "": nothing
    is_trained: bool = True  # False: never learnt from, for example an auxiliary call
    # uint8 or uint16 [rows, layers, top_k], of tokens from routed_experts_start of the sequence on
    routed_experts: Tensor | None = None
    routed_experts_start: int = 0
    engine: str = ""
    worker: str = ""
    instance: str = ""
    received_at_ms: int = 0
    finished_at_ms: int = 0
    unheard: bool = False  # its client had hung up when it was written: nobody heard it yet


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReplayed:
    """A request was answered from the log: of a new start, or one whose answer nobody had heard.

    Written before that answer leaves.
    """

    session_id: str
    group_id: str
    start: int
    call_id: str
    at_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailed:
    """A request was refused or failed; nothing was sampled that anybody saw. Never replayed."""

    session_id: str
    group_id: str
    start: int
    request_hash: str
    occurrence: int
    status: int  # of HTTP
    reason: str
    at_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClosed:
    """No call of this session follows; the first record counts."""

    session_id: str
    group_id: str
    sample: int
    start: int
    kind: str  # one of CLOSED_KINDS
    detail: str
    num_calls: int
    opened_at_ms: int = 0  # of the first start
    worker: str = ""
    instance: str = ""
    at_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeReported:
    """An outcome of a session or of one call, reported by a grader, the agent or an operator."""

    session_id: str
    group_id: str
    outcome_id: str  # the first record of an id counts
    kind: str  # REWARD, EXPIRED or a kind of failure
    reward: float  # 0 where the kind is not REWARD
    grader: str  # its name in the configuration; "agent": the session itself
    call_id: str | None = None  # None: of the whole session
    grader_hash: str = ""  # SHA-256 of its code and settings; "": not known
    parts: dict[str, float] = field(default_factory=dict)
    note: str = ""
    supersedes: str | None = None  # an outcome_id that this one takes the place of
    by: str = ""  # worker or person
    at_ms: int = 0
    start: int = -1  # of the agent, whose own word it is; -1: not its own, or not known

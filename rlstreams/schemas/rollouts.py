"""Facts about samples: issued, rolled out, scored."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlstreams.schemas.tensor import Tensor

TRAIN = "train"
EVALUATE = "evaluate"
NO_VERSION = -1  # policy_version of tokens that no policy sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One sample to roll out: the unit of work. A group is `group_size` of them with one id."""

    group_id: str  # dense issue number, or "e{version}-{row}" for an evaluation
    sample: int  # 0 .. group_size - 1
    group_size: int
    purpose: str  # TRAIN or EVALUATE; also the header rlstreams-purpose
    token_ids: Tensor  # int32 [tokens]
    tokenizer_hash: str
    text: str  # what token_ids say, for verifiers and people
    answer: str  # what the verifier compares with
    metadata: str  # JSON object: the free fields of the row
    row: int  # line of the data set, from 0
    dataset_epoch: int
    min_policy_version: int  # no worker starts it under an older version
    seed: int  # with (group_id, sample, attempt) it keys the sampler
    replaces: str | None = None  # the dropped group that this one replaces
    replacement: int = 0  # how many times this row was replaced before
    issued_at_ms: int = 0
    is_chat: bool = False  # token_ids were rendered by a chat template; later turns are too


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Contiguous tokens by one author under one policy version.

    One of the policy may have no tokens: a request that was cut before its first one. It counts for
    nothing: neither its version nor its score is of any token.
    """

    author: str  # "prompt", "policy" or "environment"
    token_ids: Tensor  # int32 [tokens]
    policy_version: int = NO_VERSION
    weight_hash: str = ""
    load_id: str = ""  # the PolicyLoaded under which the engine held that version
    behavior_logprobs: Tensor | None = None  # float32 [tokens], nats; policy segments only
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    finish_reason: str = ""  # "stop", "length", "policy_changed", "abort"; policy segments only


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished rollout of one sample. The first record of a sample by offset wins."""

    group_id: str
    sample: int
    attempt: int  # local retries in the worker; not part of identity
    group_size: int
    purpose: str
    row: int
    dataset_epoch: int
    replacement: int
    # A prompt behind other authors begins a row of its own: a further branch of a session, which
    # the model reads from there on alone. It holds what other rows have, too.
    segments: tuple[Segment, ...]
    reward: float
    reward_parts: dict[str, float] = field(default_factory=dict)
    # uint8 or uint16 [tokens - 1, layers, top_k]; the last token of a row is never forwarded
    routed_experts: Tensor | None = None
    routed_experts_mask: Tensor | None = None  # uint8 [tokens - 1], 1 = recorded; None = all are
    engine: str = ""  # name and version of the engine that sampled it
    worker: str = ""
    instance: str = ""
    prompt_partition: int = -1
    prompt_offset: int = -1
    started_at_ms: int = 0
    finished_at_ms: int = 0
    reward_note: str = ""  # why it earned that, in words: of a reward function or a judge
    # Digest of the settings, code and templates that answered and judged it; "": not recorded.
    judged_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentScore:
    """Log-probs of one policy segment under a named version, all of the segment's length."""

    segment: int  # index into Trajectory.segments
    anchor: str  # "sampled": the version that sampled it; "nearby": at most two away; "behavior"
    policy_version: int
    proximal_logprobs: Tensor  # float32 [tokens], nats
    weight_hash: str = ""
    load_id: str = ""
    entropy: Tensor | None = None  # float32 [tokens], nats; None for anchor "behavior"
    reference_logprobs: Tensor | None = None  # float32 [tokens], nats; None: not asked for
    reference_hash: str = ""  # of the reference's weights
    # int32 [tokens, k]: the reference's likeliest tokens, in falling order; None: not asked for
    reference_top_ids: Tensor | None = None
    reference_top_logprobs: Tensor | None = None  # float32 [tokens, k], nats


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """A trajectory with its scores: all that the trainer needs."""

    trajectory: Trajectory
    scores: tuple[SegmentScore, ...]  # one per policy segment, in order
    worker: str = ""
    instance: str = ""
    trajectory_partition: int = -1
    trajectory_offset: int = -1
    scored_at_ms: int = 0
    # The samples scored together, and their order: padding and batch decide the last bit.
    window: int = -1  # counted by the instance; -1: not recorded
    window_place: int = -1  # in the window, from 0
    window_size: int = -1  # records of the window
    # Scored along the recorded experts of each token (routed_experts), not the live router's.
    routing_replayed: bool = False

"""Facts about training: claims of trainers, steps with their samples, dropped groups."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedGroups:
    """The set of closed training groups: every number below `watermark`, and `above`."""

    watermark: int
    above: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPosition:
    """Everything below `offset` of this partition is done with."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRef:
    """One trained sample: its identity, and where its bytes lie."""

    group_id: str
    sample: int
    partition: int  # of scored-trajectories
    offset: int
    oldest_policy_version: int  # of its unmasked policy segments
    num_tokens: int  # prompt included
    reward: float
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSegment:
    """A segment not trained on, too stale or cut; its sample is in the batch without it."""

    group_id: str
    sample: int
    segment: int
    staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentSample:
    """A sample of a trained group that is not in the batch, and why."""

    group_id: str
    sample: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group that closed without being trained."""

    group_id: str
    # "stale", "dead_samples", "incomplete", "expired", "numerics", "memory", "no_signal",
    # "truncated", "mixed_code"
    reason: str
    permanent: bool  # True: do not replace
    staleness: int
    row: int
    dataset_epoch: int
    replacement: int
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOverCheckpoint:
    """A checkpoint that a restarted trainer did not start from, and why."""

    checkpoint: str  # its folder: epoch-step
    reason: str  # damaged, of another run, not what the ledger committed, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStarted:
    """A trainer's claim: from here on events of lower epochs are void. Holds its configuration."""

    run: str
    epoch: int
    instance: str
    next_step: int
    step_target: int
    policy_version: int  # newest version that it holds
    weight_hash: str
    cluster_id: str
    topic_ids: dict[str, str]
    partitions: dict[str, int]
    config: str  # JSON, resolved, without secrets
    hashes: dict[str, str]  # data set, tokenizer, model folder, files of user code
    versions: dict[str, str]  # this code and the libraries that numerics depend on
    started_at_ms: int
    host: str = ""  # name of the machine or container; empty: of a release without this field
    # Source text of the user's loss, advantage and optimizer by `FIELD: PATH`, as in `hashes`: a
    # redo runs it.
    code: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCompleted:
    """Step n is done when this is committed; `policy_version` follows from it alone."""

    run: str
    epoch: int
    instance: str
    step: int
    policy_version: int  # the version that this step made
    weight_hash: str
    previous_hash: str  # of the weights that the step started from
    samples: tuple[SampleRef, ...]  # in batch order
    micro_batches: tuple[int, ...]  # samples in each, in `order`; sums to len(samples), see `rows`
    batch_hash: str  # SHA-256 over the records' bytes in batch order
    closed: ClosedGroups
    positions: tuple[PartitionPosition, ...]
    loss: float
    masked: tuple[MaskedSegment, ...] = ()
    absent: tuple[AbsentSample, ...] = ()
    rng: bytes = b""
    metrics: dict[str, float] = field(default_factory=dict)
    staleness: dict[str, int] = field(default_factory=dict)  # trained tokens by staleness
    anchors: dict[str, int] = field(default_factory=dict)  # trained tokens by anchor
    started_at_ms: int = 0
    finished_at_ms: int = 0
    order: tuple[int, ...] = ()  # places in `samples` as micro-batches take them; (): as they are
    # Tokens of each micro-batch's bin, where samples lie one behind another; (): padded rows.
    bins: tuple[int, ...] = ()
    value_head_hash: str = ""  # of a critic's, which no version has; "": there is none
    judged_by: dict[str, int] = field(default_factory=dict)  # samples by `Trajectory.judged_by`
    # Rows of each sample, in batch order, which `micro_batches` and `order` count; (): one each.
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsDropped:
    """Groups closed between steps."""

    run: str
    epoch: int
    instance: str
    groups: tuple[DroppedGroup, ...]
    closed: ClosedGroups
    dropped_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerHeartbeat:
    """The owner of the newest epoch lives. Written every two seconds, in a transaction."""

    run: str
    epoch: int
    instance: str
    state: str  # "redo", "waiting", "training", "draining", "done"
    next_step: int
    detail: str
    at_ms: int
    claim_offset: int = -1  # offset in `steps` of the claim of its epoch; -1: not recorded
    # Offsets in `steps` of events under its epoch that this trainer did not write.
    disowned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RedoDrifted:
    """A redone step gave other weights than recorded; the result has a new number."""

    run: str
    epoch: int
    instance: str
    step: int
    policy_version: int
    expected_hash: str
    actual_hash: str
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsRedone:
    """A restarted trainer executed these steps again from the log and compared their hashes."""

    run: str
    epoch: int
    instance: str
    first_step: int
    last_step: int  # first_step - 1: there were none, but a checkpoint was passed over
    num_equal: int  # steps whose weights have the recorded hash
    seconds: float
    at_ms: int
    passed_over: tuple[PassedOverCheckpoint, ...] = ()  # newer than the one it started from


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """A group that the parent of a branch had issued and not closed; the branch issues it anew."""

    group_id: str
    row: int
    dataset_epoch: int
    replaces: str | None
    replacement: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBranched:
    """The first record of a branch's `steps`: it goes on from where another run was behind a step.

    All that the branch needs of its parent is in here and in the checkpoint of this step.
    """

    run: str
    parent: str  # id of that run
    parent_place: str  # its folder, or a recording, as it was read
    step: int  # the branch's own steps begin behind it
    policy_version: int
    weight_hash: str
    value_head_hash: str  # of a critic's; "": there is none, or it is not in the log
    batch_hash: str  # of that step
    cluster_id: str  # the parent's, as the next two
    topic_ids: dict[str, str]
    positions: tuple[PartitionPosition, ...]  # behind that step, of `steps` and what it names
    config: str  # of the parent's claim in force: JSON, resolved, without secrets
    hashes: dict[str, str]  # likewise: data set, tokenizer, model folder, files of user code
    versions: dict[str, str]  # likewise: code and libraries
    closed: ClosedGroups  # in the parent: the branch issues and trains none of them
    next_group: int  # the first number that the parent had not reached
    next_position: int  # in the training order, of that group
    open: tuple[OpenGroup, ...]
    dropped: tuple[DroppedGroup, ...]  # in the parent, and not replaced by a group that it reached
    branched_at_ms: int

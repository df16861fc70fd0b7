"""Hashes and versions that a claim carries, and whether a run may be resumed under new ones."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlstreams.schemas.events import RunBranched, TrainerStarted
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus, existing
from rlstreams.streams.log.codec import now_ms
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import POLICY_VERSIONS, STEPS, TOPICS
from rlstreams.workers.config.load import resolved_json
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.dataset.identity import data_hashes
from rlstreams.workers.loop.agreement import (
    REFERENCE,
    WEIGHTS,
    code_digests,
    other_files_text,
    own_code,
    reference_digest,
    shape_hash,
    tokenizer_hash,
    user_code_hashes,
    weights_digest,
)
from rlstreams.workers.loop.claims import claimed_config
from rlstreams.workers.loop.compared import AGAIN
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.host import commit, host_name, library_versions
from rlstreams.workers.trainer.training.checkpoint import BASE_EPOCH, CheckpointStore
from rlstreams.workers.trainer.witnesses import check_tail

if TYPE_CHECKING:
    from rlstreams.workers.model.model import Numerics

_SAME = ("train", "tokenizer", "model")
_RECREATED = (
    "it was made anew, and recorded positions would name other records in it: begin another run.id"
)
_REPARTITIONED = (
    "keys lie elsewhere since then: partitions of a run never change, begin another run.id"
)


def make_claim(
    context: Context, bus: Bus, ledger: Ledger, model_hash: str, versions: Mapping[str, str]
) -> TrainerStarted:
    """The claim on the epoch after the ledger's.

    Raises:
        ConfigError: the run was begun with another data set, seed, model or topic table; or its
            ledger, or the end of it, is gone while records that followed from it are there.
    """
    config = context.config
    if ledger.claim is None:
        _check_fresh(context, bus, ledger)
    before = _before(ledger)
    is_ours = before is not None and _is_of_this_start(context, before)
    code = _code(context, before if is_ours else None)
    names = [topic.name for topic in existing(bus, TOPICS)]
    event = TrainerStarted(
        run=config.run.id,
        epoch=ledger.epoch + 1,
        instance=context.instance,
        next_step=ledger.last_step + 1,
        step_target=config.trainer.steps,
        policy_version=max(0, ledger.policy_version),
        weight_hash=ledger.weight_hash or model_hash,
        cluster_id=bus.cluster_id(),
        topic_ids=dict(bus.topic_ids(names)),
        partitions={name: bus.partitions(name) for name in names},
        config=resolved_json(config),
        hashes=hashes_of(config, code) | {"model": model_hash},
        versions=dict(versions),
        started_at_ms=now_ms(),
        host=host_name(),
        code=code,
    )
    if before is not None:
        check_same_run(before, event)
        if is_ours:
            _check_files(context, before, event)
        check_tail(bus, ledger, config.run.id, context.folder)
    elif ledger.branch is not None:
        check_branch(ledger.branch, config, event.hashes)
    return event


def _before(ledger: Ledger) -> TrainerStarted | None:
    """The claim that the next one is compared with; None: the run begins.

    Not simply the newest: a forged one made no step, and its content is arbitrary.
    """
    if ledger.claim is None:
        return None
    made = {fact.epoch for fact in ledger.steps.values()} | {min(ledger.claims)}
    return ledger.claims[max(made)]


def _is_of_this_start(context: Context, before: TrainerStarted) -> bool:
    """Whether a claim is of a trainer of the same supervisor."""
    return context.claims_after is not None and before.epoch > context.claims_after


def _code(context: Context, before: TrainerStarted | None) -> dict[str, str]:
    """Source of the user's functions that train: as they are at a start of the run, and as they
    were then when its supervisor starts its trainer again, though they were edited.

    Args:
        before: the claim of that start; None: this is the first.

    Raises:
        ConfigError: there is no such file, or one that cannot be recorded.
    """
    if before is None or not before.code:
        return own_code(context.config)
    try:
        now = code_digests(own_code(context.config))
    except ConfigError as err:
        context.log.warning("changed_code", what=f"{err}; the trainer goes on with the recorded")
    else:
        if found := other_files_text(now, code_digests(before.code)):
            context.log.warning(
                "changed_code",
                what=f"{found}: the trainer goes on with that of its claim, a start of the run "
                "with --resume takes what is here",
            )
    return dict(before.code)


def check_same_run(before: TrainerStarted, now: TrainerStarted) -> None:
    """Refuse a claim that would put two runs into one ledger.

    Raises:
        ConfigError: names the difference, with both values.
    """
    for name, was, is_ in _fixed(before, claimed_config(now), now.hashes):
        _refuse(now.run, name, was, is_, "give the new one another run.id")
    for topic in sorted(before.topic_ids):
        was_id, is_id = before.topic_ids[topic], now.topic_ids.get(topic)
        _refuse(now.run, f"the id of topic {topic}", was_id, is_id, _RECREATED)
        num, is_num = before.partitions[topic], now.partitions.get(topic)
        _refuse(now.run, f"the number of partitions of {topic}", num, is_num, _REPARTITIONED)


def check_branch(branch: RunBranched, config: RunConfig, hashes: Mapping[str, str]) -> None:
    """Refuse a branch that would not continue its parent's work; see `check_same_run`.

    Args:
        hashes: of the files that `config` names, and of its model.

    Raises:
        ConfigError: names the difference, with both values.
    """
    for name, was, is_ in _fixed(branch, config, hashes):
        if was != is_:
            raise ConfigError(
                f"run {branch.run!r} cannot go on from step {branch.step} of {branch.parent!r}: "
                f"{name} was {was} and is {is_}; leave it as it was, or begin a run from the model "
                "folder"
            )


def _fixed(
    before: TrainerStarted | RunBranched, new: RunConfig, hashes: Mapping[str, str]
) -> list[tuple[str, object, object]]:
    """Facts that may not change while a run goes on: name, value before, value now."""
    old = claimed_config(before)
    pairs: list[tuple[str, object, object]] = [
        ("model.dtype", old.model.dtype, new.model.dtype)  # another dtype makes another model
    ]
    pairs += [(f"hash of the {key}", before.hashes.get(key), hashes.get(key)) for key in _SAME]
    pairs += [("run.seed", old.run.seed, new.run.seed)]
    pairs += [("prompts.group_size", old.prompts.group_size, new.prompts.group_size)]
    pairs += [("trainer.lora", old.trainer.lora, new.trainer.lora)]
    if old.trainer.loss.why_compared and new.trainer.loss.why_compared:  # one run, one reference
        pairs += [("logprob.reference", old.logprob.reference, new.logprob.reference)]
        was, is_ = (own.get(REFERENCE) for own in (before.hashes, hashes))
        if was and is_:  # neither is of an older release, or of a host without the folder
            pairs += [("digest of logprob.reference", was, is_)]
    was_by, is_by = old.trainer.loss.advantage, new.trainer.loss.advantage
    if "gae" in (was_by, is_by):  # only one of two checkpoints has a critic
        pairs += [("trainer.loss.advantage", was_by, is_by)]
    return pairs


def _check_files(context: Context, before: TrainerStarted, now: TrainerStarted) -> None:
    """Check that a trainer started again by its supervisor has the files of its predecessor's
    claim.

    Raises:
        ConfigError: they were edited meanwhile, and the run refuses that: names each.
    """
    if not (found := other_files_text(now.hashes, before.hashes)):
        return
    if context.config.run.on_changed_code == "refuse":
        raise ConfigError(
            f"{context.worker}, and the trainer of epoch {before.epoch} before it, do not run the "
            f"same: {found}; {AGAIN}"
        )
    context.log.warning("changed_code", what=found)


def _refuse(run: str, name: str, was: object, is_: object, advice: str) -> None:
    if was != is_:
        raise ConfigError(f"run {run!r} cannot be resumed: {name} was {was} and is {is_}; {advice}")


def _check_fresh(context: Context, bus: Bus, ledger: Ledger) -> None:
    """Check that an empty ledger means a new run: no version is published before the first claim,
    and only a branch begins with a checkpoint."""
    run, store = context.config.run.id, CheckpointStore(context.folder / "checkpoints")
    bases = (m for m in store.manifests() if m.run == run and m.epoch == BASE_EPOCH)
    based = next(bases, None)
    if based is not None and ledger.branch is None:
        raise ConfigError(
            f"run {run!r} cannot begin: checkpoint {based.name} in its folder is what a branch "
            f"begins with, but {STEPS.name} does not say of which run. The branch was not finished "
            "or its topics are gone: branch again under another name, or remove the checkpoint"
        )
    if not any(bus.ends(POLICY_VERSIONS.name).values()):
        return
    raise ConfigError(
        f"run {context.config.run.id!r} cannot be resumed: {STEPS.name} holds no claim, but "
        f"{POLICY_VERSIONS.name} holds records that only follow one. {STEPS.name} was made anew or "
        "emptied, so the trained samples are unknown; begin another run.id"
    )


def hashes_of(config: RunConfig, code: Mapping[str, str] | None = None) -> dict[str, str]:
    """Hashes of data, tokenizer, the model's shape, weights and user code, as a claim has them.

    Args:
        code: source of the user's functions that train; None: as it is on this host.
    """
    path = config.model.path
    of_model = {
        "tokenizer": tokenizer_hash(path),
        "shape": shape_hash(path),
        WEIGHTS: weights_digest(path, config.model.dtype),
        REFERENCE: reference_digest(config),
    }
    of_files = data_hashes(config.data) | user_code_hashes(config)
    of_files |= code_digests(own_code(config) if code is None else code)
    return of_files | {name: digest for name, digest in of_model.items() if digest}


def versions(numerics: Numerics) -> dict[str, str]:
    """Versions that the last bit of a step may depend on, for the claim."""
    found = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_capability": numerics.cpu_capability,
        "threads": str(numerics.threads),
        "attention": numerics.attention,
        "experts": numerics.experts,
    }
    if numerics.device != "cpu":  # a claim without it is of a CPU
        found["device"] = numerics.device
        found["gradients"] = "in one order" if numerics.in_one_order else "in any order"
        found["layers"] = "as they are"
    if numerics.compiled:
        found["layers"] = f"compiled by triton {importlib.metadata.version('triton')}"
    if numerics.ranks > 1:  # a claim without it is of one rank
        found["ranks"] = str(numerics.ranks)
    if numerics.backend:
        found["backend"] = numerics.backend
    return found | library_versions() | ({"commit": commit()} if commit() else {})

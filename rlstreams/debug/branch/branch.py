"""Makes a branch: a run that begins with the state that another run had behind a step.

No record is copied. The branch's `steps` begin with a `RunBranched`, which holds the parent's
positions, and its folder with a checkpoint of that step: loaded from the parent's, or reached by
exact redo. Its trainer restores the checkpoint as after a kill, and its `prompts` go on from the
parent's positions. From then on it needs nothing of its parent.

The checkpoint is written first, and the configuration that makes the folder a run's last: a crash
in between leaves no run that would begin anew under the branch's name.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rlstreams.debug.replay.fresh import configure, fresh_topics, refuse_others_folder
from rlstreams.debug.rerun.rebuilt import Rebuilt, RerunError, check_step, reached
from rlstreams.debug.rerun.rerun import set_pairs
from rlstreams.schemas.events import DroppedGroup, PartitionPosition, RunBranched
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus, existing
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.errors import ConfigError, OffsetGoneError
from rlstreams.streams.log.text import counted
from rlstreams.streams.log.topics import STEPS, TOPICS
from rlstreams.streams.run.places import CONFIG_FILE
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.layers import override_layer, tree_layer
from rlstreams.workers.config.load import merged, resolved_json, tree_to_change
from rlstreams.workers.config.operation import BrokerSection
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.dataset.open import open_problems, prompt_encoder
from rlstreams.workers.loop.agreement import other_files_text
from rlstreams.workers.loop.claims import claimed_config
from rlstreams.workers.model.folder import max_tokens_of, read_config
from rlstreams.workers.prompts.handover import Handover, handover
from rlstreams.workers.trainer.claim import read_ledger, read_ledger_at
from rlstreams.workers.trainer.facts import check_branch, hashes_of
from rlstreams.workers.trainer.family import branch_line
from rlstreams.workers.trainer.redo.redo import read_completed
from rlstreams.workers.trainer.redo.retention import RetentionError
from rlstreams.workers.trainer.training.checkpoint import (
    BASE_EPOCH,
    CheckpointStore,
    Manifest,
    objection,
)
from rlstreams.workers.weights.layout import weight_hash

_NAMED = {"run.id": "--as NAME", "run.dir": "--dir DIR"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPlace:
    """Places of the parent and of its checkpoints, and the branch's id and folder."""

    parent: str  # folder of the run or the recording
    checkpoints: Sequence[Path]
    run_id: str = ""  # empty: the parent's id and the step
    folder: str = ""  # empty: runs/RUN_ID
    is_recording: bool = False  # True: the branch does not use the recorded broker


@dataclass(frozen=True, slots=True, kw_only=True)
class Branched:
    """A new branch, and the origin of its base."""

    event: RunBranched
    config: RunConfig
    started_from: str  # a checkpoint, or the model folder
    num_redone: int  # steps done again between it and the base
    environment: str  # versions that differ from those that made the step; "": none
    files: str  # user code that differs; "": none

    def lines(self) -> list[str]:
        """Return lines for the terminal."""
        folder, again = Path(self.config.folder), ""
        if self.num_redone:
            again = f", {counted(self.num_redone, 'step')} done again, with the recorded hash"
        found = [
            f"run {self.config.run.id}, folder {folder}: "
            f"{branch_line(self.event, resolved_json(self.config))}",
            f"its base is from {self.started_from}{again}; no record was copied, and it needs "
            "nothing of its parent any more",
        ]
        if self.environment:
            found.append(
                f"since step {self.event.step} {self.environment}: the base has the parent's bits, "
                "the branch's own steps may not be what the parent would have made"
            )
        found += [f"changed files: {self.files}"] if self.files else []
        return [*found, f"go on: rlstreams up {shlex.quote(str(folder))}"]


def branch_config(
    recorded: RunConfig, place: BranchPlace, step: int, settings: Sequence[str]
) -> RunConfig:
    """Return the parent's configuration at that step, for the branch.

    Raises:
        ConfigError: an unknown or impossible setting, one of the run's own names, or no step left.
    """
    name = place.run_id or f"{recorded.run.id}-at-{step}"
    broker = BrokerSection() if place.is_recording else replace(recorded.broker, port=0)
    own = replace(
        recorded,
        run=replace(recorded.run, id=name, dir=place.folder or "runs/{id}"),
        broker=broker,
        demo=replace(recorded.demo, kills=()),
    )
    set_here = dict(set_pairs(settings))
    left = tree_layer(tree_to_change(own, set_here), "the parent's configuration")
    for field, instead in _NAMED.items():
        if field in set_here:
            raise ConfigError(f"--set {field}: name it with {instead}")
    config = merged([left, *(override_layer(*pair) for pair in set_here.items())]).config
    if config.trainer.steps <= step:
        raise ConfigError(
            f"trainer.steps is {config.trainer.steps}, so a branch at step {step} has no step to "
            f"make: --set trainer.steps=N, with N above {step}"
        )
    return config


def branch(
    bus: Bus,
    place: BranchPlace,
    step: int,
    settings: Sequence[str],
    *,
    topics: Callable[[RunConfig], AbstractContextManager[Bus]] = fresh_topics,
) -> Branched:
    """Make a run that goes on from step `step` of the one that `bus` is bound to.

    Args:
        topics: opens the branch's topics, which must be empty.

    Raises:
        ConfigError: no such step, none that can be reached, a setting that cannot change, or a name
            or folder in use; nothing was written.
        BrokerError: the branch's broker cannot be reached or started.
    """
    ledger = read_ledger(bus, "branch")
    _check_place(ledger, step)
    claim = ledger.claims[ledger.steps[step].epoch]
    config = branch_config(claimed_config(claim), place, step, settings)
    refuse_others_folder(config)
    if (Path(config.folder) / CONFIG_FILE).exists():
        raise ConfigError(
            f"run.id {config.run.id!r} is in use: {config.folder} is the folder of a run; name "
            "another one with --as NAME"
        )
    with _reached(bus, ledger, config, step, place.checkpoints) as found:
        event = _event(bus, ledger, config, place, step)
        hashes = hashes_of(config) | {"model": found.training.model_hash}
        check_branch(event, config, hashes)
        _check_value_head(event, found)
        with topics(config) as fresh:
            manifest = Manifest(
                run=config.run.id,
                epoch=BASE_EPOCH,
                step=step,
                policy_version=event.policy_version,
                weight_hash=found.training.weight_hash,
            )
            store = CheckpointStore(Path(config.folder) / "checkpoints")
            found.training.save(store, manifest)
            with fresh.producer("branch") as producer:
                producer.commit([outgoing(STEPS, event)])
            configure(config)
        return Branched(
            event=event,
            config=config,
            started_from=found.started_from,
            num_redone=found.num_redone,
            environment=found.environment(step),
            files=other_files_text(hashes, claim.hashes),
        )


def _check_place(ledger: Ledger, step: int) -> None:
    """Check that the step left weights. Raises RerunError: no such step, or a void one."""
    check_step(ledger, step)
    if ledger.is_disowned(step):
        raise RerunError(
            f"step {step} is void: somebody else wrote it, and its trainer never made its weights; "
            f"branch at step {step - 1}"
        )


@contextmanager
def _reached(
    bus: Bus, ledger: Ledger, config: RunConfig, step: int, checkpoints: Sequence[Path]
) -> Iterator[Rebuilt]:
    """Open `reached`; an error names the steps at which a branch needs no redo."""
    is_there = False
    try:
        with reached(bus, ledger, config, step, checkpoints) as found:
            is_there = True
            yield found
    except (RerunError, RetentionError, OffsetGoneError) as err:
        if is_there:
            raise
        run = ledger.claims[ledger.steps[step].epoch].run
        stores = [CheckpointStore(folder) for folder in checkpoints]
        saved = {m.step for s in stores for m in s.manifests() if not objection(run, ledger, m)}
        own = sorted(saved - {ledger.begins_behind})
        there = ", ".join(map(str, own)) or "none"
        raise RerunError(
            f"the state behind step {step} cannot be reached: {err}. Steps with a checkpoint, at "
            f"which nothing has to be done again: {there}"
        ) from err


def _event(
    bus: Bus, ledger: Ledger, config: RunConfig, place: BranchPlace, step: int
) -> RunBranched:
    fact, dropped = ledger.steps[step], list[DroppedGroup]()
    claim = ledger.claims[fact.epoch]
    at = read_ledger_at(bus, step, "branch", lambda event, _: dropped.extend(event.groups))
    begun: Handover = handover(bus, at, dropped, config, _num_rows(config))
    recorded = read_completed(bus, fact)
    names = [topic.name for topic in existing(bus, TOPICS)]
    behind = PartitionPosition(topic=STEPS.name, partition=0, offset=fact.position.offset + 1)
    has_drifted = fact.weight_hash != recorded.weight_hash
    return RunBranched(
        run=config.run.id,
        parent=claim.run,
        parent_place=place.parent,
        step=step,
        # A redo that drifted gave the step a second version, which the run went on with.
        policy_version=max(v for v, made_by in ledger.made_by.items() if made_by == step),
        weight_hash=fact.weight_hash,
        value_head_hash="" if has_drifted else recorded.value_head_hash,
        batch_hash=recorded.batch_hash,
        cluster_id=bus.cluster_id(),
        topic_ids=dict(bus.topic_ids(names)),
        positions=(behind, *at.positions),
        config=claim.config,
        hashes=claim.hashes,
        versions=claim.versions,
        closed=at.closed,
        next_group=begun.next_group,
        next_position=begun.next_position,
        open=begun.open,
        dropped=begun.dropped,
        branched_at_ms=now_ms(),
    )


def _num_rows(config: RunConfig) -> int:
    longest = max_tokens_of(read_config(model_folder(config.model.path)))
    return len(open_problems(config.data, prompt_encoder(config), longest).train)


def _check_value_head(event: RunBranched, found: Rebuilt) -> None:
    head = found.training.learner.value_head()
    actual = weight_hash(head) if head else ""
    if event.value_head_hash and actual != event.value_head_hash:
        raise RerunError(
            f"the value head of {found.started_from} has hash {actual[:12]}, the log says "
            f"{event.value_head_hash[:12]}"
        )

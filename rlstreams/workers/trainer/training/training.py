"""The computing half of the trainer: one thread, no log. From samples to weights.

A live step and its redo take the same path from payloads to weights; they differ only in the source
of samples, masks and cut: the planner, or the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rlstreams.schemas.events import MaskedSegment, ScoredTrajectory
from rlstreams.streams.log.crash_points import CrashPoint, reach
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.group_ids import SampleId
from rlstreams.streams.rows import row_counts, scored_rows
from rlstreams.streams.segments import is_sampled, num_tokens
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.loop.dead_letters import Reason
from rlstreams.workers.model.base import CPU
from rlstreams.workers.model.cut import Cut, cut_smaller, unshared
from rlstreams.workers.model.folder import read_config, token_limit, vocab_size_of
from rlstreams.workers.model.model import FLOAT32, configure_torch
from rlstreams.workers.model.one_order import NoOrderError
from rlstreams.workers.model.prefixes import Prefixes
from rlstreams.workers.sandbox.recorded import Code, OwnCodeError, OwnUpdateError, own_functions
from rlstreams.workers.trainer.intake.payloads import Payload, batch_hash
from rlstreams.workers.trainer.intake.validation import check_reference, check_routing
from rlstreams.workers.trainer.learn.advantage import permuted, shaped_rewards
from rlstreams.workers.trainer.learn.cutting import planned_cut, prefixes_of
from rlstreams.workers.trainer.learn.distill import with_teacher
from rlstreams.workers.trainer.learn.out_of_memory import OutOfMemoryError, SampleTooLargeError
from rlstreams.workers.trainer.learn.own import with_token_advantages
from rlstreams.workers.trainer.learn.packing import Batch, pack
from rlstreams.workers.trainer.learn.rewarded import Advantages, RewardedSample, advantages_of
from rlstreams.workers.trainer.learn.step import NumericsError, StepResult
from rlstreams.workers.trainer.training.batch_metrics import batch_metrics
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore, Manifest
from rlstreams.workers.trainer.training.computing import computing_of
from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.host_copies import host_copies
from rlstreams.workers.weights.layout import weight_hash

if TYPE_CHECKING:
    from rlstreams.workers.compute.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Result of one step."""

    loss: float
    metrics: dict[str, float]
    weight_hash: str
    previous_hash: str
    value_head_hash: str  # "": there is none
    batch_hash: str
    batch: Batch
    advantages: Sequence[float]
    seconds: float
    rows: tuple[int, ...] = ()  # as `StepCompleted` has them


@dataclass(frozen=True, slots=True, kw_only=True)
class UntrainableSample:
    """A sample whose numbers or size no step can take."""

    index: int  # in the batch
    reason: Reason
    detail: str


class Training:
    """Model and optimizer at a version."""

    def __init__(
        self,
        folder: Path,
        section: TrainerSection,
        threads: int,
        device: str = CPU,
        dtype: str = FLOAT32,
        team: Team | None = None,
    ) -> None:
        """
        Args:
            device: `cpu`, or `cuda` after `claim_device`.
            dtype: `model.dtype`.
            team: the other ranks; None: there are none.

        Raises:
            ConfigError: a model that cannot be trained so. On any exception the team is closed.
            EngineError: `section.routing_replay`, and the family's routers do not follow routes.
        """
        with ExitStack() as on_error:
            if team is not None:
                on_error.callback(team.close)
            num_ranks = 1 if team is None else team.size
            if num_ranks != section.ranks:
                raise ValueError(f"trainer.ranks is {section.ranks}, but there are {num_ranks}")
            numerics = configure_torch(
                threads, device, fused=True, in_one_order=section.redo != "tolerate"
            )
            config = read_config(folder)
            self.vocab_size, self.max_tokens = vocab_size_of(config), token_limit(config)
            self._section, self.device = section, device
            self._code: Code = {}
            made = computing_of(team, section, numerics, folder, device, dtype)
            self.learner, self.numerics, self.routers = made.learner, made.numerics, made.routers
            self.why_eager, self._cost = made.learner.why_eager, made.cost
            self.model_hash = self.weight_hash = weight_hash(self.learner.weights())
            on_error.pop_all()

    @property
    def slower(self) -> dict[str, str]:
        """Ways in which a GPU computes slower than it could, each with its reason."""
        reasons = {"rows_padded": self.learner.why_padded, "layers_not_compiled": self.why_eager}
        if self._section.shared_prefixes and not self.learner.why_padded:
            reasons["prefixes_not_shared"] = self.learner.why_unshared
        return {w: why for w, why in reasons.items() if why and self.numerics.device != CPU}

    def check(self) -> None:
        """
        Raises:
            FollowerError: another rank has ended or is silent.
        """
        self.learner.check()

    def close(self) -> None:
        """End the other ranks."""
        self.learner.close()

    def configure(self, section: TrainerSection, code: Code | None = None) -> None:
        """Go on under another configuration; a redo takes each step's own.

        Raises:
            ConfigError: it needs a value head, and there is none; or `code` cannot be loaded.
        """
        was = self._section.loss.advantage
        if section.loss.advantage == "gae" and not self.learner.value_head():
            message = f"this trainer began with {was!r} and has no value head"
            raise ConfigError(f"trainer.loss.advantage is 'gae', but {message}")
        own_functions(section, code or {})
        self._section, self._code = section, code or {}
        self.learner.configure(section.optimizer, section.loss, code)

    def train(
        self,
        payloads: Sequence[Payload],
        masked: Sequence[MaskedSegment],
        policy_version: int,
        cut: Cut | None = None,
        left_out: Collection[SampleId] = (),
    ) -> Trained:
        """One optimizer step from `policy_version`.

        Args:
            payloads: in batch order.
            cut: the micro-batches, where the ledger has them.
            left_out: samples (group, number) that are not learnt from, see `pack`; never in a step
                that counts. The advantages are those of all samples.

        If memory does not suffice the batch is cut into smaller micro-batches, which the result
        has.

        Raises:
            NumericsError: loss or gradient is not finite.
            SampleTooLargeError: one sample alone does not fit in memory.
            ValueError: a sample without what the loss needs of the reference; one that was
                scored under another `routing_replay`.
        """
        reach(CrashPoint.FORWARD_BEFORE)
        started_s = time.monotonic()
        samples = [payload.scored for payload in payloads]
        for sample in samples:
            check_reference(sample, self._section.loss)
            check_routing(sample, is_replayed=self._section.routing_replay)
        advantages = self._advantages(samples)
        batch, result = self._step(samples, advantages, masked, policy_version, cut, left_out)
        hashing_s = time.monotonic()
        before, self.weight_hash = self.weight_hash, weight_hash(self.learner.weights())
        ended_s = time.monotonic()
        figures = result.seconds | {"hash_s": ended_s - hashing_s, "train_s": ended_s - started_s}
        pass_s = figures["train_s"] / batch.epochs
        figures |= self._cost.figures(batch.spans, batch.num_loss_tokens, pass_s)
        reach(CrashPoint.FORWARD_AFTER)
        return Trained(
            loss=result.loss,
            metrics=result.metrics | batch_metrics(payloads) | figures,
            weight_hash=self.weight_hash,
            previous_hash=before,
            value_head_hash=weight_hash(head) if (head := self.learner.value_head()) else "",
            batch_hash=batch_hash(payloads),
            batch=batch,
            advantages=[float(a) for a in advantages.of_samples],
            seconds=figures["train_s"],
            rows=row_counts(samples),
        )

    def try_train(
        self, payloads: Sequence[Payload], masked: Sequence[MaskedSegment], policy_version: int
    ) -> Trained | tuple[UntrainableSample, ...]:
        """As `train`; or the samples, in batch order, without which it may work. Deterministic.

        Raises:
            NumericsError: as `train`, and the weights are at fault, or no sample alone is.
            OwnCodeError: of the user's code; names the first sample that gives it by itself.
        """
        try:
            return self.train(payloads, masked, policy_version)
        except SampleTooLargeError as err:
            return (UntrainableSample(index=err.index, reason=Reason.MEMORY, detail=err.detail),)
        except (NumericsError, OwnCodeError) as err:
            if isinstance(err, OwnCodeError if self._section.ranks > 1 else OwnUpdateError):
                raise  # ranks have left each other; or no sample by itself is at fault
            samples = [payload.scored for payload in payloads]
            untrainable = self._untrainable(samples, masked, policy_version)
            if isinstance(err, OwnCodeError):
                raise
            blame(err, samples, untrainable, self.learner.weights())
            return untrainable

    def _untrainable(
        self,
        samples: Sequence[ScoredTrajectory],
        masked: Sequence[MaskedSegment],
        policy_version: int,
    ) -> tuple[UntrainableSample, ...]:
        """Run each sample alone, forward and backward: about as much work as the step."""
        found, advantages = [], self._advantages(samples).of_samples
        for index, (sample, advantage) in enumerate(zip(samples, advantages, strict=True)):
            of_sample = (sample.trajectory.group_id, sample.trajectory.sample)
            own = tuple(m for m in masked if (m.group_id, m.sample) == of_sample)
            if len(own) == sum(is_sampled(segment) for segment in sample.trajectory.segments):
                continue  # nothing of it is learnt from
            rows = scored_rows(sample)
            prefixes = self._prefixes(rows)
            batch = pack(
                rows,
                np.full(len(rows), advantage, np.float32),
                own,
                policy_version=policy_version,
                cut=self._planned(rows, prefixes),
                replay_routes=self._section.routing_replay,
                prefixes=prefixes,
            )
            batch = with_teacher(batch, rows, self._section.loss.distill_top_k)
            try:
                problem, reason = self.learner.probe(batch), Reason.NUMERICS
            except OutOfMemoryError as err:
                problem, reason = err.detail, Reason.MEMORY
            except OwnCodeError as err:
                raise OwnCodeError(f"{err}; so it does for sample {SampleId(*of_sample)}") from err
            if problem:
                found.append(UntrainableSample(index=index, reason=reason, detail=problem))
        return tuple(found)

    def pass_over(self) -> None:
        """Count a step that was skipped: its number is used up, the weights stay."""
        self.learner.pass_over()

    def _advantages(self, samples: Sequence[ScoredTrajectory]) -> Advantages:
        rewards = shaped_rewards(samples, self._section.loss)
        if self._section.control == "permuted":
            rewards = permuted(rewards, self.learner.step_number)
        rewarded = map(RewardedSample.of, (sample.trajectory for sample in samples), rewards)
        with self.learner.named():
            return advantages_of(list(rewarded), self._section.loss, self._code)

    def _step(
        self,
        samples: Sequence[ScoredTrajectory],
        advantages: Advantages,
        masked: Sequence[MaskedSegment],
        policy_version: int,
        cut: Cut | None,
        left_out: Collection[SampleId],
    ) -> tuple[Batch, StepResult]:
        """The step, cut so that it fits in memory."""
        own = [scored_rows(sample) for sample in samples]
        places = [place for place, rows in enumerate(own) for _ in rows]
        samples, of_rows = [row for rows in own for row in rows], advantages.of_samples[places]
        lengths = [num_tokens(sample.trajectory) for sample in samples]
        section, prefixes = self._section, self._prefixes(samples)
        if cut is not None and self.learner.why_padded:
            cut = replace(cut, bins=())  # recorded where documents were taken
        elif cut is not None and cut.bins and prefixes is None:
            cut = unshared(cut, lengths, section.micro_batch_tokens)  # of a step that shared them
        cut = cut or self._planned(samples, prefixes, section.minibatches, section.hands)
        while True:
            batch = pack(
                samples,
                of_rows,
                masked,
                policy_version=policy_version,
                cut=cut,
                replay_routes=section.routing_replay,
                minibatches=section.minibatches,
                epochs=section.batch_epochs,
                left_out=left_out,
                prefixes=prefixes,
            )
            batch = with_teacher(batch, samples, section.loss.distill_top_k)
            batch = with_token_advantages(batch, own, advantages.of_tokens)
            try:
                return batch, self.learner.step(batch)
            except NoOrderError as err:
                raise ConfigError(
                    f'trainer.redo is {section.redo!r}, but {str(err)[:200]}: set it to "tolerate"'
                ) from err
            except OutOfMemoryError as err:
                failed, detail = err.index, err.detail
            cut = cut_smaller(batch.cut, lengths, section.micro_batch_tokens, failed, prefixes)
            if cut == batch.cut:
                raise SampleTooLargeError(places[cut.members[failed][0]], detail)

    def _planned(
        self,
        rows: Sequence[ScoredTrajectory],
        prefixes: Prefixes | None,
        minibatches: int = 1,
        hands: int = 1,
    ) -> Cut:
        """Their micro-batches, of the section's size."""
        return planned_cut(
            [num_tokens(row.trajectory) for row in rows],
            [row.trajectory.group_id for row in rows],
            self._section.micro_batch_tokens,
            minibatches,
            in_bins=not self.learner.why_padded,
            hands=hands,
            prefixes=prefixes,
        )

    def _prefixes(self, samples: Sequence[ScoredTrajectory]) -> Prefixes | None:
        """Prefixes that samples share in a bin; None: they share none."""
        if self.learner.why_unshared or not self._section.shared_prefixes:
            return None
        return prefixes_of(samples, replay_routes=self._section.routing_replay)

    def save(self, store: CheckpointStore, manifest: Manifest) -> None:
        """Write a checkpoint of the present state."""
        store.save(manifest, self.learner.weights(), self.learner.optimizer_tensors())

    def copied(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and optimizer tensors on the host, which later steps leave as they are."""
        return host_copies(self.learner.weights()), host_copies(self.learner.optimizer_tensors())

    def restore(self, store: CheckpointStore, manifest: Manifest) -> None:
        """Go back to a checkpoint.

        Raises:
            WeightError, ValueError: its tensors are not this model's, or have another hash than it
                says; nothing is loaded.
        """
        weights, optimizer = store.load(manifest)
        if (actual := weight_hash(weights)) != manifest.weight_hash:
            raise WeightError(
                f"its weights have hash {actual[:12]}, "
                f"its manifest says {manifest.weight_hash[:12]}"
            )
        self.learner.load(weights, optimizer, manifest.step)
        self.weight_hash = actual


def blame(
    error: NumericsError,
    samples: Sequence[ScoredTrajectory],
    untrainable: Sequence[UntrainableSample],
    weights: Mapping[str, Tensor],
) -> None:
    """Return if dropping the groups of these samples may help.

    Raises:
        NumericsError: it would not: no sample alone is at fault, or the weights are.
    """
    if not untrainable:
        raise NumericsError(
            f"{error}; each sample by itself gives finite numbers: lower trainer.optimizer.lr, or "
            "look at the batch with `rlstreams inspect`"
        ) from error
    broken = [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise NumericsError(
            f"{error}; the weights are at fault: {broken[0]} is not finite"
        ) from error
    groups = {sample.trajectory.group_id for sample in samples}
    blamed = {samples[bad.index].trajectory.group_id for bad in untrainable}
    if len(groups) > 1 and blamed == groups:
        raise NumericsError(
            f"{error}; so does every group of the batch by itself: the weights are at fault, not "
            "a sample"
        ) from error

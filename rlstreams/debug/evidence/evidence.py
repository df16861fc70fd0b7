"""The log's facts about the samples of some steps, checked against each other; no experiment.

Each fact of a sample can be computed again from others: exactly, or up to a known noise. So a fact
that was changed on its way shows beyond doubt: chance cannot explain it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rlstreams.debug.evidence.again import score_again
from rlstreams.debug.evidence.findings import (
    ADVANTAGES,
    RECORDS,
    SCORES,
    TOKENS,
    WEIGHTS,
    Evidence,
    FactCheck,
)
from rlstreams.debug.evidence.rewards import check_rewards
from rlstreams.debug.evidence.tokens import Distance, distances, others
from rlstreams.debug.rejudge.rejudge import advantages_again
from rlstreams.debug.replay.diff import differing
from rlstreams.debug.rerun.rebuilt import Rebuilt, RerunError, check_step
from rlstreams.schemas.binary import encode
from rlstreams.schemas.events import StepCompleted, Trajectory
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.errors import OffsetGoneError
from rlstreams.streams.log.group_ids import SampleId
from rlstreams.streams.log.text import counted
from rlstreams.streams.run.run_log import RunLog
from rlstreams.words.spelling import Spelling
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.claims import claimed_config
from rlstreams.workers.trainer.claim import read_ledger
from rlstreams.workers.trainer.guard import MEAN
from rlstreams.workers.trainer.intake.payloads import Payload
from rlstreams.workers.trainer.learn.rewarded import RewardedSample

CLOSE = 1e-5  # of advantages: another release of NumPy may sum otherwise


def evidence(
    log: RunLog,
    config: RunConfig,
    steps: range,
    *,
    spelled: Spelling,
    redo: bool = False,
    checkpoints: Sequence[Path] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Evidence:
    """Check the samples of these steps.

    Args:
        config: names the present places of model folder and grader.
        redo: also do the steps again, and score their samples under the weights so made.
        checkpoints: folders of checkpoints to choose from, for `redo`.

    Raises:
        RerunError, OffsetGoneError: no such step, or all their records are gone.
        DeadlineError: a partition did not deliver up to its end.
    """
    ledger = read_ledger(log.bus, "evidence")
    numbers = [n for n in sorted(ledger.steps) if n in steps and not ledger.is_disowned(n)]
    if not numbers:
        check_step(ledger, steps.start)
    found = _gathered(log, ledger, numbers, say)
    numbers = [number for number in numbers if number in found.steps]
    means = [step.metrics[MEAN] for step in log.steps() if MEAN in step.metrics]
    _compare_records(log, ledger, found, say)
    hashes = ledger.claims[ledger.steps[numbers[-1]].epoch].hashes if numbers else {}
    rewards = check_rewards(log, config, found.trained, hashes, spelled, say)
    tokens = FactCheck(name=TOKENS)
    _compare_tokens(tokens, found.distances, means, config, found.trained)
    checks = [found.records, rewards, tokens, found.advantages]
    if redo and numbers:
        scores, weights = FactCheck(name=SCORES), FactCheck(name=WEIGHTS)
        apart = score_again(
            log.bus, config, ledger, numbers, weights, scores, checkpoints=checkpoints, say=say
        )
        _compare_tokens(scores, apart, means, config, found.trained)
        checks = [*checks[:3], scores, found.advantages, weights]
    return Evidence(
        first=numbers[0] if numbers else steps.start,
        last=numbers[-1] if numbers else steps.start,
        num_samples=len(found.trained),
        checks=tuple(checks),
    )


def _gathered(
    log: RunLog, ledger: Ledger, numbers: Sequence[int], say: Callable[[str], None]
) -> _Gathered:
    """Gather the facts of these steps; count steps whose records are gone. Raises if all are."""
    found, gone = _Gathered(), list[str]()
    for number in numbers:
        say(f"step {number}: reads its samples")
        try:
            found.add(ledger, *Rebuilt.recorded(log.bus, ledger, number))
        except (RerunError, OffsetGoneError) as err:
            gone.append(str(err))
            if len(gone) == len(numbers):
                raise
    if gone:
        why = f"of {counted(len(gone), 'step')} records are gone, the first: {gone[0]}"
        found.records.unchecked[why] = len(gone)
    return found


class _Gathered:
    """Facts kept of the steps, without their samples, which may be large."""

    def __init__(self) -> None:
        self.steps: set[int] = set()
        self.trained: dict[SampleId, tuple[int, float]] = {}  # step and reward
        self.digests: dict[SampleId, bytes] = {}  # of the sample as it was trained
        self.distances: list[Distance] = []
        self.records = FactCheck(name=RECORDS)
        self.advantages = FactCheck(name=ADVANTAGES)

    def add(self, ledger: Ledger, event: StepCompleted, payloads: Sequence[Payload]) -> None:
        """Add the samples of one step."""
        self.steps.add(event.step)
        samples = [payload.scored for payload in payloads]
        rewarded: dict[SampleId, RewardedSample] = {}
        for ref, scored in zip(event.samples, samples, strict=True):
            name = SampleId.of(ref)
            self.trained[name] = event.step, ref.reward
            self.digests[name] = _digest(scored.trajectory)
            rewarded[name] = RewardedSample.of(scored.trajectory, ref.reward)
            if scored.trajectory.reward != ref.reward:
                message = (
                    f"its record has reward {scored.trajectory.reward:g}, the step {ref.reward:g}"
                )
                self.records.add(event.step, name, message)
        self.distances += distances(samples, event.step)
        claim = ledger.claims[event.epoch]
        again = advantages_again(event, {}, rewarded, claimed_config(claim).trainer, claim.code)
        for name, was, now in zip(again.names, again.was, again.now, strict=True):
            is_close = bool(np.isclose(was, now, rtol=CLOSE, atol=CLOSE))
            message = f"{was:.4g} recorded, its group's rewards give {now:.4g}"
            self.advantages.add(event.step, name, "" if is_close else message)


def _digest(sample: Trajectory) -> bytes:
    return hashlib.sha256(b"".join(encode(sample))).digest()


def _compare_records(
    log: RunLog, ledger: Ledger, found: _Gathered, say: Callable[[str], None]
) -> None:
    """Compare the samples in the sampler's log with those that were trained."""
    say("compares them with what was sampled")
    check, contradicted = found.records, {one.sample for one in found.records.found}
    groups = frozenset(group for group, _ in found.trained)
    others_: dict[SampleId, Trajectory] = {}
    seen = set[SampleId]()
    for record in log.read(Trajectory, groups, skip_unreadable=True):
        name = SampleId.of(record.event)
        if name not in found.trained:
            continue
        seen.add(name)
        if _digest(record.event) != found.digests[name]:
            others_[name] = record.event
        elif name not in contradicted:
            check.num_agreed += 1
    if missing := len(found.trained.keys() - seen):
        check.unchecked["the log does not hold what was sampled"] = missing
    for step in sorted({found.trained[name][0] for name in others_}):
        for payload in Rebuilt.recorded(log.bus, ledger, step)[1]:
            one = payload.scored.trajectory
            name = SampleId.of(one)
            if name in others_ and name not in contradicted:
                check.add(step, name, _difference(others_[name], one))


def _difference(sampled: Trajectory, trained: Trajectory) -> str:
    fields = differing(sampled, trained)
    if not fields:
        return ""
    first, more = fields[0], len(fields) - 1
    also = f", and {more} more" if more else ""
    return f"{first.path} was {first.one} when sampled, {first.other} when trained{also}"


def _compare_tokens(
    check: FactCheck,
    apart: Sequence[Distance],
    means: Sequence[float],
    config: RunConfig,
    trained: dict[SampleId, tuple[int, float]],
) -> None:
    """Add the samples whose log-probs are further apart than noise."""
    bad, check.note = others(apart, means, config.guard.factor)
    for one, border in bad:
        message = f"{one.mean:.2g} nats a token apart, at most {border:.2g} is noise"
        check.add(one.step, one.name, message)
    check.num_agreed += len(apart) - len(bad)
    known = len(apart) + check.unchecked.total()
    if left := len(trained) - known:
        check.unchecked["no score under the version that sampled them"] += left

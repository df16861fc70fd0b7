"""Steps done again, and their samples scored again under the weights that sampled them.

The weights alone decide what was sampled: this check finds a difference even where the log's own
numbers were changed together. It costs the steps again, and a forward of each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlstreams.debug.evidence.findings import FactCheck
from rlstreams.debug.evidence.tokens import Distance, distances
from rlstreams.debug.rerun.rebuilt import Rebuilt, UnequalError, rebuilt
from rlstreams.schemas.events import NO_VERSION, ScoredTrajectory, Trajectory
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import ConfigError, OffsetGoneError
from rlstreams.streams.segments import is_sampled
from rlstreams.streams.tokens import SAMPLED
from rlstreams.workers.bootstrap.parts import close_scorers, make_scorers
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.engines.base import Scorer
from rlstreams.workers.engines.folder_channel import HeldWeights
from rlstreams.workers.logprob.scoring import score_window
from rlstreams.workers.logprob.versions import Anchor
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.trainer.redo.retention import RetentionError
from rlstreams.workers.weights.channel import WeightError

AT_ONCE = 128  # samples that are scored together


def score_again(
    bus: Bus,
    config: RunConfig,
    ledger: Ledger,
    steps: Sequence[int],
    weights: FactCheck,
    scores: FactCheck,
    *,
    checkpoints: Sequence[Path],
    say: Callable[[str], None],
) -> list[Distance]:
    """Do these steps again, compare their weights, and score their samples.

    Args:
        steps: in order, each in the ledger.
        weights: gets the result of each step.
        scores: gets the reasons for which samples were not scored.

    Returns:
        Distances of sampler and scorer now, by sample.
    """
    found: list[Distance] = []
    oldest = _oldest_step(bus, ledger, steps[0])
    done = oldest
    try:
        with (
            _scorer(config) as scorer,  # the engine first: see `bisect`
            rebuilt(bus, config, oldest + 1, steps[-1], checkpoints=checkpoints) as before,
        ):
            before.go_to(oldest)
            again = _Again(before, scorer, config.trainer.max_staleness + 2)
            for step in range(oldest + 1, steps[-1] + 1):
                if step in steps:
                    say(f"step {step}: scores its samples again, and does it again")
                    found += again.distances(step, scores)
                done = step
                again.make(step)
                weights.add(step, None, "")
    except UnequalError as err:
        if err.environment:
            weights.unchecked[str(err)] += 1
        else:
            weights.add(done, None, str(err))
    except (ConfigError, EngineError, WeightError, RetentionError, OffsetGoneError) as err:
        weights.unchecked[str(err)] += 1
    if missing := [step for step in steps if step > done]:
        scores.unchecked["the steps before theirs could not be done again"] += sum(
            len(Rebuilt.recorded(bus, ledger, step)[1]) for step in missing
        )
    return found


@contextmanager
def _scorer(config: RunConfig) -> Iterator[Scorer]:
    scorer, reference = make_scorers(config)
    try:
        yield scorer
    finally:
        close_scorers(scorer, reference)


def _first_version(sample: Trajectory) -> int:
    """Return the version that sampled its first token; others are not compared."""
    own = filter(is_sampled, sample.segments)
    return next((segment.policy_version for segment in own), NO_VERSION)


def _oldest_step(bus: Bus, ledger: Ledger, step: int) -> int:
    """Return the step that made the oldest version which sampled for `step`."""
    payloads = Rebuilt.recorded(bus, ledger, step)[1]
    versions = [_first_version(payload.scored.trajectory) for payload in payloads]
    oldest = min((v for v in versions if v != NO_VERSION), default=NO_VERSION)
    return min(ledger.made_by.get(oldest, ledger.begins_behind), step - 1)


class _Again:
    """Weights that move on step by step, and a scorer that holds their last `keep` versions."""

    def __init__(self, before: Rebuilt, scorer: Scorer, keep: int) -> None:
        self._before, self._scorer, self._keep = before, scorer, keep
        self._pull()

    def make(self, step: int) -> None:
        """Do a step again, and pull its version. Raises as `Rebuilt.go_to`."""
        self._before.go_to(step)
        self._pull()

    def _pull(self) -> None:
        step, ledger = self._before.training.learner.step_number, self._before.ledger
        made = [version for version, by in ledger.made_by.items() if by == step]
        version = max(made, default=ledger.branch.policy_version if ledger.branch else 0)
        source = HeldWeights(
            dict(sorted(self._before.training.learner.weights().items())), "policy", version
        )
        while len(self._scorer.versions) >= self._keep:
            self._scorer.drop(self._scorer.versions[0])
        if version not in self._scorer.versions:
            self._scorer.pull(source.published, source)

    def distances(self, step: int, scores: FactCheck) -> list[Distance]:
        """Return the distances of the step's samples; count those not comparable in `scores`."""
        samples = [p.scored.trajectory for p in self._before.read(step)[1]]
        held = set(self._scorer.versions)
        known = [one for one in samples if _first_version(one) in held]
        if left := len(samples) - len(known):
            scores.unchecked["the weights that sampled them were not made on the way"] += left
        routed = self._before.section(step).routing_replay
        return [
            distance
            for at in range(0, len(known), AT_ONCE)
            for distance in distances(self._scored(known[at : at + AT_ONCE], routed), step)
        ]

    def _scored(self, samples: Sequence[Trajectory], routed: bool) -> list[ScoredTrajectory]:
        unasked = Anchor(label="behavior", policy_version=NO_VERSION)
        found = []
        for version in sorted({_first_version(one) for one in samples}):
            own = [one for one in samples if _first_version(one) == version]
            anchors = {s.policy_version: unasked for one in own for s in one.segments}
            anchors[version] = Anchor(label=SAMPLED, policy_version=version)
            scored = score_window(own, anchors, {}, self._scorer, replay_routes=routed)
            found += [ScoredTrajectory(trajectory=t, scores=s)
                      for t, s in zip(own, scored, strict=True)]  # fmt: skip
        return found

"""Scorer without a model: behavior log-probs stand in for all that it is asked for.

With `logprob.place` "trainer" or "off" the stage stays, with its topics, checks and dead letters,
so the log of a run says the same in each place (decision 0006).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.engines.base import Scores, TokenSequence
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.folder import read_config, token_limit, vocab_size_of
from rlstreams.workers.weights.channel import Pulled, WeightChannel, WeightError


class PassingScorer:
    """A `Scorer` that holds no version, so no window is ever scored."""

    def __init__(self, folder: Path) -> None:
        config = read_config(folder)
        self.vocab_size, self.max_tokens = vocab_size_of(config), token_limit(config)

    @property
    def versions(self) -> Sequence[int]:
        """None."""
        return ()

    def pull(self, published: PolicyPublished, channel: WeightChannel) -> Pulled:
        """
        Raises:
            WeightError: always.
        """
        raise WeightError(f"version {published.policy_version}: no version is held here")

    def drop(self, policy_version: int) -> None:
        """There is nothing to drop."""

    def off_load(self) -> None:
        """There is no memory to give up."""

    def load_back(self) -> None:
        """Likewise."""

    def score(
        self, sequences: Sequence[TokenSequence], policy_version: int, temperature: float
    ) -> Sequence[Scores]:
        """
        Raises:
            EngineError: always.
        """
        raise EngineError(f"policy version {policy_version} is not held, for nothing is scored")

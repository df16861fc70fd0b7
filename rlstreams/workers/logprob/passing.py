"""Scorer without a model: behavior log-probs stand in for those of each policy.

With `logprob.place` "trainer" or "off" the stage stays, with its topics, checks and dead letters,
so the log of a run says the same in each place (decision 0006). A reference has a scorer of its
own beside this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.folder import read_config, token_limit, vocab_size_of


class PassingScorer:
    """A `Scorer` that holds no version, so no window is ever scored and nothing pulled."""

    versions: Sequence[int] = ()

    def __init__(self, folder: Path) -> None:
        config = read_config(folder)
        self.vocab_size, self.max_tokens = vocab_size_of(config), token_limit(config)

    def score(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        """
        Raises:
            EngineError: always; so do the other calls of a scorer, which nobody makes.
        """
        raise EngineError("nothing is scored here: logprob.place is not 'separate'")

    pull = drop = score

    def off_load(self) -> None:
        """Do nothing: it has nothing on a device."""

    load_back = off_load

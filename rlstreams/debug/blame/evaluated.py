"""Held-out rows answered again, under any weights, as the run would have answered them.

The prompts come from the log, with the draws that the run would have made for that version; the
sampler, the settings and the verifier from its configuration. The engine is the built-in one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlstreams.debug.blame.series import HELD_OUT, HELD_OUT_TOKENS
from rlstreams.schemas.events import EVALUATE, Prompt
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.group_ids import evaluation_group, evaluation_id
from rlstreams.streams.run.run_log import RunLog
from rlstreams.workers.bootstrap.sampling import builtin_engine, sampler_of
from rlstreams.workers.config.across import judging
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.engines.folder_channel import HeldWeights
from rlstreams.workers.engines.thread import EngineThread
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.device import nearest_devices
from rlstreams.workers.model.tokenizer import TokenizerError
from rlstreams.workers.rollout.episode import Played
from rlstreams.workers.rollout.verifiers import make_verifier
from rlstreams.workers.rollout.worker import CLOSE_S, REASONS

if TYPE_CHECKING:
    import torch

DEADLINE_S = 3600.0  # of one evaluation; each sample has its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Figures of one evaluation."""

    reward: float  # mean over the answers
    tokens: float  # sampled, mean over the answers
    num_answered: int

    def value(self, metric: str) -> float:
        """Return the value of the metric `HELD_OUT` or `HELD_OUT_TOKENS`."""
        return {HELD_OUT: self.reward, HELD_OUT_TOKENS: self.tokens}[metric]


def held_out_prompts(log: RunLog) -> list[Prompt]:
    """Return the prompts of the newest evaluation, by row and sample.

    Raises:
        ConfigError: the log has no evaluation.
    """
    by_version: dict[int, list[Prompt]] = {}
    for record in log.read(Prompt, skip_unreadable=True):
        identity = evaluation_id(record.event.group_id)
        if record.event.purpose == EVALUATE and identity:
            by_version.setdefault(identity[0], []).append(record.event)
    if not by_version:
        raise ConfigError(
            "the log has no prompt of a held-out row (data.held_out, prompts.evaluate_every): "
            "blame a metric of its steps, as entropy"
        )
    return sorted(by_version[max(by_version)], key=lambda one: (one.row, one.sample))


class Evaluator:
    """Engine, sampler and verifier, loaded once.

    Raises:
        ConfigError: from the constructor: agents, a verifier or a model that cannot be used here.
    """

    def __init__(self, config: RunConfig, prompts: Sequence[Prompt]) -> None:
        if config.agent:
            raise ConfigError(
                "held_out: the samples of this run are what agents do, which cannot be done again "
                "here; take a metric of its steps, as entropy"
            )
        self._prompts = prompts
        with ExitStack() as stack:
            self._verifier = stack.enter_context(make_verifier(judging(config)))
            try:
                device, _ = nearest_devices("rollout.device", config.rollout.device, 1)
                self._engine = builtin_engine(config, device)
                self._sampler = sampler_of(config, self._engine, self._verifier)
            except (EngineError, TokenizerError) as err:
                raise ConfigError(f"model.path: {err}") from err
            self._loop = EngineThread()
            self._stack = stack.pop_all()

    def evaluate(self, weights: Mapping[str, torch.Tensor], version: int) -> Evaluated:
        """Answer all rows under these weights.

        Args:
            version: the version whose random draws are taken: with its weights the answers are
                the run's own, up to the engine.
        """
        answered = self._loop.wait(self._all(weights, version), DEADLINE_S, "held-out rows")
        played = [one for one in answered if one is not None]
        num = len(played)
        rewards = [one.judgement.reward for one in played if one.judgement is not None]
        tokens = sum(len(turn.token_ids) for one in played for turn in one.turns)
        return Evaluated(
            reward=math.fsum(rewards) / num if num else math.nan,
            tokens=tokens / num if num else math.nan,
            num_answered=num,
        )

    async def _all(self, weights: Mapping[str, torch.Tensor], version: int) -> list[Played | None]:
        source = HeldWeights(dict(sorted(weights.items())), "policy", version)
        await self._engine.pull(source.published, source)
        asked = (
            replace(
                prompt, group_id=evaluation_group(version, prompt.row), min_policy_version=version
            )
            for prompt in self._prompts
        )
        return list(await asyncio.gather(*map(self._answer, asked)))

    async def _answer(self, prompt: Prompt) -> Played | None:
        try:
            return await self._sampler.played(prompt)
        except tuple(REASONS):
            return None

    def close(self) -> None:
        """End the engine, the environment's and the verifier's processes."""
        self._loop.wait(self._engine.close(), CLOSE_S, "closing the engine")
        if self._sampler.turns is not None:
            self._sampler.turns.environment.close()
        self._loop.close()
        self._stack.close()

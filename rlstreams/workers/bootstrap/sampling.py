"""From a configuration to the built-in engine, and to the sampler of samples without an agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.model.tokenizer import Tokenizer
from rlstreams.workers.rollout.sampling import Sampler, sampling_of
from rlstreams.workers.rollout.turns import make_turns
from rlstreams.workers.sandbox.reward import Verifier

if TYPE_CHECKING:
    from rlstreams.workers.engines.base import Engine
    from rlstreams.workers.engines.builtin import BuiltinEngine


def builtin_engine(
    config: RunConfig, device: str, *, captures_experts: bool = False
) -> BuiltinEngine:
    """The built-in engine; see its constructor.

    Raises:
        EngineError: the model cannot be loaded or decoded.
    """
    from rlstreams.workers.engines.builtin import BuiltinEngine

    return BuiltinEngine(
        model_folder(config.model.path),
        slots=config.rollout.slots,
        threads=config.model.threads,
        capture_experts=captures_experts,
        pull_deadline_s=config.weights.pull_deadline_s,
        device=device,
        dtype=config.model.dtype,
    )


def sampler_of(
    config: RunConfig,
    engine: Engine,
    verifier: Verifier,
    note: Callable[[str], None] = lambda _: None,
) -> Sampler:
    """The sampler, with the environment if one is named.

    Args:
        note: called with what the user should know of the environment's code.

    Raises:
        TokenizerError: the model's folder has no usable tokenizer.
        ConfigError: an environment that cannot be used.
    """
    return Sampler(
        engine=engine,
        verifier=verifier,
        tokenizer=Tokenizer.load(model_folder(config.model.path)),
        sampling=sampling_of(config.rollout),
        evaluation=sampling_of(config.evaluation),
        turns=make_turns(config, vocab_size=engine.vocab_size, note=note),
        max_attempts=config.rollout.max_attempts,
        deadline_s=config.rollout.sample_deadline_s,
    )

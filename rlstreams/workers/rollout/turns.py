"""Environment of samples of several turns, by the configuration's `[environment]`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.reward import ENVIRONMENT
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.config.user_code import located, resolved
from rlstreams.workers.model.folder import eos_ids_of
from rlstreams.workers.model.tokenizer import Tokenizer
from rlstreams.workers.rollout.next_turn import NextTurn
from rlstreams.workers.sandbox.environment import EXTRA, UserEnvironment
from rlstreams.workers.sandbox.user_code import UserCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The environment, the tokens between two turns, and the largest number of turns."""

    environment: UserEnvironment
    next_turn: NextTurn
    max_turns: int


def make_turns(config: RunConfig, *, vocab_size: int, note: Callable[[str], None]) -> Turns | None:
    """The environment that the configuration names, ready to begin episodes; None: none is named.

    Args:
        vocab_size: of the engine.
        note: called with problems beside samples, for the log.

    Raises:
        ConfigError: a class that cannot be loaded, or a chat template that is not fit for several
            turns.
        DeadlineError: the system has no process for user code.
        TokenizerError: there is no usable tokenizer.
    """
    section, data = config.environment, config.data
    if not section.name:
        return None
    folder = model_folder(config.model.path)
    tokenizer = Tokenizer(folder, template=data.template, options=data.template_options)
    eos_ids = eos_ids_of(folder)
    next_turn = NextTurn(tokenizer, section.role, vocab_size=vocab_size, eos_ids=eos_ids)
    if data.is_always_chat:
        next_turn.check_template()
    environment = make_environment(config, note)
    return Turns(environment=environment, next_turn=next_turn, max_turns=section.max_turns)


def make_environment(
    config: RunConfig, note: Callable[[str], None] = lambda _: None
) -> UserEnvironment:
    """The environment alone; raises as `make_turns`."""
    section = config.environment
    found = located(section.name)
    if found is None:
        raise ConfigError(
            f"environment.name must be `file.py:Class` or `module:Class`, got {section.name!r}"
        )
    file, module, name = found
    code = UserCode(
        name=name,
        kind="class",
        file=file,
        module=module,
        extra=EXTRA,
        options=resolved(section.options, "environment.options."),
        timeout_s=section.timeout_s,
        memory_mb=section.memory_mb,
        processes=section.processes,
        concurrency=section.concurrency,
    )
    return UserEnvironment(code, must_reward=config.reward.verifier == ENVIRONMENT, note=note)

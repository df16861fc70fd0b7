"""Checks of the data: problems can be read, fit the model, and are judged by the verifier."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from rlstreams.start.doctor.check import Check, ok, warn
from rlstreams.start.doctor.model import ModelFolder
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.reward import ENVIRONMENT
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.dataset.identity import data_hashes
from rlstreams.workers.dataset.open import first_rows, open_problems, prompt_encoder
from rlstreams.workers.prompts.issue import text_of
from rlstreams.workers.rollout.turns import make_environment
from rlstreams.workers.rollout.verifiers import make_verifier
from rlstreams.workers.sandbox.reward import RewardError, Sample


def data_checks(
    config: RunConfig, model: ModelFolder, progress: Callable[[str], None] = lambda _: None
) -> Iterator[Check]:
    """One check for each file that is named. A large file is indexed here, once for all starts.

    Raises:
        ConfigError: names field, file and line, and what is wrong there.
    """
    problems = open_problems(config.data, prompt_encoder(config), model.longest, progress)
    yield ok("data.train", problems.told[0])
    for told in problems.told[1:]:
        yield ok("data.held_out", told)
    if problems.held_out is None:
        yield ok("data.held_out", "not named: no evaluation")


def hash_check(config: RunConfig) -> Check:
    """What the trainer does with the data: it puts its hash into its claim, where it has it."""
    found = data_hashes(config.data).get("train")
    if found is None:
        return warn(
            "data.train", f"{config.data.train!r} is not on this host",
            "copy it here, or nobody notices that prompts are issued from another one",
        )  # fmt: skip
    return ok("data.train", f"SHA-256 {found[:12]}.., to be compared with that of `prompts`")


def verifier_check(config: RunConfig, *, has_data: bool = True) -> Check:
    """Load the verifier and let it judge one row's own answer; an environment is only loaded.

    Args:
        has_data: False: on a host that need not have the data, so the verifier is only loaded too.

    Raises:
        ConfigError: it cannot be loaded, raises, hangs, or returns no number.
    """
    name, environment = config.reward.verifier, config.environment.name
    if environment:
        make_environment(config).close()
    if name == ENVIRONMENT and has_data:
        return ok("verifier", f"the environment {environment}, which can be loaded")
    if not has_data:
        if name != ENVIRONMENT:
            make_verifier(config.reward).close()
        names = f"{name} and {environment}" if environment else name
        return ok("verifier", f"{names} can be loaded; tried where the data is, not here")
    row = first_rows(config.data, "data.train", 1)[0]
    with make_verifier(config.reward) as verifier:
        try:
            judged = verifier.judge(
                Sample(text_of(row.prompt), row.answer, row.answer, json.loads(row.metadata))
            )
        except RewardError as err:
            raise ConfigError(
                f"reward.verifier: tried on {row.place}, with the row's `answer` as completion: "
                f"{err}"
            ) from err
    # Not wrong by itself: a verifier may want more than the bare answer.
    return ok("verifier", f"{name} gives {judged.reward:g} to the answer of {row.place}")

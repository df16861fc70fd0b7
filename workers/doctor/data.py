"""Whether the problems can be read, fit the model, and are judged by the verifier."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from streams.errors import ConfigError
from workers.config import RunConfig
from workers.doctor.check import Check, ok
from workers.doctor.model import ModelFolder
from workers.prompts.dataset import Dataset, Row
from workers.prompts.issue import PromptWriter, text_of
from workers.rollout.make_verifier import make_verifier
from workers.rollout.reward import STOP, RewardError

WHOLE_FILE_BYTES = 64_000_000  # a larger one is left to the role, which reads it beside the others


def data_checks(config: RunConfig, model: ModelFolder) -> Iterator[Check]:
    """One check for each file that is named.

    Raises:
        ConfigError: names field, file and line, and what is wrong there.
    """
    files = {"data.train": config.data.train, "data.held_out": config.data.held_out}
    for field, path in files.items():
        if path or field == "data.train":
            yield _data(field, path, model, config.run.seed)
        else:
            yield ok(field, "not named: no evaluation")


def verifier_check(config: RunConfig) -> Check:
    """Load the verifier and let it judge one row's own answer.

    Raises:
        ConfigError: it cannot be loaded, raises, hangs, or returns no number.
    """
    row = _first_row("data.train", config.data.train)
    with make_verifier(config.reward) as verifier:
        try:
            judged = verifier.judge(
                text_of(row.prompt), row.answer, row.answer, json.loads(row.metadata), STOP
            )
        except RewardError as err:
            raise ConfigError(
                f"reward.verifier: tried on {row.place}, with the row's `answer` as completion: "
                f"{err}"
            ) from err
    # Not wrong by itself: a verifier may want more than the bare answer.
    return ok(
        "verifier", f"{config.reward.verifier} gives {judged.reward:g} to the answer of {row.place}"
    )


def _data(field: str, path: str, model: ModelFolder, seed: int) -> Check:
    if path and not Path(path).is_file():
        raise ConfigError(f"{field}: there is no file {path!r}")
    if path and Path(path).stat().st_size > WHOLE_FILE_BYTES:
        _first_row(field, path)
        return ok(field, f"{path}: its first row is valid; the role prompts checks the others")
    rows = Dataset(field, path)
    try:
        PromptWriter(rows, None, model.tokenizer, seed).check_lengths(
            (model.longest or 1 << 62) - 1
        )
    except ConfigError as err:
        raise ConfigError(f"{field}: {err}") from err
    return ok(field, f"{path}: {len(rows)} rows")


def _first_row(field: str, path: str) -> Row:
    return Dataset(field, path, max_rows=1).row(0)

"""What a person names on the command line, as a log: a run's folder, TOML files, a recording."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlstreams.debug.inspect.words import NUMBERS, Spelling
from rlstreams.streams.run.recorded_log import RecordedLog, is_recording
from rlstreams.streams.run.run_log import BusLog, RunLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A log, and how its tokens are spelled."""

    log: RunLog
    spelling: Spelling


@contextmanager
def opened(names: Sequence[str], overrides: Sequence[str], tokenizer: str = "") -> Iterator[Opened]:
    """The log that `names` mean, open.

    Args:
        names: one folder, or TOML files; none: `./run.toml`.
        overrides: for the TOML files.
        tokenizer: a folder with `tokenizer.json`; empty: that of the run's model.

    Raises:
        ConfigError: no name, or one that is neither; a tokenizer that cannot be loaded.
        BrokerError: the run's broker cannot be reached or started.
    """
    from rlstreams.streams.log.errors import ConfigError
    from rlstreams.workers.config.here import config_here

    names = names or [config_here()]
    if is_recording(names[0]):
        if len(names) > 1 or overrides:
            raise ConfigError(f"{names[0]}: a recording has its own configuration; name it alone")
        with RecordedLog(names[0]) as recorded:
            yield Opened(log=recorded, spelling=spelling(tokenizer, model_path(recorded)))
        return
    from rlstreams.runs.attach import attached
    from rlstreams.runs.configuration import configuration
    from rlstreams.runs.places import check_place

    check_place(names[0])
    config = configuration(names, overrides)
    with attached(config) as bus, BusLog(bus, config.run.id) as log:
        yield Opened(log=log, spelling=spelling(tokenizer, config.model.path))


def model_path(log: RecordedLog) -> str:
    """The model folder of the recorded run, as its configuration names it; empty if none does."""
    text = log.recording.manifest.config
    return str(json.loads(text)["model"]["path"]) if text else ""


def spelling(named: str, of_run: str) -> Spelling:
    """By the tokenizer in a folder that was named, else in the run's model folder.

    Raises:
        ConfigError: the named one cannot be loaded. That of the run may be gone: then numbers show.
    """
    from rlstreams.streams.log.errors import ConfigError
    from rlstreams.workers.model.tokenizer import Tokenizer, TokenizerError

    try:
        tokenizer = Tokenizer.load(Path(named or of_run))
    except TokenizerError as err:
        if named:
            raise ConfigError(f"--tokenizer: {err}") from err
        return NUMBERS
    return Spelling(
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        plain=tokenizer.decode,
        hash=tokenizer.hash,
    )

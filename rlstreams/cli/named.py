"""The run or recording that a command line names, opened; progress and JSON on its output."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.text import plain_json

if TYPE_CHECKING:
    from rlstreams.streams.run.run_log import RunLog
    from rlstreams.workers.config.run import RunConfig

LINE_EVERY_S = 10.0  # between lines of progress, where no terminal shows it


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRun:
    """A run or a recording that was named on the command line, open."""

    log: RunLog
    folder: Path
    model_path: str  # as its configuration names it; "": it names none
    config: RunConfig | None = None  # None: a recording's, which may be another release's


@contextmanager
def opened(
    names: Sequence[str], overrides: Sequence[str], say: Callable[[str], None] | None = None
) -> Iterator[NamedRun]:
    """Open a run by its folder or TOML files (none: `./run.toml`), or a recording.

    Args:
        say: called with progress of slow work; None: stderr gets it.

    Raises:
        ConfigError: neither a run nor a recording; names the runs and recordings that exist.
        BrokerError: the run's broker cannot be reached or started.
    """
    from rlstreams.streams.run.open_run import open_run
    from rlstreams.streams.run.places import check_place
    from rlstreams.streams.run.recorded_log import is_recording
    from rlstreams.workers.config.here import config_here

    names = names or [config_here()]
    if is_recording(names[0]):
        if len(names) > 1 or overrides:
            raise ConfigError(f"{names[0]}: a recording has its own configuration; name it alone")
        with open_run(names[0]) as recorded:
            path = str(recorded.configuration.get("model", {}).get("path", ""))
            yield NamedRun(log=recorded, folder=Path(names[0]), model_path=path)
        return
    check_place(names[0])
    config = configuration(names, overrides)
    with opened_run(config, say) as log:
        folder = Path(config.folder)
        yield NamedRun(log=log, folder=folder, model_path=config.model.path, config=config)


def several(names: Sequence[str]) -> list[list[str]]:
    """Return the names of each run: every folder is a run, TOML files together are one."""
    return [[name] for name in names] if all(map(os.path.isdir, names)) else [list(names)]


def opened_run(config: RunConfig, say: Callable[[str], None] | None = None) -> RunLog:
    """Open the run's log; progress of slow work goes to `say` or stderr. Raises as `open_run`."""
    from rlstreams.streams.run.open_run import open_run
    from rlstreams.workers.bootstrap.parts import place_of

    return open_run(place_of(config), say=say or ProgressLine())


def configuration(
    names: Sequence[str], overrides: Sequence[str], *, may_set: str = ""
) -> RunConfig:
    """Load the configuration of a run's folder as `up` left it, or of TOML files (`./run.toml`).

    Args:
        may_set: the section that overrides may set in a folder's own configuration; "": none.

    Raises:
        ConfigError: no such folder, one without `config.json`, or files that cannot be used; names
            the runs that are there.
    """
    from rlstreams.streams.run.places import RUNS, check_place
    from rlstreams.workers.config.here import config_here
    from rlstreams.workers.config.layers import pairs
    from rlstreams.workers.config.load import load, over, read_json

    names = names or [config_here()]
    check_place(names[0], [RUNS])
    folder = Path(names[0])
    if not folder.is_dir():
        return load(names, overrides)
    set_here = dict(pairs(overrides))
    others = [name for name in set_here if not may_set or not name.startswith(f"{may_set}.")]
    if len(names) > 1 or others:
        but = f" but for --{may_set}.*" if may_set else ""
        raise ConfigError(f"{folder}: a run's folder has its own configuration; name it alone{but}")
    config = read_json(folder / "config.json")
    if set_here:
        config = over(config, overrides, str(folder / "config.json"))
    # The folder may have been moved, or named from elsewhere, since it was written.
    return replace(config, run=replace(config.run, dir=str(folder)))


def print_json(*values: object) -> None:
    """Print dicts or dataclasses for `--json`: a JSON object a line."""
    import msgspec

    for value in values:
        print(plain_json(msgspec.to_builtins(value, enc_hook=str)), flush=True)


class ProgressLine:
    """Progress of slow work on stderr: one changing line; in a file, one every `LINE_EVERY_S`."""

    def __init__(self) -> None:
        self._shown, self._due_s = "", 0.0

    def __call__(self, text: str) -> None:
        """Replace the shown text by `text`; "": show none."""
        if sys.stderr.isatty():
            if text or self._shown:
                print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
            self._shown = text
        elif text and time.monotonic() >= self._due_s:
            print(text, file=sys.stderr, flush=True)
            self._due_s = time.monotonic() + LINE_EVERY_S

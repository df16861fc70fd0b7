"""A run folder's `config.json`, for the run's processes and for later readers of its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.run.places import CONFIG_FILE, is_run, other_than_run
from rlstreams.streams.synced import write_whole
from rlstreams.workers.config.load import read_json, resolved_json
from rlstreams.workers.config.run import RunConfig


def refuse_place(config: RunConfig) -> None:
    """Refuse a folder that no run can have, or that holds something else. Changes nothing.

    Raises:
        ConfigError: says what is there.
    """
    folder = Path(config.folder)
    there = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    found = "" if there.is_dir() else f"{there} is a file"
    if not (folder / CONFIG_FILE).exists():  # a run may have been recorded into its own folder
        found = found or other_than_run(folder)
    elif not is_run(folder):  # of a model, say: a run would write its own over it
        found = f"{folder} has a {CONFIG_FILE} that is of no run"
    if found:
        raise ConfigError(f"run.dir: {found}, not a folder of a run: name another, `--run.dir DIR`")


def refuse_other_run(config: RunConfig) -> None:
    """Refuse another run's folder: both would share a broker and remove each other's checkpoints.

    Raises:
        ConfigError: the folder is another run's; names both.
    """
    file = Path(config.folder) / CONFIG_FILE
    try:
        owner = read_json(file).run.id
    except ConfigError:  # there is none, or it was cut short
        return
    if owner != config.run.id:
        raise ConfigError(
            f"run.dir: {config.folder} is the folder of run {owner!r}, and run.id is "
            f"{config.run.id!r}: name that run, `--run.id {owner}`, or another folder, "
            "`--run.dir DIR`"
        )


@contextmanager
def configured(config: RunConfig, newest_epoch: Callable[[], int]) -> Iterator[None]:
    """`config.json` is this configuration in the block, and stays so if a trainer took the run.

    A start of a run that goes on, whose trainer was refused or never got as far, leaves the file as
    it was: it has the configuration of the newest claim.

    Args:
        newest_epoch: of the claims in the log; 0: there is none.
    """
    file, epoch = Path(config.folder) / CONFIG_FILE, newest_epoch()
    before = file.read_bytes() if epoch and file.is_file() else None
    write_whole(file, f"{resolved_json(config)}\n".encode())
    try:
        yield
    finally:
        if before is not None and newest_epoch() == epoch:
            write_whole(file, before)

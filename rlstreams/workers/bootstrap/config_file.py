"""A run folder's `config.json`: what its processes start with, and those who look at it later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.run.places import CONFIG_FILE, other_than_run
from rlstreams.workers.config.load import read_json, resolved_json
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.dataset.files import write_whole


def refuse_place(config: RunConfig) -> None:
    """A folder that no run can have, or that holds something else. Changes nothing.

    Raises:
        ConfigError: says what is there.
    """
    folder = Path(config.folder)
    there = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    told = f"{there} is a file" if there.is_file() else ""
    if not (folder / CONFIG_FILE).exists():  # a run may have been recorded into its own folder
        told = told or other_than_run(folder)
    if told:
        raise ConfigError(f"run.dir: {told}, not a folder of a run: name another, `--run.dir DIR`")


def refuse_other_run(config: RunConfig) -> None:
    """Two runs in one folder would share its broker and remove each other's checkpoints.

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
    it was: it tells what the newest claim is about.

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

"""Rows of figures as TensorBoard's event files, by torch's writer and the package `tensorboard`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlstreams.show.metrics.rows import Row
from rlstreams.streams.log.errors import ConfigError


class TensorBoardFiles:
    """One event file in a folder; a row's values are scalars at its step and time."""

    def __init__(self, folder: Path) -> None:
        """Begin the file.

        Raises:
            ConfigError: the package is not installed, or the folder has event files already.
        """
        if any(folder.glob("events.out.tfevents.*")):
            raise ConfigError(
                f"--to {folder} has event files already, and TensorBoard would draw each step "
                "twice: name a new folder; the log gives all steps again"
            )
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as err:
            raise ConfigError(
                "--format tensorboard needs a package that is not installed: "
                "pip install 'rlstreams[metrics]'"
            ) from err
        self._writer = SummaryWriter(str(folder))

    def write(self, rows: Sequence[Row]) -> None:
        """Write and flush."""
        for row in rows:
            for name, value in row.values.items():
                tag = name if "/" in name else f"{row.kind}/{name}"
                self._writer.add_scalar(tag, value, row.step, walltime=row.at_ms / 1000)
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        self._writer.close()

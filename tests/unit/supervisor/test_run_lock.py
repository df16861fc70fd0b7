"""Two `up` on one folder would share a broker, and the first to end would stop it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.run.run_lock import locked_run


def test_a_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    """The second is told who holds it; afterwards the folder is free."""
    told = rf"in use by another .*process {os.getpid()}\)"
    with locked_run(tmp_path), pytest.raises(ConfigError, match=told), locked_run(tmp_path):
        pytest.fail("held twice")
    with locked_run(tmp_path):
        pass

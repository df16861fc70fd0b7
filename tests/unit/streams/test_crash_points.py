"""A crash point does nothing until it is armed, and then what was asked, once."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from streams.crash_points import CrashPoint, arm, arm_from, reach
from streams.errors import ConfigError


def test_a_point_that_is_not_armed_does_nothing():
    """Production code passes by."""
    assert reach(CrashPoint.SEND_AFTER) is None


def test_an_armed_hook_is_called_with_the_point():
    """The hook of a unit test raises what it likes."""
    seen: list[CrashPoint] = []
    arm(seen.append)
    try:
        reach(CrashPoint.COMMIT_BEFORE)
    finally:
        arm(None)
    assert [CrashPoint.COMMIT_BEFORE] == seen


def test_a_process_dies_at_the_asked_count():
    """`commit.before:2` survives the first time and is killed at the second."""
    script = (
        "from streams.crash_points import CrashPoint, arm_from, reach\n"
        "arm_from('commit.before:2')\n"
        "reach(CrashPoint.COMMIT_BEFORE); print('once', flush=True)\n"
        "reach(CrashPoint.COMMIT_BEFORE); print('twice', flush=True)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert (-signal.SIGKILL, "once\n") == (ended.returncode, ended.stdout)


@pytest.mark.parametrize("text", ["commit", "commit.before:x", "commit.before:1:explode"])
def test_what_is_no_point_is_refused(text):
    """The error quotes the text and lists the points."""
    with pytest.raises(ConfigError, match="commit"):
        arm_from(text)

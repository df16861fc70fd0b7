"""A crash point does nothing until it is armed, and then what was asked, once."""

from __future__ import annotations

import pytest

from rlstreams.streams.log.crash_points import CrashPoint, arm, arm_from, reach
from rlstreams.streams.log.errors import ConfigError


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


@pytest.mark.parametrize("text", ["commit", "commit.before:x", "commit.before:1:explode"])
def test_what_is_no_point_is_refused(text):
    """The error quotes the text and lists the points."""
    with pytest.raises(ConfigError, match="commit"):
        arm_from(text)

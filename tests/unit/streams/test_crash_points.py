"""A crash point does nothing until it is armed, and then what was asked, once."""

from __future__ import annotations

import pytest

from rlstreams.streams.log.crash_points import arm_from
from rlstreams.streams.log.errors import ConfigError


@pytest.mark.parametrize("text", ["commit", "commit.before:x", "commit.before:1:explode"])
def test_what_is_no_point_is_refused(text):
    with pytest.raises(ConfigError, match="commit"):
        arm_from(text)

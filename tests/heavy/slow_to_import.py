"""A module that takes its time, as torch does: what a fork server imports in a test."""

from __future__ import annotations

import time

time.sleep(1)

"""Python scripts that are programs."""

from __future__ import annotations

import shlex
import sys


def head(*options: str) -> str:
    """Return the first lines of a script for this Python, whose path may have spaces.

    A kernel ends an interpreter's path at the first one; so pip writes such lines, too.
    """
    command = shlex.join([sys.executable, *options])
    return f"#!/bin/sh\n'''exec' {command} \"$0\" \"$@\"\n' '''\n"

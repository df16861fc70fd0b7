"""This host's name, and the versions of our code and its libraries on it: claims, reports and logs
carry them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

LIBRARIES = ("rlstreams", "torch", "transformers", "numpy", "confluent-kafka")
NOT_INSTALLED = "not installed"
VARIABLE = "RLSTREAMS_HOST"  # for hosts whose own name means nothing, as in a pod


def host_name() -> str:
    """The name in `RLSTREAMS_HOST`, else the host's own."""
    return os.environ.get(VARIABLE, "") or socket.gethostname()


def library_versions() -> dict[str, str]:
    """Versions of our code and of the libraries that its numbers depend on, by distribution."""
    return {name: version_of(name) for name in LIBRARIES}


def version_of(name: str) -> str:
    """The version of an installed distribution, or `NOT_INSTALLED`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return NOT_INSTALLED


@cache
def release() -> str:
    """Version and commit of our own code, as reports and refusals name it."""
    return release_of({"rlstreams": version_of("rlstreams"), "commit": commit()})


def release_of(versions: Mapping[str, str]) -> str:
    """Version and commit in a claim's `versions`; empty: it has none."""
    name, made_of = versions.get("rlstreams", ""), versions.get("commit", "")
    return f"{name} (commit {made_of})" if name and made_of else name


@cache
def commit() -> str:
    """The commit of our own code: of a clone, with `-dirty` if files differ; of a package, if it
    was installed from a repository. Empty: not known.
    """
    root = Path(__file__).resolve().parents[3]
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        try:
            done = subprocess.run(
                [*command, "--abbrev=12"], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip()
    try:
        origin = json.loads(distribution("rlstreams").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return ""
    return str(origin.get("vcs_info", {}).get("commit_id", ""))[:12]

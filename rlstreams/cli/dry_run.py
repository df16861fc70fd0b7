"""Dry run of `up`: a complete configuration for each process, written and not started."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from rlstreams.cli.config import toml_lines
from rlstreams.workers.config.load import Loaded, resolved_json

FOLDER = "dry-run"


def write(loaded: Loaded, processes: Mapping[str, int]) -> list[tuple[Path, str]]:
    """One TOML file a process, in `dry-run` below the run's folder; secrets stay references.

    Args:
        processes: how many of each role.

    Returns:
        Each file, and the command that starts its process alone.
    """
    folder = Path(loaded.config.folder) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    body = toml_lines(json.loads(resolved_json(loaded.config)), loaded.origins)
    written = []
    for role, count in processes.items():
        for ordinal in range(count):
            path = folder / f"{role}-{ordinal}.toml"
            words = ["rlstreams", "worker", role, "--config", str(path), "--ordinal", str(ordinal)]
            command = shlex.join(words)
            path.write_text("\n".join([f"# {command}", "", *body]) + "\n", encoding="utf-8")
            written.append((path, command))
    return written

"""Message for a run or recording that is not where the user says: what is there instead."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.recording.manifest import MANIFEST_FILE, SUFFIX
from rlstreams.streams.run.recorded_log import is_recording

CONFIG_FILE = "config.json"  # the resolved configuration of the run
RUNS, RECORDINGS = "runs", "recordings"
CHECKPOINTS, VERSIONS = "a folder of checkpoints", "a folder of weight versions"
_MARKS = {RUNS: CONFIG_FILE, RECORDINGS: MANIFEST_FILE}
_HOLDS = {
    MANIFEST_FILE: "one checkpoint",
    f"[0-9]*-[0-9]*/{MANIFEST_FILE}": CHECKPOINTS,
    "v*-*.safetensors": VERSIONS,
    "v*-*.anchor": VERSIONS,
    f"[0-9]*{SUFFIX}": f"a recording without its {MANIFEST_FILE}",
}
_SHOWN = 8


def check_place(
    name: str, kinds: Sequence[str] = (RUNS, RECORDINGS), *, or_file: bool = True
) -> None:
    """See that `name` is a folder of one of these kinds; with `or_file` any file passes.

    Raises:
        ConfigError: it is not; says what it is, and names the runs and the recordings there are.
    """
    path = Path(name)
    if or_file and (path.suffix == ".toml" or path.is_file()):
        return
    if any(_is(kind, path) for kind in kinds):
        return
    wanted = " nor ".join(f"a {kind[:-1]}" for kind in kinds)
    wanted = f"{'neither' if len(kinds) > 1 else 'not'} {wanted}"
    found = what_is(path)
    if not path.exists():
        told = "is not there"
    elif found == "a run":
        told = f"is {found}, {wanted} (make one: rlstreams record run {path})"
    elif found:
        told = f"is {found}, {wanted}"
    else:
        lacks = " and ".join(f"no {_MARKS[kind]} of a {kind[:-1]}" for kind in kinds)
        told = f"is {wanted}: it has {lacks}"
    raise ConfigError(f"{path} {told}; {_instead(path, kinds)}")


def check_folder_of(kind: str, name: str, option: str) -> None:
    """See that `name` is a folder of that kind: `CHECKPOINTS` or `VERSIONS`.

    Raises:
        ConfigError: it is not; says what it is, and what was expected.
    """
    found, path = what_is(Path(name)), Path(name)
    if found != kind:
        told = f"is {found or 'something else'}" if path.exists() else "is not there"
        beside = path / ("weights" if kind == VERSIONS else "checkpoints")
        there = f"; it has {beside}" if beside.is_dir() else ""
        raise ConfigError(f"{option} takes {kind}; {path} {told}{there}")


def other_than_run(path: Path) -> str:
    """What is in a folder that no run may take; empty if nothing is."""
    found = what_is(path)
    return f"{path} is {found}" if found not in ("", "a run") else ""


def what_is(path: Path) -> str:
    """What of ours a folder is; empty if nothing."""
    for kind in _MARKS:
        if _is(kind, path):
            return f"a {kind[:-1]}"
    for pattern, holds in _HOLDS.items():
        if any(not is_recording(found.parent) for found in path.glob(pattern)):
            return holds
    return ""


def _is(kind: str, path: Path) -> bool:
    """By the file that marks it; a model's folder has a file of the same name as a run's."""
    if kind == RECORDINGS:
        return is_recording(path)
    try:
        found = json.loads((path / CONFIG_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):  # who reads it says what is wrong with it
        return True
    return isinstance(found, dict) and "run" in found


def _instead(path: Path, kinds: Sequence[str]) -> str:
    """What of these kinds is beside the path, and where commands put it."""
    found = {kind: _folders((path.parent, Path(kind)), kind) for kind in kinds}
    every = [name for names in found.values() for name in names]
    if not every:
        return "there is " + " and ".join(f"no {kind[:-1]} in {kind}/" for kind in kinds) + " here"
    near = difflib.get_close_matches(str(path), every, 1, cutoff=0.75)
    listed = [f"{kind}: {_some(names)}" for kind, names in found.items() if names]
    return (f"did you mean {near[0]}? " if near else "") + "there are " + "; ".join(listed)


def _folders(parents: Iterable[Path], kind: str) -> list[str]:
    beside = {file.parent for parent in parents for file in parent.glob(f"*/{_MARKS[kind]}")}
    return sorted(str(folder) for folder in beside if _is(kind, folder))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

"""Message for a run or recording that is not at the named path: its content, and near names."""

from __future__ import annotations

import difflib
import json
import os
import shlex
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.recording.manifest import MANIFEST_FILE, SUFFIX
from rlstreams.streams.run.recorded_log import is_recording
from rlstreams.streams.run.run_lock import LOCK_FILE

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
# Names in a run's folder before `config.json`: what roles by hand and `rlstreams.run` write, and
# what people lay beside it (a configuration, a shell's log, the folder of a disk's repairs).
_NO_STRANGERS = (
    "logs", "broker", "given", "checkpoints", "weights", "weights.secret", "pulled", "store",
    "agents", "servers", "track", "track.lock", "*.device.lock", "lost+found",
    "*.toml", "*.log", "*.out", "*.err",
)  # fmt: skip


def check_place(
    name: str, kinds: Sequence[str] = (RUNS, RECORDINGS), *, or_file: bool = True
) -> None:
    """Check that `name` is a folder of one of these kinds; with `or_file` any file passes.

    Raises:
        ConfigError: it is not; the message says what it is, and names existing runs and recordings.
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
        problem = "is not there"
    elif found == "a run":
        problem = f"is {found}, {wanted} (make one: rlstreams record run {shlex.quote(str(path))})"
    elif found:
        problem = f"is {found}, {wanted}"
    else:
        lacks = " and ".join(f"no {_MARKS[kind]} of a {kind[:-1]}" for kind in kinds)
        problem = f"is {wanted}: it has {lacks}"
    raise ConfigError(f"{path} {problem}; {_instead(path, kinds)}")


def check_folder_of(kind: str, name: str, option: str) -> None:
    """Check that `name` is a folder of that kind: `CHECKPOINTS` or `VERSIONS`.

    Raises:
        ConfigError: it is not; the message says what it is, and what was expected.
    """
    found, path = what_is(Path(name)), Path(name)
    if found != kind:
        problem = f"is {found or 'something else'}" if path.exists() else "is not there"
        beside = path / ("weights" if kind == VERSIONS else "checkpoints")
        there = f"; it has {beside}" if beside.is_dir() else ""
        raise ConfigError(f"{option} takes {kind}; {path} {problem}{there}")


def other_than_run(path: Path) -> str:
    """Return a text on a folder that no run may take; "": a run may take it."""
    found = what_is(path)
    if found:
        return f"{path} is {found}" if found != "a run" else ""
    strangers = _strangers(path)
    return f"{path} has other things in it ({_some(strangers)})" if strangers else ""


def _strangers(path: Path) -> Sequence[str]:
    """Names in a folder that no run has written, and among which none may write."""
    try:
        names = sorted(os.listdir(path))
    except OSError:  # there is none, or it cannot be read, as is told where it is taken
        return ()
    if LOCK_FILE in names or CONFIG_FILE in names:  # of an earlier start; whose, is told elsewhere
        return ()
    return [name for name in names if not any(fnmatch(name, own) for own in _NO_STRANGERS)]


def is_run(path: Path) -> bool:
    """Whether a folder's `config.json` is a run's, or cannot be read as any."""
    return _is(RUNS, path)


def what_is(path: Path) -> str:
    """Return the kind of a folder of ours, `a run` for example; "": none."""
    for kind in _MARKS:
        if _is(kind, path):
            return f"a {kind[:-1]}"
    for pattern, holds in _HOLDS.items():
        if any(not is_recording(found.parent) for found in path.glob(pattern)):
            return holds
    return ""


def _is(kind: str, path: Path) -> bool:
    """Whether a folder is of a kind, by its marking file; a model's also has `config.json`."""
    if kind == RECORDINGS:
        return is_recording(path)
    try:
        found = json.loads((path / CONFIG_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):  # its reader reports what is wrong with it
        return True
    return isinstance(found, dict) and "run" in found


def _instead(path: Path, kinds: Sequence[str]) -> str:
    """Return a text on runs and recordings beside the path, and in their usual folders."""
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

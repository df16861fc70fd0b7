"""Message for a run or recording that is not where the user says: what is there instead."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.recording.manifest import MANIFEST_FILE, holds_files
from rlstreams.streams.run.recorded_log import is_recording

CONFIG_FILE = "config.json"  # the resolved configuration of the run
RUNS, RECORDINGS = "runs", "recordings"
CHECKPOINT, CHECKPOINTS, VERSIONS = (
    "one checkpoint",
    "a folder of checkpoints",
    "a folder of weights",
)
_SHOWN = 8
_MARKS = {RUNS: CONFIG_FILE, RECORDINGS: MANIFEST_FILE}


def check_place(
    name: str, kinds: Sequence[str] = (RUNS, RECORDINGS), *, or_file: bool = True
) -> None:
    """See that `name` is a folder of one of these kinds; with `or_file` any file passes.

    Raises:
        ConfigError: it is not; names the runs and the recordings that are there.
    """
    path = Path(name)
    if or_file and (path.suffix == ".toml" or path.is_file()):
        return
    if path.is_dir() and any(_is(kind, path) for kind in kinds):
        return
    raise ConfigError(f"{_what(path, kinds)}; {_instead(path, kinds)}")


def _is(kind: str, path: Path) -> bool:
    """By the file that marks it; a model's folder has a file of the same name as a run's."""
    mark = path / _MARKS[kind]
    if kind == RECORDINGS:
        return is_recording(path)
    if not mark.is_file():
        return False
    try:
        found = json.loads(mark.read_bytes())
    except (OSError, ValueError):  # who reads it says what is wrong with it
        return True
    return isinstance(found, dict) and "run" in found


def _what(path: Path, kinds: Sequence[str]) -> str:
    if not path.exists():
        return f"{path} is not there"
    wanted = " nor ".join(f"a {kind[:-1]}" for kind in kinds)
    lacks = " and no ".join(_MARKS[kind] for kind in kinds)
    is_other = next((k for k in _MARKS if k not in kinds and _is(k, path)), "")
    if is_other:
        way_out = f" (make one: rlstreams record {path})" if is_other == RUNS else ""
        return f"{path} is a {is_other[:-1]}, not {wanted}{way_out}"
    if RECORDINGS in kinds and holds_files(path):
        return (
            f"{path} holds files of a recording, but its {MANIFEST_FILE}, which says of "
            "what run they are, is missing"
        )
    if holds := _weights_in(path):
        return f"{path} is {holds}, {'neither ' if len(kinds) > 1 else 'not '}{wanted}"
    told = f"{path} is {'neither ' if len(kinds) > 1 else 'not '}{wanted}"
    if (path / CONFIG_FILE).is_file() and RUNS in kinds:
        return f"{told}: its {CONFIG_FILE} has no section run, as that of a model has none"
    return f"{told}: it has no {lacks}"


def check_folder_of(kind: str, name: str, option: str) -> None:
    """See that `name` is a folder of that kind: `CHECKPOINTS` or `VERSIONS`.

    Raises:
        ConfigError: it is not; says what it is, and what was expected.
    """
    path = Path(name)
    wanted = f"{option} takes {kind}"
    holds = _weights_in(path)
    if holds == kind:
        return
    if not path.is_dir():
        raise ConfigError(f"{wanted}; {path} is {'a file' if path.exists() else 'not there'}")
    if holds == CHECKPOINT:
        raise ConfigError(f"{wanted}; {path} is {holds} of those in {path.resolve().parent}")
    is_what = holds or next((f"a {kind[:-1]}" for kind in _MARKS if _is(kind, path)), "neither")
    beside = path / ("weights" if kind == VERSIONS else "checkpoints")
    there = f"; it has {beside}" if beside.is_dir() else ""
    raise ConfigError(f"{wanted}; {path} is {is_what}{there}")


def other_than_run(path: Path) -> str:
    """What is in a folder that no run may take; empty if nothing is."""
    is_what = "a recording" if is_recording(path) else _weights_in(path)
    return f"{path} is {is_what}" if is_what else ""


def _weights_in(path: Path) -> str:
    """What of checkpoints or weights a folder is; empty if nothing."""
    if (path / MANIFEST_FILE).is_file() and not is_recording(path):
        return CHECKPOINT
    marks = path.glob(f"[0-9]*-[0-9]*/{MANIFEST_FILE}") if path.is_dir() else ()
    if any(not is_recording(mark.parent) for mark in marks):
        return CHECKPOINTS
    return VERSIONS if path.is_dir() and any(path.glob("v*-*.safetensors")) else ""


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

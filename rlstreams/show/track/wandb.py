"""Weights & Biases: a run of a project, online or in files that `wandb sync` sends."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstreams.show.metrics.picks import COLUMNS
from rlstreams.show.metrics.rows import Row, row_key
from rlstreams.show.track.sinks import About, lacking
from rlstreams.streams.log.errors import StreamsError

STEP = "optimizer_step"  # the axis: W&B's own counts rows, and evaluations come late
_MARKS = ("step/policy_version", "evaluation/policy_version")
_BLOCK, _HEADER, _FILE_HEADER = 32768, 7, 7  # bytes
_FULL, _FIRST, _LAST = 1, 2, 4  # parts of a record


class WandbSink:
    """Settings: `project`, `entity`, `group`, `mode`; files lie in the run's folder.

    Raises:
        StreamsError: the server has rows that cannot be asked for yet.
    """

    def __init__(self, settings: Mapping[str, str], about: About) -> None:
        import wandb

        self._wandb = wandb
        folder = Path(about.folder) / "track"
        folder.mkdir(parents=True, exist_ok=True)
        is_offline = settings["mode"] == "offline"
        written: Sequence[Mapping[str, Any]] = ()
        if is_offline:
            written = list(_written(folder, about.identity))
        self._run = wandb.init(
            project=settings["project"],
            entity=settings["entity"] or None,
            group=settings["group"] or None,
            id=about.identity,
            name=about.run,
            dir=str(folder),
            mode="offline" if is_offline else "online",
            resume="allow",
            notes=about.look,
            settings=wandb.Settings(
                console="off", silent=True, save_code=False, disable_git=True, x_disable_stats=True
            ),
        )
        self._run.config.update(about.config, allow_val_change=True)  # type: ignore[no-untyped-call]
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        if not is_offline:
            written = self._served()
        self._next = 1 + max((int(row["_step"]) for row in written), default=-1)
        self.has = {row_key(int(row.get(STEP, 0)), row) for row in written} - {""}

    def _served(self) -> Sequence[Mapping[str, Any]]:
        """The rows that the server has."""
        if not self._run.resumed:
            return []
        found = self._wandb.Api().run(self._run.path)
        rows = [row for mark in _MARKS for row in found.scan_history(["_step", STEP, mark])]
        if len(rows) < self._run.step:
            raise StreamsError(f"W&B has {self._run.step} rows and shows {len(rows)} so far")
        return rows

    def write(self, rows: Sequence[Row]) -> None:
        """See `Sink`."""
        for row in lacking(self.has, rows):
            values: dict[str, Any] = {**row.tags, STEP: row.step, "_timestamp": row.at_ms / 1000}
            if row.samples:
                data = [[sample[name] for name in COLUMNS] for sample in row.samples]
                values["samples"] = self._wandb.Table(columns=list(COLUMNS), data=data)
            self._run.log(values, step=self._next, commit=True)
            self._next += 1

    def close(self) -> None:
        """Wait until all is sent, or in its file."""
        self._run.finish()


def _written(folder: Path, run: str) -> Iterator[dict[str, Any]]:
    """The rows in the files of earlier processes."""
    import json

    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    for path in sorted(folder.glob(f"wandb/offline-run-*-{run}/run-{run}.wandb")):
        for data in records(path.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}


def records(data: bytes) -> Iterator[bytes]:
    """The whole records of a file of W&B's, which has the form of LevelDB's log; its torn end ends
    it: https://github.com/google/leveldb/blob/main/doc/log_format.md."""
    at, record = _FILE_HEADER, b""
    while at + _HEADER <= len(data):
        if (room := _BLOCK - at % _BLOCK) < _HEADER:
            at += room
            continue
        size, part = struct.unpack_from("<HB", data, at + 4)  # behind a checksum
        body = data[at + _HEADER : at + _HEADER + size]
        if not part or len(body) < size:
            return
        at += _HEADER + size
        record = body if part in (_FULL, _FIRST) else record + body
        if part in (_FULL, _LAST):
            yield record

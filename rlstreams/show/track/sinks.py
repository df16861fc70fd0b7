"""The four trackers, each by its own library: reads the rows it has of a run, and writes others.

`has` names the rows that are there (`MetricsRow.key`), read from the tracker when it is opened. A
row goes in as one piece; MLflow's file store takes it value by value, so what it has is compared by
value.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlstreams.show.metrics.rows import COLUMNS, MetricsRow, Sink, row_key
from rlstreams.streams.log.errors import ConfigError, StreamsError

MARK = "rlstreams run"  # says in a tracker which run it is
_WANDB_STEP = "optimizer_step"  # the axis: W&B's own counts rows, and evaluations come late
_WANDB_MARKS = ("step/policy_version", "evaluation/policy_version")
_BLOCK, _HEADER = 32768, 7  # bytes of a file of W&B's
_FULL, _FIRST, _LAST = 1, 2, 4  # parts of a record
_MLFLOW_MOST = 1000  # values in one request
_MLFLOW_REFUSES = re.compile(r"[^\w\-. :/]")  # in a name


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The run, as trackers show it."""

    run: str  # its id
    identity: str  # the id with a mark of the broker's: a second run of this id is another one
    folder: str
    config: Mapping[str, Any]  # resolved, by section; secrets are references
    look: str  # the command that shows its samples, steps and lineage


def lacking(has: set[str], rows: Sequence[MetricsRow]) -> Iterator[MetricsRow]:
    """Yield the rows that `has` lacks, and add them to it."""
    for row in rows:
        if row.key not in has:
            yield row
            has.add(row.key)


def _library(name: str, extra: str) -> Any:  # noqa: ANN401
    try:
        return importlib.import_module(name)
    except ImportError as err:
        raise ConfigError(
            f"{extra} needs a package that is not installed ({err}): "
            f"pip install 'rlstreams[{extra}]'"
        ) from err


class TensorBoardSink:
    """One more event file in a folder; an event, which is one record of the file, is a whole row.

    Settings: `folder`, where `{id}` is the run's id.
    """

    def __init__(self, settings: Mapping[str, str], about: About) -> None:
        """Read what is there, then begin a file. Raises ConfigError: files of another run."""
        writer = _library("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._events = _library("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = _library("tensorboard.compat.proto.summary_pb2", "tensorboard")
        folder = Path(settings["folder"].replace("{id}", about.run))
        self.has: set[str] = set()
        marks: set[str] = set()
        for event in self._read(folder):
            if not event.summary.value:
                continue
            tags = {v.tag: v.simple_value for v in event.summary.value if not v.HasField("tensor")}
            texts = {v.tag: v.tensor.string_val for v in event.summary.value}
            marks |= {text.decode() for text in texts.get(MARK, ())}
            self.has |= {row_key(event.step, tags)} - {""}
        if others := marks - {about.identity}:
            raise ConfigError(
                f"{folder} has event files of run {', '.join(sorted(others))}, and "
                f"{about.identity} would be drawn over it: name another folder"
            )
        self._writer = writer.EventFileWriter(str(folder))
        if not marks:
            config = json.dumps(about.config, indent=2)
            values = (
                self._text(MARK, about.identity),
                self._text("configuration", "    " + config.replace("\n", "\n    ")),
                self._text("look", f"`{about.look}`"),
            )
            self._add(self._events.Event(summary=self._summaries.Summary(value=values)))

    def _read(self, folder: Path) -> Iterator[Any]:
        loader = _library("tensorboard.backend.event_processing.event_file_loader", "tensorboard")
        for path in sorted(folder.glob("events.out.tfevents.*")):
            for data in loader.RawEventFileLoader(str(path)).Load():
                yield self._events.Event.FromString(data)

    def write(self, rows: Sequence[MetricsRow]) -> None:
        """See `Sink`; scalars at the row's step and time, samples as a text."""
        one = self._summaries.Summary.Value
        for row in lacking(self.has, rows):
            values = [one(tag=tag, simple_value=value) for tag, value in row.tags.items()]
            if row.samples:
                values.append(self._text("samples", _markdown(row.samples)))
            summary = self._summaries.Summary(value=values)
            at_s = row.at_ms / 1000
            self._add(self._events.Event(step=row.step, wall_time=at_s, summary=summary))
        self._writer.flush()

    def _add(self, event: Any) -> None:  # noqa: ANN401
        self._writer.add_event(event)

    def _text(self, tag: str, text: str) -> Any:  # noqa: ANN401
        """A text, as TensorBoard's text plug-in reads it."""
        tensors = _library("tensorboard.compat.proto.tensor_pb2", "tensorboard")
        return self._summaries.Summary.Value(
            tag=tag,
            metadata={"plugin_data": {"plugin_name": "text"}},
            tensor=tensors.TensorProto(dtype="DT_STRING", string_val=[text.encode()]),
        )

    def close(self) -> None:
        """End the file."""
        self._writer.close()


class MlflowSink:
    """A run of an experiment on a server or, with `file:PATH`, in a folder.

    Settings: `uri`, `experiment`.
    """

    def __init__(self, settings: Mapping[str, str], about: About) -> None:
        if settings["uri"].startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 has it requested
        mlflow = _library("mlflow", "mlflow")
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient(tracking_uri=settings["uri"])
        name = settings["experiment"] or about.run
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        runs = self._client.search_runs([experiment], f"tags.`{MARK}` = '{about.identity}'")
        if not runs:
            tags = {MARK: about.identity, "look": about.look}
            runs = [self._client.create_run(experiment, tags=tags, run_name=about.run)]
        self._run = runs[0].info.run_id
        self._client.update_run(self._run, status="RUNNING")
        self._there: set[tuple[str, int, int]] = set()  # metric, ms, step
        values: dict[tuple[int, int], dict[str, float]] = {}
        for metric in runs[0].data.metrics:
            for point in self._client.get_metric_history(self._run, metric):
                self._there.add((metric, point.timestamp, point.step))
                values.setdefault((point.timestamp, point.step), {})[metric] = point.value
        # The last value of a row is its mark: without it the row came in part.
        self.has = {row_key(step, tags) for (_, step), tags in values.items()} - {""}
        self._client.log_dict(self._run, dict(about.config), "configuration.json")

    def write(self, rows: Sequence[MetricsRow]) -> None:
        """See `Sink`; samples are files of their own, written before the row that has them."""
        new = []
        for row in lacking(self.has, rows):
            if row.samples:
                text = json.dumps(list(row.samples), indent=1, ensure_ascii=False)
                self._client.log_text(self._run, text, f"samples/{row.key.replace(' ', '-')}.json")
            tags = {_MLFLOW_REFUSES.sub("_", tag): value for tag, value in row.tags.items()}
            new += [
                self._entities.Metric(tag, tags[tag], row.at_ms, row.step)
                for tag in sorted(tags, key=lambda tag: tag.endswith("/policy_version"))
                if (tag, row.at_ms, row.step) not in self._there
            ]
        for start in range(0, len(new), _MLFLOW_MOST):
            self._client.log_batch(self._run, metrics=new[start : start + _MLFLOW_MOST])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


class TrackioSink:
    """A run of a project in Trackio's folder; `trackio sync` copies it to a Space.

    Settings: `project`, `folder` (empty: Trackio's own).
    """

    def __init__(self, settings: Mapping[str, str], about: About) -> None:
        if settings["folder"]:
            os.environ["TRACKIO_DIR"] = settings["folder"]
        self._trackio = _library("trackio", "trackio")
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        logs = storage.get_logs(settings["project"], about.identity)
        self.has = {row_key(int(log["step"]), log) for log in logs} - {""}
        self._run = self._trackio.init(
            project=settings["project"],
            name=about.identity,
            config={**about.config, "look": about.look},
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def write(self, rows: Sequence[MetricsRow]) -> None:
        """See `Sink`."""
        for row in lacking(self.has, rows):
            table = {"samples": self._trackio.Table(**_table(row))} if row.samples else {}
            self._run.log({**row.tags, **table}, step=row.step)

    def close(self) -> None:
        """Wait until all is in its file."""
        self._run.finish()


class WandbSink:
    """Settings: `project`, `entity`, `group`, `mode`; files lie in the run's folder.

    Raises:
        StreamsError: the server has rows that cannot be asked for yet.
    """

    def __init__(self, settings: Mapping[str, str], about: About) -> None:
        folder = Path(about.folder) / "track"
        folder.mkdir(parents=True, exist_ok=True)
        # Else tables on their way lie in the user's home, which a container may lack.
        os.environ.setdefault("WANDB_DATA_DIR", str(folder.absolute()))
        wandb = self._wandb = _library("wandb", "wandb")
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
        self._run.config.update(about.config, allow_val_change=True)
        self._run.define_metric(_WANDB_STEP, hidden=True)
        self._run.define_metric("*", step_metric=_WANDB_STEP)
        if not is_offline:
            written = self._served()
        self._next = 1 + max((int(row["_step"]) for row in written), default=-1)
        self.has = {row_key(int(row.get(_WANDB_STEP, 0)), row) for row in written} - {""}

    def _served(self) -> Sequence[Mapping[str, Any]]:
        """The rows that the server has."""
        if not self._run.resumed:
            return []
        found = self._wandb.Api().run(self._run.path)
        rows = [
            row for mark in _WANDB_MARKS for row in found.scan_history(["_step", _WANDB_STEP, mark])
        ]
        if len(rows) < self._run.step:
            raise StreamsError(f"W&B has {self._run.step} rows and shows {len(rows)} so far")
        return rows

    def write(self, rows: Sequence[MetricsRow]) -> None:
        """See `Sink`."""
        for row in lacking(self.has, rows):
            values: dict[str, Any] = {
                **row.tags,
                _WANDB_STEP: row.step,
                "_timestamp": row.at_ms / 1000,
            }
            if row.samples:
                values["samples"] = self._wandb.Table(**_table(row))
            self._run.log(values, step=self._next, commit=True)
            self._next += 1

    def close(self) -> None:
        """Wait until all is sent, or in its file."""
        self._run.finish()


def _written(folder: Path, run: str) -> Iterator[dict[str, Any]]:
    """The rows in the files of earlier processes."""
    messages = _library("wandb.proto.wandb_internal_pb2", "wandb")
    for path in sorted(folder.glob(f"wandb/offline-run-*-{run}/run-{run}.wandb")):
        for data in records(path.read_bytes()):
            record = messages.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}


def records(data: bytes) -> Iterator[bytes]:
    """The whole records of a file of W&B's, which has the form of LevelDB's log; its torn end ends
    it: https://github.com/google/leveldb/blob/main/doc/log_format.md."""
    at, record = _HEADER, b""
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


SINKS: Mapping[str, Callable[[Mapping[str, str], About], Sink]] = {
    "tensorboard": TensorBoardSink,
    "mlflow": MlflowSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
}
"""Sinks by their names in `[track]`."""


def _table(row: MetricsRow) -> dict[str, Any]:
    data = [[sample[name] for name in COLUMNS] for sample in row.samples]
    return {"columns": list(COLUMNS), "data": data}


def _markdown(samples: Sequence[Mapping[str, str]]) -> str:
    """A table whose cells cannot end it."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *([s[name] for name in COLUMNS] for s in samples)]
    cells = [[json.dumps(c)[1:-1].replace("|", "&#124;") for c in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)

"""What W&B's server has of a run is read when it is opened, and not sent again."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlstreams.show.track.sinks import WandbSink
from rlstreams.streams.log.errors import StreamsError
from tests.processes.track import made_rows


class Server:
    """A stand-in for the library and its server: rows of one run, which outlive their process."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.hides = 0  # so many of the newest are not to be asked for yet

    def init(self, **_: Any) -> Any:
        return SimpleNamespace(
            config={},
            define_metric=lambda *_, **__: None,
            resumed=bool(self.rows),
            step=len(self.rows),
            path="entity/p/demo-1",
            log=self.log,
            finish=lambda: None,
        )

    def log(self, values: Mapping[str, Any], *, step: int, commit: bool) -> None:
        assert commit
        self.rows.append({"_step": step, **values})

    def Api(self) -> Any:
        return SimpleNamespace(run=lambda _: SimpleNamespace(scan_history=self.scan))

    def scan(self, keys: list[str]) -> Iterator[dict[str, Any]]:
        """As W&B's: rows that have all keys."""
        for row in self.rows[: len(self.rows) - self.hides]:
            if all(key in row for key in keys):
                yield {key: row[key] for key in keys}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    library = SimpleNamespace(
        init=made.init, Api=made.Api, Settings=lambda **_: None, Table=lambda **_: None
    )
    monkeypatch.setitem(sys.modules, "wandb", library)  # type: ignore[arg-type]
    return made


def written(folder: Path, until: int | None = None) -> None:
    """By a process of its own; it ends behind row `until`."""
    settings = made_rows.settings(folder)["wandb"] | {"mode": "online"}
    sink = WandbSink(settings, made_rows.about(folder))
    for row in made_rows.rows()[:until]:
        sink.write([row])


def test_rows_that_the_server_has_are_not_sent_again(server: Server, tmp_path: Path) -> None:
    """Three processes one behind the other, each from the log's first row on."""
    for until in (5, 17, None):
        written(tmp_path, until)
    whole = made_rows.rows()
    assert [row["_step"] for row in server.rows] == list(range(len(whole)))
    assert [row["optimizer_step"] for row in server.rows] == [row.step for row in whole]


def test_rows_that_cannot_be_asked_for_yet_are_waited_for(server: Server, tmp_path: Path) -> None:
    """They would be sent twice."""
    written(tmp_path, 5)
    server.hides = 2
    with pytest.raises(StreamsError, match="W&B has 5 rows and shows 3 so far"):
        written(tmp_path)

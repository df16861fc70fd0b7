"""A worker that joins a run by itself leaves its schemas there before its first record."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rlstreams.__main__ import main
from rlstreams.schemas.avro import fingerprint, schema_text
from rlstreams.workers.bootstrap import parts as bootstrap
from rlstreams.workers.loop import runtime
from rlstreams.workers.loop.context import Context
from tests.logs import made_log
from tests.memory.bus import MemoryBus

EXAMPLE = Path(__file__).parents[3] / "infra/examples/demo.toml"
PROMPT = schema_text("Prompt")


@pytest.mark.parametrize(("alone", "published"), [(True, PROMPT), (False, None)])
def test_a_worker_publishes_its_schemas(
    monkeypatch: pytest.MonkeyPatch, alone: bool, published: str | None
) -> None:
    """Unless `up` started it, which published them with the topics."""
    log = made_log("demo")
    seen: list[str | None] = []

    def make_role(context: Context) -> object:
        seen.append(MemoryBus(log, "demo").schemas().get(fingerprint(PROMPT)))
        return SimpleNamespace(done=True, tick=None, drain=None, close=lambda: None)

    monkeypatch.setattr(bootstrap, "open_bus", lambda _config: MemoryBus(log, "demo"))
    monkeypatch.setattr(bootstrap, "make_role", make_role)
    monkeypatch.setattr(bootstrap, "await_broker", lambda *_: None)
    monkeypatch.setattr("rlstreams.workers.loop.agreement.check_alone", lambda _config: None)
    monkeypatch.setattr(runtime.Stop, "on_signals", lambda _self: None)
    monkeypatch.setattr(runtime.Stop, "when_gone", lambda _self, _owner: None)
    supervised = [] if alone else ["--owner", "up"]
    words = ["worker", "trainer", str(EXAMPLE), *supervised]
    assert main(words) == 0
    assert seen == [published]

"""What a silent server is taken for: not for one without our plugin, nor for one that refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlstreams.workers.engines.served.adapters import ADAPTERS, ask_facts
from rlstreams.workers.engines.served.http import ServerGoneError, ServerHttp
from rlstreams.workers.engines.served.plugin_delivery import PluginDelivery
from rlstreams.workers.weights import report_listener
from rlstreams.workers.weights.report_listener import (
    UNREPORTED,
    ReportListener,
    ServerPullError,
    describe,
)
from tests.servers.served import model_folder
from tests.servers.world import World

FLAVOURS = ("vllm-0.32.0", "sglang-0.5.17")
LONG_S = 60.0
SHORT_S = 0.1  # of what is known to hang


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReportListener]:
    monkeypatch.setattr(report_listener, "REPORT_GRACE_S", LONG_S)
    made = ReportListener()
    yield made
    made.close()


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_silence_is_no_absence_of_the_plugin(
    world: World, listener: ReportListener, flavour: str
) -> None:
    """Or a server that hangs would be given weights by a folder from then on."""
    server = world.serve(flavour, has_plugin=True)
    http = ServerHttp(server.url)
    facts = await ask_facts(http, LONG_S)
    model, versions = model_folder(world.folder), world.folder / "versions"
    delivery = PluginDelivery(listener, model, versions, "0", probe_s=SHORT_S)
    try:
        server.is_stuck = True
        with pytest.raises(ServerGoneError, match="no answer within"):
            await delivery.prepare(ADAPTERS[facts.kind](http, facts, LONG_S))
    finally:
        await http.close()


def test_an_answer_without_a_report_is_not_waited_for_long(
    listener: ReportListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server answers once its ranks are done: what they said by then is all that they say."""
    monkeypatch.setattr(report_listener, "REPORT_GRACE_S", 0.05)
    with listener.open(describe(1e6), kind="describe", ranks=1) as pending:
        pending.answered()
        with pytest.raises(ServerPullError, match=r"ranks \[0\] of 1 did not report to") as caught:
            pending.reports()
    assert UNREPORTED == caught.value.kind
    assert caught.value.is_silence

"""Our plugin's records in a real vLLM name the versions that the server itself would name.

vLLM from 0.32 on reports which version sampled each token, as 0.25 does not: where both are told,
they are equal, through pulls under load.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlstreams.workers.engines.base import Engine, FinishReason
from rlstreams.workers.engines.served.vllm import VllmDialect
from rlstreams.workers.engines.served.wire import Answer, spans_of
from tests.contract.engine_rigs import RealRig, collect, drive

pytestmark = pytest.mark.vllm
REQUESTS, PULLS = 12, 4


@pytest.fixture
def rig(vllm_url: str, tmp_path: Path) -> RealRig:
    return RealRig("vllm", tmp_path, stops=False, url=vllm_url)


def test_records_name_the_versions_that_the_server_names(
    rig: RealRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some requests begin before the first pull, some between pulls, none is cut."""
    set_label, read = VllmDialect.set_label, VllmDialect.answer
    told: list[tuple[Answer, Any]] = []

    async def in_both(
        self: VllmDialect, http: Any, facts: Any, label: str, within_s: float
    ) -> None:
        assert facts.keeps_records
        await set_label(self, http, facts, label, within_s)
        await http.post("/update_weight_version", {"new_version": label}, within_s)

    def compared(self: VllmDialect, found: Any) -> Answer:
        told.append((read(self, found), spans_of(found["choices"][0]["weight_versions"])))
        return told[-1][0]

    monkeypatch.setattr(VllmDialect, "set_label", in_both)
    monkeypatch.setattr(VllmDialect, "answer", compared)

    async def scenario(engine: Engine) -> None:
        running = []
        for version in range(PULLS):
            await engine.pull(rig.publish(version), rig.channel)
            running += [
                asyncio.create_task(collect(engine, rig.long_request(f"{version}/{n}/0")))
                for n in range(REQUESTS // PULLS)
            ]
            await asyncio.sleep(0.2)
        for segments in await asyncio.gather(*running):
            assert segments[-1].finish_reason is FinishReason.LENGTH

    drive(rig.engine(slots=REQUESTS), scenario)
    assert REQUESTS == len(told)
    assert all(answer.spans == spans for answer, spans in told)
    assert any(len(spans) > 1 for _, spans in told)

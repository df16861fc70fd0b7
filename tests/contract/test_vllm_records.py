"""Our plugin's records in a real vLLM name the versions that the server itself would name.

vLLM from 0.32 on reports which version sampled each token, as 0.25 does not: where both are told,
they are equal, through pulls under load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlstreams.workers.engines.base import FinishReason
from rlstreams.workers.engines.served.vllm import VllmAdapter
from rlstreams.workers.engines.served.wire import Answer, spans_of
from tests.contract.engine_rigs import RealRig, collect, driven

pytestmark = pytest.mark.vllm
REQUESTS, PULLS = 12, 4
ANSWER_S = 30.0


@pytest.fixture
def rig(vllm_url: str, tmp_path: Path) -> Iterator[RealRig]:
    made = RealRig("vllm", tmp_path, stops=False, url=vllm_url)
    yield made
    made.close()


async def test_records_name_the_versions_that_the_server_names(
    rig: RealRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of the first version stand still in the server until the next pull, so they surely
    have tokens of both; others begin between pulls; none is cut."""
    set_label, read = VllmAdapter.set_label, VllmAdapter.answer
    told: list[tuple[Answer, Any]] = []

    async def in_both(self: VllmAdapter, label: str) -> None:
        assert self.facts.keeps_records
        await set_label(self, label)
        await self.http.post("/update_weight_version", {"new_version": label}, ANSWER_S)

    def compared(found: Any) -> Answer:
        told.append((read(found), spans_of(found["choices"][0]["weight_versions"])))
        return told[-1][0]

    monkeypatch.setattr(VllmAdapter, "set_label", in_both)
    monkeypatch.setattr(VllmAdapter, "answer", staticmethod(compared))
    async with driven(rig.engine(slots=REQUESTS)) as engine:
        running = []
        for version in range(PULLS):
            await engine.pull(rig.publish(version), rig.channel)
            if version == 0:
                rig.hold()
            running += [
                asyncio.create_task(collect(engine, rig.long_request(f"{version}/{n}/0")))
                for n in range(REQUESTS // PULLS)
            ]
            await rig.until_sampling(engine)
        rig.hasten()
        for segments in await asyncio.gather(*running):
            assert segments[-1].finish_reason is FinishReason.LENGTH
    assert REQUESTS == len(told)
    assert all(answer.spans == spans for answer, spans in told)
    assert any(len(spans) > 1 for _, spans in told)

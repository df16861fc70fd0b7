"""The scenario once more, against a recording alone: no server, no weights, none of its folders.

The head of a recording says what the scenario depends on: the server's name, the model's shape, and
the hashes of the versions, from which labels are made. So a recording of any model replays here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlstreams.schemas.events import Endpoint, PolicyPublished
from rlstreams.workers.engines.served.delivery import FolderDelivery
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.engines.served.server_client import ServerClient
from rlstreams.workers.engines.served.shape import longest_sequence, read_shape
from rlstreams.workers.weights.file import FileWeightChannel
from tests.servers.recorded import Replay
from tests.servers.scenario import exercise
from tests.servers.served import settings

FILES = ("config.json", "generation_config.json")  # of a model's folder: its shape, its end tokens


def head_of(
    server: str, model: Path, experts: bool, versions: Sequence[PolicyPublished]
) -> dict[str, Any]:
    """The first line of a recording.

    Args:
        server: `sglang/0.5.17`, as the server named itself.
        experts: whether routed experts were asked for.
    """
    files = {
        name: json.loads((model / name).read_text()) for name in FILES if (model / name).exists()
    }
    return {
        "server": server,
        "experts": experts,
        "files": files,
        "versions": [[v.policy_version, v.weight_hash] for v in versions],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """How it went."""

    seen: list[str]
    recorded: list[str]
    unrecorded: list[str]  # asked, and in no recording


class NoWeights(FileWeightChannel):
    """Versions in name only: a replay loads none."""

    def pull(
        self, published: PolicyPublished, deadline_s: float
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield "nothing", torch.zeros(1)


def replay(file: Path, folder: Path) -> Replayed:
    """Drive the adapter through the scenario, with the recording as its server."""
    stand_in = Replay(file)
    try:
        engine, versions = engine_of(stand_in, folder)
        seen = asyncio.run(_exercised(engine, versions))
    finally:
        stand_in.close()
    return Replayed(seen=seen, recorded=stand_in.seen, unrecorded=stand_in.unrecorded)


def engine_of(
    stand_in: Replay, folder: Path
) -> tuple[ServedEngine, tuple[PolicyPublished, PolicyPublished]]:
    """An engine of the recording, and the versions that it was given."""
    head, model = stand_in.head, folder / "recorded-model"
    model.mkdir(parents=True, exist_ok=True)
    for name, content in head["files"].items():
        (model / name).write_text(json.dumps(content))
    kind = str(head["server"]).partition("/")[0]
    chosen, shape = settings(kind, capture_experts=head["experts"]), read_shape(model)
    server = ServerClient(stand_in.url, chosen, shape, FolderDelivery(model, folder / "versions"))
    first, second = (_published(version, weights) for version, weights in head["versions"])
    return ServedEngine(chosen, shape, longest_sequence(model), [server]), (first, second)


async def _exercised(
    engine: ServedEngine, versions: tuple[PolicyPublished, PolicyPublished]
) -> list[str]:
    await engine.start()
    try:
        return await exercise(engine, versions, NoWeights())
    finally:
        await engine.close()


def _published(policy_version: int, weight_hash: str) -> PolicyPublished:
    return PolicyPublished(
        model="recorded",
        policy_version=policy_version,
        weight_hash=weight_hash,
        epoch=1,
        instance="trainer-0",
        step=policy_version,
        num_bytes=4,
        layout="[]",
        endpoints=(Endpoint(channel="file", address="nowhere"),),
        versions_served=(policy_version,),
        published_at_ms=0,
    )

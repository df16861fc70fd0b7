"""How a running server spreads its model over processes, and the ways in which we cannot fill it.

Tensor and expert parallel ranks are filled: each says which shard it holds. Replicas of one server
(data parallel) and stages of a pipeline are not told apart by the map between layouts, so such a
server is refused when it is met, not at its first pull.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlstreams.workers.engines.served.facts import Kind, ServerFacts
from rlstreams.workers.engines.served.http import ServerError, ServerHttp

REPLICAS = "start as many servers instead and name each in engine.urls"
STAGES = "spread the model by --tensor-parallel-size (SGLang: --tp-size) instead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Processes that hold a part of the model."""

    total: int
    replicas: int = 1
    stages: int = 1  # of a vLLM only its plugin tells

    def refusal(self, kind: Kind) -> tuple[str, str]:
        """What cannot be filled, with its flag and value, and what to do; empty if all can."""
        if self.replicas > 1:
            flag = "--data-parallel-size" if kind is Kind.VLLM else "--dp-size"
            return f"{flag} {self.replicas}: weights cannot reach replicas in one server", REPLICAS
        if self.stages > 1:
            flag = "--pipeline-parallel-size" if kind is Kind.VLLM else "--pp-size"
            return f"{flag} {self.stages}: weights cannot reach stages of a pipeline", STAGES
        return "", ""


async def ask_ranks(http: ServerHttp, facts: ServerFacts, deadline_s: float) -> Ranks:
    """What the server says.

    Raises:
        ServerError: it does not answer, or not with a number.
    """
    if facts.kind is Kind.SGLANG:
        tensor, stages, replicas = (
            int(facts.settings.get(name) or 1) for name in ("tp_size", "pp_size", "dp_size")
        )
        return Ranks(total=tensor * stages * replicas, replicas=replicas, stages=stages)
    total = await _world_size(http, "true", deadline_s)
    if total == 1:
        return Ranks(total=1)
    return Ranks(total=total, replicas=total // await _world_size(http, "false", deadline_s))


async def _world_size(http: ServerHttp, with_replicas: str, deadline_s: float) -> int:
    found = await http.get(f"/get_world_size?include_dp={with_replicas}", deadline_s)
    size = found.get("world_size") if isinstance(found, dict) else None
    if not isinstance(size, int) or size < 1:
        raise ServerError(f"server {http.url}: /get_world_size answers {found!r:.80}")
    return size


def refuse(url: str, ranks: Ranks, kind: Kind) -> None:
    """
    Raises:
        ServerError: weights cannot reach all of it; names the flag, its value and what to do.
    """
    found, cure = ranks.refusal(kind)
    if found:
        raise ServerError(f"server {url} was started with {found}; {cure}")

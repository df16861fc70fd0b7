"""Every contract test runs on both kinds of cluster, and engines with one real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.buses import Cluster, KafkaCluster, MemoryCluster
from tests.servers.real import vllm_server


@pytest.fixture(scope="package")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real vLLM server on the CPU with the demo's model, started once for this folder's tests.

    Uncompiled, it starts with two thirds of the CPU seconds; `tests/sabotage` compiles.
    """
    with vllm_server(tmp_path_factory.mktemp("vllm"), **{"enforce-eager": "true"}) as url:
        yield url


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.broker)])
def cluster(request: pytest.FixtureRequest, run_id: str) -> Cluster:
    if request.param == "memory":
        return MemoryCluster(run_id)
    return KafkaCluster(request.getfixturevalue("broker"), run_id)

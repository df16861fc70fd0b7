"""Every contract test runs on both kinds of cluster."""

from __future__ import annotations

import pytest

from tests.contract.buses import Cluster, KafkaCluster, MemoryCluster


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.broker)])
def cluster(request: pytest.FixtureRequest, run_id: str) -> Cluster:
    if request.param == "memory":
        return MemoryCluster(run_id)
    return KafkaCluster(request.getfixturevalue("broker"), run_id)

"""Three nodes of Kafka in containers, for all tests of this folder; without Docker they skip."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, running_cluster
from tests.containers import UnavailableError, kafka_image


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster that is whole."""
    try:
        image = kafka_image()
    except UnavailableError as err:
        pytest.skip(f"no Kafka in containers: {err}")
    with running_cluster(image) as three:
        yield three

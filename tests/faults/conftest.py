"""One broker behind a proxy for all tests of this folder; each test begins and ends in calm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.proxied import Proxied, proxied_broker


@pytest.fixture(scope="session")
def behind_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    """The broker."""
    with proxied_broker(tmp_path_factory.mktemp("proxied")) as proxied:
        yield proxied


@pytest.fixture
def proxied(behind_proxy: Proxied) -> Iterator[Proxied]:
    """The same, in calm weather."""
    yield behind_proxy
    behind_proxy.proxy.calm()

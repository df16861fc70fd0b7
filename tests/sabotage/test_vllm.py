"""A real vLLM that is sabotaged from inside is found within one step, with server, load, sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sabotage import inside
from tests.sabotage.world import Server, sabotaged, server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("vllm")) as made:
        yield made


@pytest.mark.parametrize("kind", inside.KINDS)
async def test_sabotage_is_found_in_the_first_step(kind: str, vllm: Server, tmp_path: Path) -> None:
    """It says nothing of the sound steps before it and behind it, nor of what hardly moves a
    log-prob."""
    found = await sabotaged(vllm, tmp_path, kind)
    if kind == inside.UNSEEN:
        assert not found.said
        assert max(found.noise) < found.mean < found.limit / 100
    else:
        assert found.said, found
        assert found.mean > found.limit

"""The folder that a server without our plugin loads has the names of the model's own library."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from rlstreams.workers.engines.folder_channel import FolderChannel
from rlstreams.workers.engines.served.delivery import DeliveryOrder, FolderDelivery
from tests.families import make


class Loading:
    """A server that loads folders."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}

    async def load_folder(self, folder: str, deadline_s: float) -> None:
        """Keep what is in it."""
        self.loaded = {
            name: tensor.clone()
            for name, tensor in load_file(Path(folder) / "model.safetensors").items()
        }


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
        ("Qwen2ForCausalLM", {"tie_word_embeddings": False}),
        ("Qwen3MoeForCausalLM", {}),
        ("GptOssForCausalLM", {}),  # experts stay fused
        ("GPT2LMHeadModel", {}),  # tied, under a name of its own
        ("GPTJForCausalLM", {}),
    ],
)
def test_a_folder_has_the_names_of_the_models_own_library(
    tmp_path: Path, name: str, changes: dict[str, bool]
) -> None:
    """Also of tied weights: loaders pass over an `lm_head.weight` that the configuration ties, and
    the server would sample with the embedding that it began with."""
    given = make(name, tmp_path / "given", **changes)
    channel, server = FolderChannel(given), Loading()
    order = DeliveryOrder(
        adapter=cast("Any", server),
        published=channel.published,
        channel=cast("Any", channel),
        until_s=time.monotonic() + 60,
    )
    asyncio.run(FolderDelivery(given, tmp_path / "versions").deliver(order))
    expected = load_file(given / "model.safetensors")
    assert expected.keys() == server.loaded.keys()
    for tensor, whole in expected.items():
        assert torch.equal(whole, server.loaded[tensor]), tensor

"""The folder that a server without our plugin loads has the names of the model's own library."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlstreams.workers.engines.folder_channel import HeldWeights
from rlstreams.workers.engines.served.delivery import FolderDelivery, Order
from rlstreams.workers.model.model import weights_of


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


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_folder_has_the_names_of_the_models_own_library(tmp_path: Path, is_tied: bool) -> None:
    """Also of tied weights: loaders pass over an `lm_head.weight` that the configuration ties, and
    the server would sample with the embedding that it began with."""
    config = Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=is_tied,
    )  # fmt: skip
    model, given = Qwen2ForCausalLM(config), tmp_path / "given"
    model.save_pretrained(given)
    channel, server = HeldWeights(weights_of(model), "tiny"), Loading()
    order = Order(
        adapter=cast("Any", server),
        published=channel.published,
        channel=cast("Any", channel),
        until_s=time.monotonic() + 60,
    )
    asyncio.run(FolderDelivery(given, tmp_path / "versions").deliver(order))
    expected = load_file(given / "model.safetensors")
    assert expected.keys() == server.loaded.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, server.loaded[name]), name

"""Bodies of the HTTP requests that carry an order to a server, in the form of its own routes."""

from __future__ import annotations

import base64
import pickle

SGLANG_LOADER = "rlstreams_server.sglang.receive"
VLLM_INIT: dict[str, object] = {"init_info": {}}
VLLM_START: dict[str, object] = {}
VLLM_FINISH: dict[str, object] = {}


def vllm_update(text: str) -> dict[str, object]:
    """Body of `POST /update_weights`."""
    return {"update_info": {"order": text}}


def sglang_update(text: str, ranks: int) -> dict[str, object]:
    """Body of `POST /update_weights_from_tensor`: one payload per tensor-parallel rank.

    The route takes a pickle of (name, tensor) pairs; the order is the name, the tensor is a byte.
    """
    import torch

    content = pickle.dumps([(text, torch.zeros(1, dtype=torch.uint8))])
    return {
        "load_format": SGLANG_LOADER,
        "serialized_named_tensors": [base64.b64encode(content).decode()] * ranks,
        "flush_cache": False,
    }

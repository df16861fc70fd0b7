"""The built-in engine: a Hugging Face model in this process."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch

from rlstreams.workers.engines.decode import CacheDecoder
from rlstreams.workers.engines.local import LocalEngine
from rlstreams.workers.engines.selfcheck import check_decoding
from rlstreams.workers.model.base import CPU
from rlstreams.workers.model.folder import (
    eos_ids_of,
    num_experts_of,
    read_config,
    token_limit,
    vocab_size_of,
)
from rlstreams.workers.model.model import FLOAT32, configure_torch, load_model

ANSWER_DEADLINE_S = 60.0  # for the decode thread to take a command


class BuiltinEngine(LocalEngine):
    """Samples with a KV cache over `slots` sequences, refilled as sequences end."""

    def __init__(
        self,
        folder: Path | str,
        *,
        slots: int,
        threads: int = 1,
        capture_experts: bool = True,
        pull_deadline_s: float = 300.0,
        device: str = CPU,
        dtype: str = FLOAT32,
    ) -> None:
        """Load the model; its weights are used only after a first `pull`.

        Args:
            folder: config, safetensors; version 0 comes from there too, but by `pull`.
            threads: of torch, for the whole process.
            device: `cpu` or `cuda`.
            dtype: of the weights that are pulled, `model.dtype`.

        Raises:
            EngineError: the folder cannot be loaded, or its family cannot be decoded here.
        """
        configure_torch(threads, device)
        folder = Path(folder)
        config = read_config(folder)
        vocab_size = vocab_size_of(config)
        model = load_model(folder, dtype)
        check_decoding(model, vocab_size)
        super().__init__(
            f"builtin/transformers-{version('transformers')}",
            CacheDecoder(
                model.to(torch.device(device)),
                slots=slots,
                num_experts=num_experts_of(config),
                capture_experts=capture_experts,
            ),
            slots=slots,
            vocab_size=vocab_size,
            max_tokens=token_limit(config),
            eos_ids=eos_ids_of(folder),
            pull_deadline_s=pull_deadline_s,
            answer_deadline_s=ANSWER_DEADLINE_S,
        )

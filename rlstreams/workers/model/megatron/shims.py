"""Replacements for things that megatron-core 0.19 expects and this environment may lack.

Called before anything else of the library is imported. On a GPU the second and third alone differ
from the library, and neither changes a number: no dropout draws, and no expert is a fused kernel.

1. `torch.cuda.current_device` names the CPU where there is no GPU: rotary embedding and router ask.
2. The tracker of CUDA's random states keeps none: weights come from files, and nothing draws.
3. `te_general_gemm` is None: the router names it also where Transformer Engine is not installed.
4. Element-wise functions are not compiled: `torch.compile` at import would need a C++ compiler.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

from rlstreams.streams.log.errors import ConfigError

TESTED = "0.19."  # private names of the library are used, so another line is refused


class _NoStates:
    """A tracker that has every state and keeps none."""

    def is_initialized(self) -> bool:
        return True

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        del name
        yield


def _as_it_is(function: Any = None, **_: Any) -> Any:  # noqa: ANN401
    return _as_it_is if function is None else function


def check_installed(field: str = "trainer.backend or logprob.backend") -> str:
    """The library's version; torch is not imported.

    Args:
        field: the setting that asks for it.

    Raises:
        ConfigError: it is not installed, or of another line than the tested one.
    """
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as err:
        raise ConfigError(
            f'{field} is "megatron", but megatron-core is not installed: '
            "pip install 'rlstreams[megatron]'"
        ) from err
    if not version.startswith(TESTED):
        raise ConfigError(
            f'{field} is "megatron", but megatron-core is {version}, and only {TESTED}x is '
            "tested: install that"
        )
    return version


@cache
def use_megatron() -> str:
    """Make the library usable in this process; returns its version.

    Raises:
        ConfigError: see `check_installed`.
    """
    import torch

    version = check_installed()
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    logging.getLogger("megatron").setLevel(logging.ERROR)  # its GPTModel says that it is deprecated
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that it would like to have
        compile_, torch.compile = torch.compile, _as_it_is  # type: ignore[assignment]
        try:
            random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
        finally:
            torch.compile = compile_
        random._CUDA_RNG_STATE_TRACKER = _NoStates()
        random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
        moe: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        if not hasattr(moe, "te_general_gemm"):
            moe.te_general_gemm = None
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    return version

"""Check that our masks and our cache give a model's own answers: measured when it is loaded.

A family may keep state that our cache does not hold or read a mask in its own way, and no list of
families would stay true. So a few tokens take the path of a run, padded beside others and joining
at different times, and are compared with the model's plain forward over each sequence alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstreams.workers.engines.base import SampleRequest, Sampling
from rlstreams.workers.engines.decode import CacheDecoder, Generation
from rlstreams.workers.engines.routing_check import check_replay
from rlstreams.workers.model.attention import attention_of
from rlstreams.workers.model.base import CPU, REFUSALS, EngineError
from rlstreams.workers.model.families import LINEAR
from rlstreams.workers.model.folder import read_config, vocab_size_of
from rlstreams.workers.model.model import load_model, right_padded
from rlstreams.workers.model.routes import RouterShape
from rlstreams.workers.model.token_scores import MakeMask, TokenScorer

TOLERANCE = 1e-3  # nats; float32 differs by 1e-5, a wrong mask by 0.1 and more
TOLERANCE_LOW = 0.2  # in 16 bits, where results differ by some hundredths: small mistakes pass
_ROUNDINGS = 2.0  # of the largest logit, in 16 bits: bfloat16's next number after 40 is 40.25
_PROMPTS = ((3, 5, 7, 4), (6,), (4, 4, 5))
_NEW_TOKENS = 4
_CHECK_THREADS = 8  # at most; several roles of a run start at once


def check_decoding(model: torch.nn.Module, vocab_size: int) -> None:
    """Decode a little with the cache, and compare.

    Raises:
        EngineError: the log-probs differ, or the model cannot take our mask or cache.
    """
    if attention_of(model).has_states:
        raise EngineError(
            f"the built-in engine cannot decode a {_kind(model)}: its layers of kind "
            f"{LINEAR} carry a state that the engine's cache does not hold; such a model can be "
            "scored and trained, but not sampled here"
        )
    _compare(lambda: decoding_difference(model, vocab_size), model, "decode", "with a cache")


def check_scoring(model: torch.nn.Module, vocab_size: int) -> MakeMask:
    """Score a padded batch, and compare; returns the function that makes the model's masks.

    Raises:
        EngineError: the log-probs differ, or the model cannot take our mask.
    """
    attention = attention_of(model)

    def check(mask: MakeMask) -> None:
        _compare(
            lambda: padding_difference(model, vocab_size, mask), model, "score or train", "padded"
        )

    check(attention.causal)
    try:
        check(attention.right_padded)
    except EngineError:  # the library takes no mask for something else than plain causality
        return attention.causal
    return attention.right_padded


def load_scorer(
    folder: Path, dtype: str, device: str, *, replay_routes: bool = False
) -> tuple[TokenScorer, RouterShape | None]:
    """Load the scorer of a folder's model; checked on the CPU, then moved to `device`.

    Args:
        replay_routes: whether tokens come with experts to take.

    Returns:
        The scorer, and the shape that routes must fit; None: none are replayed.

    Raises:
        EngineError: the model cannot be loaded, or cannot be scored here, or not along given
            routes.
    """
    model, vocab_size = load_model(folder, dtype), vocab_size_of(read_config(folder))
    with _threads_of_check(device):
        mask = check_scoring(model, vocab_size)
        routers = check_replay(model, vocab_size) if replay_routes else None
    return TokenScorer(model.to(device), mask), routers


@contextmanager
def _threads_of_check(device: str) -> Iterator[None]:
    """Give a role that computes on a GPU more threads in the block: its only large work on the CPU,
    of which each start and restart waits for the whole model's forward several times."""
    threads = torch.get_num_threads()
    if device != CPU:
        torch.set_num_threads(max(threads, min(_CHECK_THREADS, os.cpu_count() or 1)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def decoding_difference(model: torch.nn.Module, vocab_size: int) -> float:
    """Largest difference between log-probs of the decode loop and of plain forwards, nats."""
    decoder = CacheDecoder(model, slots=len(_PROMPTS), num_experts=0, capture_experts=False)
    generations = [_generation(prompt, vocab_size) for prompt in _PROMPTS]
    decoder.admit(generations[:1])
    decoder.step()
    decoder.admit(generations[1:])
    for _ in range(_NEW_TOKENS - 2):
        decoder.step()
    return max(
        float((plain[-len(g.logprobs) :] - torch.tensor(g.logprobs)).abs().max())
        for g in generations
        for plain in [_plain(model, g.token_ids)]
    )


@torch.inference_mode()
def padding_difference(
    model: Any,  # noqa: ANN401  (an untyped library)
    vocab_size: int,
    mask: MakeMask,
) -> float:
    """Largest difference between log-probs of a right-padded batch and of plain forwards, nats."""
    sequences = [[token % vocab_size for token in (*prompt, 3)] for prompt in _PROMPTS]
    ids_BT, real_BT = right_padded(sequences, pad_id=0)
    logits_BTV = model(
        input_ids=ids_BT,
        attention_mask=mask(real_BT),
        position_ids=torch.arange(ids_BT.shape[1]).expand_as(ids_BT),
        use_cache=False,
    ).logits
    return max(
        float((_taken(logits_TV, sequence) - _plain(model, sequence)).abs().max())
        for logits_TV, sequence in zip(logits_BTV, sequences, strict=True)
    )


def _compare(difference: Callable[[], float], model: Any, verb: str, how: str) -> None:  # noqa: ANN401
    try:
        found = difference()
    except REFUSALS as err:
        raise EngineError(
            f"cannot {verb} a {_kind(model)} here: its forward does not take our masks or cache: "
            f"{type(err).__name__}: {err}"
        ) from err
    tolerance = _tolerance(model)
    if not found <= tolerance:  # NaN too
        raise EngineError(
            f"cannot {verb} a {_kind(model)} here: {how} its log-probs are up to {found:.2g} nats "
            f"off those of its plain forward (allowed: {tolerance:g})"
        )


@torch.inference_mode()
def _tolerance(model: Any) -> float:  # noqa: ANN401
    """Largest allowed difference of log-probs of the same tokens, nats."""
    dtype = next(model.parameters()).dtype
    if dtype == torch.float32:
        return TOLERANCE
    logits = model(input_ids=torch.ones(1, 1, dtype=torch.int64), use_cache=False).logits
    return max(TOLERANCE_LOW, _ROUNDINGS * torch.finfo(dtype).eps * float(logits.abs().max()))


def _generation(prompt: tuple[int, ...], vocab_size: int) -> Generation:
    token_ids = np.array(prompt, np.int32) % vocab_size
    request = SampleRequest(
        sample_id=f"check-{len(prompt)}",
        group_id="check",
        token_ids=token_ids,
        prompt_tokens=len(token_ids),
        sampling=Sampling(max_new_tokens=_NEW_TOKENS),
        seed=0,
    )
    return Generation.of(request, max_tokens=len(token_ids) + _NEW_TOKENS)


@torch.inference_mode()
def _plain(model: Any, token_ids: Sequence[int]) -> torch.Tensor:  # noqa: ANN401
    """Log-probs of all tokens but the first, by the library alone."""
    ids_BT = torch.tensor([list(token_ids)])
    return _taken(model(input_ids=ids_BT, use_cache=False).logits[0], token_ids)


def _taken(logits_TV: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    ids_T = torch.tensor(list(token_ids))
    logprobs_TV = torch.log_softmax(logits_TV[: len(ids_T) - 1].float(), -1)
    return logprobs_TV.gather(-1, ids_T[1:, None])[:, 0]


def _kind(model: Any) -> str:  # noqa: ANN401
    return str(model.config.model_type)

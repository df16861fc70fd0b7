"""What every engine and scorer refuses before it computes: ids and lengths that cannot be."""

from __future__ import annotations

from rlstreams.workers.engines.base import Int32s, PromptTooLongError, SampleRequest
from rlstreams.workers.model.base import EngineError


def check_ids(token_ids: Int32s, vocab_size: int, what: str) -> None:
    """Every id lies in the vocabulary.

    Raises:
        EngineError: one does not, or there are none; names position and id.
    """
    if not len(token_ids):
        raise EngineError(f"{what}: token_ids is empty")
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if outside.any():
        position = int(outside.argmax())
        raise EngineError(
            f"{what}: token_ids[{position}] = {token_ids[position]} is outside the vocabulary of "
            f"{vocab_size}"
        )


def check_request(request: SampleRequest, vocab_size: int, max_tokens: int) -> None:
    """A request can be sampled.

    Raises:
        PromptTooLongError: no room for a single token; names length and limit.
        EngineError: ids outside the vocabulary, or a field out of its range.
    """
    what = f"request {request.sample_id}"
    check_ids(request.token_ids, vocab_size, what)
    num_tokens, sampling = len(request.token_ids), request.sampling
    if num_tokens >= max_tokens:
        raise PromptTooLongError(
            f"{what}: {num_tokens} tokens leave no room for an answer: the limit is {max_tokens}"
        )
    if not 0 < request.prompt_tokens <= num_tokens:
        raise EngineError(
            f"{what}: prompt_tokens must be in 1..{num_tokens}, got {request.prompt_tokens}"
        )
    if sampling.max_new_tokens < 1:
        raise EngineError(f"{what}: max_new_tokens must be above 0, got {sampling.max_new_tokens}")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise EngineError(f"{what}: temperature, top_p or top_k is out of range: {sampling}")

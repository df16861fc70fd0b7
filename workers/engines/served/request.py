"""From a sample to a server's request: identity, seed and room. Pure but for the id."""

from __future__ import annotations

import hashlib
import uuid

from rlstreams.workers.engines.base import SampleRequest
from rlstreams.workers.engines.served.answer import ModelShape
from rlstreams.workers.engines.served.settings import ServedSettings
from rlstreams.workers.engines.served.wire import GenerateRequest


def generate_request(
    request: SampleRequest,
    settings: ServedSettings,
    shape: ModelShape,
    max_tokens: int,
    salt: str,
) -> GenerateRequest:
    """The request that continues `request.token_ids`.

    A resumed sample gets a seed of its own position: the server starts its generator anew, and the
    numbers that drew the first tokens must not draw the later ones too.
    """
    num_tokens = len(request.token_ids)
    sampling = request.sampling
    is_resumed = num_tokens > request.prompt_tokens
    wants_experts = settings.capture_experts and shape.num_experts > 0
    return GenerateRequest(
        request_id=uuid.uuid4().hex,
        token_ids=request.token_ids.tolist(),
        max_new_tokens=room(request, max_tokens),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed_of(request.seed, request.sample_id, num_tokens),
        stop_token_ids=sorted(shape.eos_ids),
        experts_start=(num_tokens - 1 if is_resumed else 0) if wants_experts else None,
        salt=salt,
    )


def room(request: SampleRequest, max_tokens: int) -> int:
    """Tokens that may still be sampled; 0 or below: none."""
    limit = min(max_tokens, request.prompt_tokens + request.sampling.max_new_tokens)
    return limit - len(request.token_ids)


def seed_of(seed: int, sample_id: str, position: int) -> int:
    """31 bits: all that every server's generator takes."""
    key = f"{seed}/{sample_id}/{position}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") >> 1

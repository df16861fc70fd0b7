"""What a verifier is given of a session: the last answer of its chain, and all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from rlstreams.streams.sessions.chain import Chain
from rlstreams.workers.sandbox.reward import STOP, Sample


def sample_of_chain(
    chain: Chain, text: str, answer: str, metadata: str, decode: Callable[[Sequence[int]], str]
) -> Sample:
    """The sample of a chain, to be judged.

    Args:
        text, answer, metadata: of its prompt.
        decode: special tokens are left out.

    Raises:
        schemas.TensorError: tokens that cannot be read.
        ValueError: metadata that is no JSON.
    """
    answers = [
        [token for segment in call.segments for token in segment.token_ids.numpy().tolist()]
        for call in chain.calls
    ]
    cut = chain.calls[-1].finish_reason == "length"
    return Sample(
        prompt=text,
        completion=decode(answers[-1]),
        answer=answer,
        metadata=json.loads(metadata or "{}"),
        finish_reason="length" if cut else STOP,
        token_ids=answers[-1],
        transcript=[{"author": "policy", "text": decode(ids)} for ids in answers],
    )

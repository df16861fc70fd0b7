"""Runs a user's `async def` of (task, client) in a process of the sandbox.

Loaded by path there (`sandbox/program.py`), so this file imports nothing of ours. The parameters
are those that a sandbox calls a function with: a task, where the gateway is, and the key.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

SAID_NOTHING = "rlstreams said nothing"  # a part: the agent returned no reward


async def run(
    prompt: str,
    completion: str,
    answer: str,
    metadata: dict[str, Any],
    *,
    inner: Callable[..., Awaitable[Any]],
    options: dict[str, Any],
) -> Any:  # noqa: ANN401
    """Run the agent; return its reward, as a reward function does, or `SAID_NOTHING` as a part.

    Args:
        prompt: the task, JSON.
        completion: `OPENAI_BASE_URL`.
        answer: `OPENAI_API_KEY`.
        metadata: unused.
        inner: the user's function.
        options: keyword arguments for it.
    """
    del metadata
    client = _client().with_options(base_url=completion, api_key=answer)
    returned = await inner(json.loads(prompt), client, **options)
    if returned is None:
        return 0.0, {SAID_NOTHING: 1.0}
    if isinstance(returned, float) and not math.isfinite(returned):
        raise ValueError(f"the agent returned {returned}, which is no reward")
    return returned


@functools.cache
def _client() -> Any:  # noqa: ANN401
    """The client of this process: connections are shared, the key is each session's own."""
    import openai

    return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", timeout=600.0)

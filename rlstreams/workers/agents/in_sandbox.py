"""Runs a user's `async def` of (task, client) in a process of the sandbox.

Loaded by path there (`sandbox/program.py`), so this file imports nothing of ours. The parameters
are those that a sandbox calls a function with: a task, where the gateway is, and the key.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

SAID_NOTHING = "rlstreams said nothing"  # a part: the agent returned no reward


async def run(
    prompt: str,
    completion: str,
    answer: str,
    metadata: dict[str, Any],
    *,
    place: str,
    options: dict[str, Any],
) -> Any:  # noqa: ANN401
    """Run the agent; return its reward, as a reward function does, or `SAID_NOTHING` as a part.

    Args:
        prompt: the task, JSON.
        completion: `OPENAI_BASE_URL`.
        answer: `OPENAI_API_KEY`.
        metadata: unused.
        place: `file.py:function` or `module:function`.
        options: keyword arguments for it.
    """
    del metadata
    client = _client().with_options(base_url=completion, api_key=answer)
    returned = await agent_at(place)(json.loads(prompt), client, **options)
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


@functools.cache
def agent_at(place: str) -> Callable[..., Awaitable[Any]]:
    """The user's function; modules beside its file can be imported by it."""
    where, _, name = place.rpartition(":")
    if where.endswith(".py"):
        sys.path.insert(0, str(Path(where).parent))
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        sys.path.append(str(Path.cwd()))
        module = importlib.import_module(where)
    found: Callable[..., Awaitable[Any]] = getattr(module, name)
    return found

"""The verifier `judge`: a model behind a server gives the reward; its words stay with the sample.

The server speaks OpenAI's chat completions, as vLLM's and SGLang's do. Loaded by path in a child
process (`sandbox/program.py`), so this file imports nothing of ours.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import jinja2

PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0  # between two requests to a server that is away, growing
TEMPLATE = """\
Grade an answer.

Question:
{{ prompt }}

Reference:
{{ answer }}

Answer to be graded:
{{ completion }}

Say in two sentences whether the answer is right. End with a line that is only a number from 0
(wrong) to 1 (right)."""
_NUMBER = re.compile(r"[-+]?\d*\.?\d+")
_SHOWN = 200  # characters of a reply in a message


class JudgeError(Exception):
    """The judge answered, and no other attempt would fare better."""


class AwayError(Exception):
    """The server is away or too busy; another request may fare better."""

    def __init__(self, message: str, *, is_queued: bool = False) -> None:
        """Args: is_queued: the server waits for its device, and takes the request at once."""
        super().__init__(message)
        self.is_queued = is_queued


async def judge(
    prompt: str,
    completion: str,
    answer: str,
    metadata: dict[str, Any],
    *,
    url: str,
    model: str,
    template_file: str = "",
    parse: str = "",
    api_key: str = "",
    temperature: float = 0.0,
    max_tokens: int = 512,
    patience_s: float,
    timeout_s: float,
) -> tuple[float, dict[str, Any]]:
    """The number that the judge's reply ends with, and the reply as the note.

    Args:
        url: of the server; `/v1/chat/completions` is added.
        model: as the server names it.
        template_file: Jinja, of `prompt`, `completion`, `answer`, `metadata`; empty: `TEMPLATE`.
        parse: `file.py:function` of the reply, which returns what a reward function may; empty: a
            number from 0 to 1 on the last line.
        patience_s: for how long a server that is away, or too busy, is asked again.
        timeout_s: of one request.

    Raises:
        JudgeError: the server refuses the request, or the reply is cut or has no number.
        AwayError: the server was away for `patience_s`.
    """
    text = _template(template_file).render(
        prompt=prompt, completion=completion, answer=answer, metadata=metadata
    )
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": temperature,
        "max_tokens": max_tokens,
    }
    place = f"{url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    choice = await _ask_again(patience_s, lambda: _ask(place, asked, headers, timeout_s))
    reply = str(choice["message"].get("content") or "")
    if choice.get("finish_reason") == "length":
        raise JudgeError(f"judge {model}: its reply was cut at max_tokens = {max_tokens}")
    found = _parser(parse)(reply)
    reward, parts = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    if isinstance(reward, dict):
        return {**reward, "note": reply}  # type: ignore[return-value]  # judged by `reply_of`
    return reward, {**parts, "note": reply}


async def _ask_again(
    patience_s: float, ask: Callable[[], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """The result of `ask`, once the server takes a request.

    Raises:
        AwayError: it was away for `patience_s`.
    """
    until_s, pause_s = time.monotonic() + patience_s, PAUSE_S
    while True:
        try:
            return await ask()
        except AwayError as err:
            if time.monotonic() + pause_s > until_s:
                raise AwayError(f"{err}; asked again for {patience_s:g} s") from None
            if err.is_queued:
                pause_s = PAUSE_S / 2
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _ask(
    place: str, asked: dict[str, Any], headers: dict[str, str], timeout_s: float
) -> dict[str, Any]:
    """The first choice of a reply.

    Raises:
        AwayError: no connection, no answer in time, 429 or a status from 500 on.
        JudgeError: any other status, or an answer that is no completion.
    """
    limit = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with _session().post(place, json=asked, headers=headers, timeout=limit) as response:
            body = await response.text()
            if response.status == 429 or response.status >= 500:
                text = f"judge {place} answered {response.status}: {body[:_SHOWN]}"
                raise AwayError(text, is_queued=response.headers.get("Retry-After") == "0")
            if response.status != 200:
                raise JudgeError(f"judge {place} answered {response.status}: {body[:_SHOWN]}")
            choice: dict[str, Any] = (await response.json())["choices"][0]
            choice["message"].get("content")
            return choice
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as err:
        why = str(err) or f"no answer within {timeout_s:g} s"
        raise AwayError(f"judge {place} cannot be reached: {why}") from None
    except (aiohttp.ContentTypeError, ValueError, LookupError, TypeError, AttributeError) as err:
        raise JudgeError(f"judge {place} sent no chat completion: {err!r}") from None


@functools.cache
def _session() -> aiohttp.ClientSession:
    """The HTTP session of this process, whose one event loop lives as long."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


@functools.cache
def _template(file: str) -> jinja2.Template:
    text = Path(file).read_text(encoding="utf-8") if file else TEMPLATE
    return jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False).from_string(text)


@functools.cache
def _parser(name: str) -> Callable[[str], Any]:
    if not name:
        return last_number
    file, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[str], Any] = getattr(module, function)
    return found


def last_number(reply: str) -> float:
    """The number on the reply's last line.

    Raises:
        JudgeError: there is none, or several, or it is not from 0 to 1.
    """
    lines = reply.strip().splitlines()
    found = _NUMBER.findall(lines[-1]) if lines else []
    # "0 out of 1" and "50 %" are ambiguous.
    if len(found) != 1 or "%" in lines[-1] or not 0 <= float(found[0]) <= 1:
        raise JudgeError(
            f"the judge's reply does not end with one number from 0 to 1: ...{reply[-_SHOWN:]!r}; "
            "ask for one in template_file, or read another form by `parse`"
        )
    return float(found[0])

"""Clients of `agent_sessions`: sessions of several turns, at a run's gateway or a bare server.

    python tests/gpu/agent_client.py SPEC.json OUT.json

A process of its own, without rlstreams: what a user's program is. `SPEC` has `runners` (files of a
gateway, where messages are sent) or `url` and `body` (of a server's route for token ids), `words`
of one token each with their `ids`, `sessions` at once, `turns`, `prompt` and `tokens` (most of an
answer), `seed`, and `until_s` of the wall clock. `OUT` gets each answered call as [end, seconds,
tokens], and how often a client was told to come again.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

AGAIN = (429, 503)
LIMIT_S = 300.0


class Clients:
    """All of this process.

    Args:
        spec: as above.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self.calls: list[tuple[float, float, int]] = []
        self.again: dict[str, int] = {}
        self.sessions = 0

    async def run(self) -> None:
        """As many at once as asked, until the time is over."""
        limits = aiohttp.ClientTimeout(total=LIMIT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=limits) as http:
            tasks = [
                asyncio.create_task(self._sessions(http, number))
                for number in range(self._spec["sessions"])
            ]
            _, pending = await asyncio.wait(tasks, timeout=self._spec["until_s"] - time.time())
            for task in pending:
                task.cancel()
            failed = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [e for e in failed if e and not isinstance(e, asyncio.CancelledError)]
        if errors:
            raise errors[0]

    async def _sessions(self, http: aiohttp.ClientSession, number: int) -> None:
        for turn in count():
            await self._session(http, random.Random(f"{self._spec['seed']}/{number}/{turn}"))

    async def _session(self, http: aiohttp.ClientSession, draw: random.Random) -> None:
        if self._spec.get("url"):
            await self._at_server(http, draw)
        else:
            await self._at_gateway(http, draw)
        self.sessions += 1

    async def _at_gateway(self, http: aiohttp.ClientSession, draw: random.Random) -> None:
        spec, given = self._spec, await self._opened(http, draw)
        headers = {"authorization": f"Bearer {given['api_key']}"}
        url, messages = given["base_url"], list[dict[str, str]]()
        for num, most in self._turns(draw):
            words = " ".join(spec["words"][place] for place in self._places(draw, num))
            messages.append({"role": "user", "content": words})
            body = {"model": "policy", "messages": messages, "max_tokens": most}
            with self._timed() as note:
                told = await self._post(http, url + "/chat/completions", body, headers)
                note(told["usage"]["completion_tokens"])
            said = told["choices"][0]["message"]["content"] or ""
            messages.append({"role": "assistant", "content": said})
        reward = {"reward": float(draw.random() < 0.5)}
        await self._post(http, url + "/outcome", reward, headers)
        await self._post(http, url + "/close", {"kind": "ended"}, headers)

    async def _at_server(self, http: aiohttp.ClientSession, draw: random.Random) -> None:
        spec, ids = self._spec, list[int]()
        for num, most in self._turns(draw):
            ids += [spec["ids"][place] for place in self._places(draw, num)]
            sampling = spec["body"]["sampling_params"] | {
                "max_tokens": most, "seed": draw.getrandbits(31)
            }  # fmt: skip
            names = {"request_id": f"{draw.getrandbits(64):x}", "token_ids": ids}
            body = spec["body"] | names | {"sampling_params": sampling}
            with self._timed() as note:
                told = await self._post(http, spec["url"], body, {})
                note(len(told["choices"][0]["token_ids"]))
            ids = ids + told["choices"][0]["token_ids"]

    def _turns(self, draw: random.Random) -> Iterator[tuple[int, int]]:
        """New words of each turn, and the most tokens of its answer."""
        spec = self._spec
        for turn in range(spec["turns"]):
            yield (
                spec["prompt"] // 10 if turn else spec["prompt"],
                draw.randint(spec["tokens"] // 4, spec["tokens"]),
            )

    def _places(self, draw: random.Random, num: int) -> list[int]:
        return [draw.randrange(len(self._spec["words"])) for _ in range(num)]

    @contextmanager
    def _timed(self) -> Iterator[Callable[[int], None]]:
        """Around a call: it notes the tokens of its answer."""
        began_s = time.time()

        def note(tokens: int) -> None:
            ended_s = time.time()
            self.calls.append((ended_s, ended_s - began_s, tokens))

        yield note

    async def _opened(self, http: aiohttp.ClientSession, draw: random.Random) -> dict[str, str]:
        while True:
            told = read(draw.choice(self._spec["runners"]))
            asked = {"authorization": f"Bearer {told['key']}"}
            async with http.post(told["url"] + "?wait_s=20", headers=asked) as answer:
                if answer.status == 200:
                    return await answer.json()  # type: ignore[no-any-return]
                await self._told_again(answer, "session")

    async def _post(
        self, http: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any]:
        name = url.rpartition("/")[2]
        while True:
            try:
                async with http.post(url, json=body, headers=headers) as answer:
                    if answer.status == 200:
                        return await answer.json()  # type: ignore[no-any-return]
                    await self._told_again(answer, name)
            except aiohttp.ClientConnectionError:  # its worker starts again
                await self._again(f"{name} refused", 0.5)

    async def _told_again(self, answer: aiohttp.ClientResponse, what: str) -> None:
        if answer.status != 204 and answer.status not in AGAIN:
            raise RuntimeError(f"{what}: {answer.status} {(await answer.text())[:500]}")
        wait_s = float(answer.headers.get("retry-after", "0.1"))
        await self._again(f"{what} {answer.status}", wait_s)

    async def _again(self, why: str, wait_s: float) -> None:
        self.again[why] = self.again.get(why, 0) + 1
        await asyncio.sleep(wait_s)


def read(file: str) -> dict[str, Any]:
    """A file of JSON."""
    return json.loads(Path(file).read_text())  # type: ignore[no-any-return]


def main() -> None:
    """Read, run, write."""
    spec = read(sys.argv[1])
    clients = Clients(spec)
    began_s = time.process_time()
    asyncio.run(clients.run())
    told = {"calls": clients.calls, "again": clients.again, "sessions": clients.sessions}
    told["cpu_s"] = round(time.process_time() - began_s, 2)
    Path(sys.argv[2]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()

"""A runner of a remote agent, on any machine: takes sessions, and works on N of them at once.

python remote.py N runner.json ...    # a file of each rollout worker, copied from the run's folder
"""

import asyncio
import json
import sys
import urllib.request
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import openai
from solver import solve


def ask(file):
    """The next session of a worker; None: there is none by now."""
    told = json.loads(Path(file).read_text())  # anew each time: a worker may start at another port
    request = urllib.request.Request(told["url"] + "?wait_s=20", b"", method="POST")
    request.add_header("authorization", "Bearer " + told["key"])
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer) if answer.status == 200 else None


async def work(given):
    """Work on a session, say what it earned, and how it ended."""
    async with openai.AsyncOpenAI(base_url=given["base_url"], api_key=given["api_key"]) as client:
        beating = asyncio.create_task(beat(client, given["lease_s"] / 3))
        said = {"kind": "ended"}
        try:
            reward, parts = await asyncio.wait_for(solve(given["task"], client), given["timeout_s"])
            await client.post("/outcome", body={"reward": reward, "parts": parts}, cast_to=object)
        except Exception as err:  # noqa: BLE001 - whatever it was, it was the agent's
            said = {"kind": "agent", "detail": repr(err)}
        beating.cancel()
        with suppress(openai.APIError):  # 410: it is over, or another runner's
            await client.post("/close", body=said, cast_to=object)


async def beat(client, every_s):
    """While a tool runs for long no call is made: say that the session is still worked on."""
    while True:
        await asyncio.sleep(every_s)
        with suppress(openai.APIError):
            await client.post("/heartbeat", cast_to=object)


async def run(file):
    """One session after the other, until somebody ends this program."""
    while True:
        try:
            given = await asyncio.to_thread(ask, file)
        except OSError as err:  # the worker starts, ends, is busy; 401: the file is of another run
            print(f"{file}: {err}", file=sys.stderr)
            await asyncio.sleep(5)
            continue
        if given is not None:
            await work(given)


async def main(num, *files):
    """So many side by side."""
    await asyncio.gather(*(run(file) for file, _ in zip(cycle(files), range(int(num)))))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

"""An agent in four forms, which writes down what it asks and what it hears before it goes on.

    agent_program.py own NOTES                    # a command, for each start of a session
    agent_program.py:solve                        # a function, many sessions in a process
    agent_program.py away|guest RUN NOTES NUM     # runners; clients from outside

The standard library alone: it runs in processes that know nothing of this project. Notes are lines
of JSON, [what, session, turn, milliseconds, call, text]: `asks` before a request is sent, `heard`
with its answer, `unsent` if the gateway cannot have taken it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

TURNS = 4
PAUSE_S = 0.05  # what a tool would take
AGAIN_S = 0.2
RETRIES = {"own": 0, "away": 2, "guest": 600}
REFUSED = (401, 410, 429, 503)  # by a gateway that has not sampled


class OverError(Exception):
    """The session is over, or somebody else's."""


class Notes:
    """Lines in a file that many processes write to."""

    def __init__(self, file: str | Path) -> None:
        self._file = file

    def add(self, what: str, session: str, turn: int, call: str = "", text: str = "") -> None:
        """Write a line, whole."""
        line = json.dumps([what, session, turn, time.time_ns() // 1_000_000, call, text]) + "\n"
        fd = os.open(self._file, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)
        os.write(fd, line.encode())
        os.close(fd)


def asked(turn: int, prompt: str) -> dict[str, str]:
    """The message of a turn."""
    return {"role": "user", "content": prompt if turn == 0 else f"{turn}+{turn}="}


def reward_of(said: str) -> float:
    """Any number that follows from the answer alone."""
    return float(len(said) % 3)


def post(url: str, key: str, body: object, tried: int = 0) -> Any:
    """The answer of one request; raises OSError."""
    headers = {"authorization": f"Bearer {key}", "x-stainless-retry-count": str(tried)}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read()
        return json.loads(text) if text else None


def patient(url: str, key: str, body: object, retries: int) -> None:
    """Send it until it is taken; raises OverError."""
    for tried in range(retries + 1):
        try:
            post(url, key, body, tried)
        except urllib.error.HTTPError as err:
            if err.code not in (429, 503):
                raise OverError(err.code) from None
        except OSError:
            pass
        else:
            return
        time.sleep(AGAIN_S)
    raise OverError("no answer")


def work(notes: Notes, session: str, prompt: str, url: str, key: str, retries: int) -> None:
    """A session from its first turn to its reward; raises OverError."""
    messages: list[dict[str, str]] = []
    for turn in range(TURNS):
        messages.append(asked(turn, prompt))
        said = turn_of(notes, session, turn, messages, url, key, retries)
        messages.append({"role": "assistant", "content": said})
        time.sleep(PAUSE_S)
    patient(f"{url}/outcome", key, {"reward": reward_of(said)}, retries)


def turn_of(
    notes: Notes, session: str, turn: int, messages: object, url: str, key: str, retries: int
) -> str:
    """What the policy says; raises OverError."""
    for tried in range(retries + 1):
        notes.add("asks", session, turn)
        try:
            answer = post(f"{url}/chat/completions", key, {"messages": messages}, tried)
        except urllib.error.HTTPError as err:
            if err.code in REFUSED:
                notes.add("unsent", session, turn)
            if err.code not in (429, 503):
                raise OverError(err.code) from None
        except urllib.error.URLError as err:
            if isinstance(err.reason, ConnectionRefusedError):
                notes.add("unsent", session, turn)
        except OSError:
            pass
        else:
            said: str = answer["choices"][0]["message"]["content"]
            notes.add("heard", session, turn, answer["id"].rpartition("-")[2], said)
            return said
        time.sleep(AGAIN_S)
    raise OverError("no answer")


async def solve(task: Any, client: Any, *, notes: str) -> float:
    """The same as a function, with the client of OpenAI as it is given."""
    own, client = Notes(notes), client.with_options(max_retries=0)
    messages: list[dict[str, str]] = []
    for turn in range(TURNS):
        messages.append(asked(turn, task["prompt"]))
        own.add("asks", task["session"], turn)
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content
        own.add("heard", task["session"], turn, answer.id.rpartition("-")[2], said)
        messages.append({"role": "assistant", "content": said})
        await asyncio.sleep(PAUSE_S)
    return reward_of(said)


def sent(notes: Notes, kind: str, file: Path) -> None:
    """One session of a worker, where it has one to give."""
    told = json.loads(file.read_text())  # anew: its worker may start at another port
    query = "?wait_s=5" + ("&group=g" if kind == "guest" else "")
    given = post(told["url"] + query, told["key"], {})
    if given is None:
        return
    url, key, retries = given["base_url"], given["api_key"], RETRIES[kind]
    prompt = given["task"]["prompt"] if "task" in given else "3+4="
    work(notes, given["session"], prompt, url, key, retries)
    patient(f"{url}/close", key, {"kind": "ended"}, retries)


def serve(notes: Notes, kind: str, file: Path) -> None:
    """One session after the other, until somebody ends this program."""
    while True:
        try:
            sent(notes, kind, file)
        except (OSError, ValueError, OverError):
            time.sleep(AGAIN_S)


def main(kind: str, *words: str) -> None:
    """Work on one session, or on all that come."""
    if kind == "own":
        task = json.loads(Path(os.environ["RLSTREAMS_TASK"]).read_text())
        url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
        work(Notes(words[0]), task["session"], task["prompt"], url, key, RETRIES[kind])
        return
    run, notes, num = words
    name = {"away": "runner.json", "guest": "clients.json"}[kind]
    for worker in range(int(num)):
        file = Path(run) / f"agents/rollout-{worker}/{kind}/{name}"
        for _ in range(2):
            threading.Thread(target=serve, args=(Notes(notes), kind, file)).start()


if __name__ == "__main__":
    main(*sys.argv[1:])

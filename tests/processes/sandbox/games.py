"""Environments of small games, for tests."""

from __future__ import annotations

from collections.abc import Callable

from rlstreams.workers.sandbox.environment import PolicyTurn, UserEnvironment, UserEpisode
from tests import factories

DEADLINE_S = 120.0
PLAIN = """
import os, time

class Game:
    def __init__(self, prompt, answer, metadata, *, word="no"):
        self.log, self.word, self.said = metadata.get("log", ""), word, []

    def step(self, completion, turn, is_last, raw, num_tokens):
        self.said.append(completion)
        if completion == "hang":
            time.sleep(3600)
        if completion == "exit":
            os._exit(3)
        if completion == "stop":
            return None
        if completion == "empty":
            return []
        if completion == "tools":
            return [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]
        if completion == "extra":
            return {"role": "tool", "content": "a", "at": {1, 2}}
        if completion == "look":
            return f"{raw} of {num_tokens} in {os.getpid()}"
        if completion == "won" or is_last:
            return 0.5, {"turns": turn}
        return self.word + " " + ",".join(self.said)

    def close(self):
        if self.log:
            with open(self.log, "a") as file:
                file.write("closed\\n")
"""
SLOW = """
import asyncio, os

class Game:
    here = 0

    def __init__(self, prompt, answer, metadata):
        pass

    async def step(self, completion):
        Game.here += 1
        if completion == "exit":
            while Game.here < 2:
                await asyncio.sleep(0.001)
            os._exit(3)
        await asyncio.sleep(3600)
"""
World = Callable[..., UserEnvironment]


def turn(text: str, number: int = 1, *, is_last: bool = False) -> PolicyTurn:
    return PolicyTurn(number=number, is_last=is_last, text=text, raw=f"{text}<eos>", token_ids=[5])


def begin(environment: UserEnvironment, name: str = "0/0/0", metadata: str = "{}") -> UserEpisode:
    return environment.begin(name, factories.prompt(metadata=metadata))

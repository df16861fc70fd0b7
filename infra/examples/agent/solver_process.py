"""The same agent as a program, one process for each sample: see `command` in agent.toml."""

import asyncio
import json
import os
from pathlib import Path

from openai import AsyncOpenAI
from solver import solve


async def work(task):
    """Work on a task, and report what it earned."""
    async with AsyncOpenAI() as client:  # by OPENAI_BASE_URL and OPENAI_API_KEY
        reward, parts = await solve(task, client)
        await client.post("/outcome", body={"reward": reward, "parts": parts}, cast_to=object)


asyncio.run(work(json.loads(Path(os.environ["RLSTREAMS_TASK"]).read_text())))

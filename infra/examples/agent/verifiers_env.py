"""An environment of `verifiers`, unchanged, as an agent: `pip install verifiers uv`, best into an
environment of its own, whose interpreter is the first word of `command`:

    command = ["../venv/bin/python", "verifiers_env.py"] # [[agent]] of run.toml
"""

import asyncio
import json
import os
import re
from pathlib import Path

import httpx
import verifiers.v1 as vf


class Sum(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Any task of yours, or of an environment's package."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the last number is the sum."""
        wanted = sum(map(int, re.findall(r"\d+", self.data.prompt)))
        return float(re.findall(r"\d+", trace.last_reply)[-1:] == [str(wanted)])


async def rolled_out(prompt, url):
    """One task, whose model is the run's gateway."""
    endpoint = vf.EvalClientConfig(base_url=url, api_key_var="OPENAI_API_KEY")
    here = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}  # no sandbox of Prime's
    agent = vf.Agent(vf.AgentConfig(model="policy", client=endpoint, **here))
    return await agent.run(Sum(vf.TaskData(idx=0, prompt=prompt)))


url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
task = json.loads(Path(os.environ["RLSTREAMS_TASK"]).read_text())
trace = asyncio.run(rolled_out(task["prompt"], url))
if trace.errors:
    raise SystemExit(f"{trace.errors[-1]}")  # sets the sample aside: a failure is no reward of 0
outcome, headers = {"reward": trace.reward}, {"authorization": f"Bearer {key}"}
httpx.post(f"{url}/outcome", json=outcome, headers=headers).raise_for_status()

"""The agent of `solver.py` by the library openai-agents, unchanged: `pip install openai-agents`.

In run.toml `python = "openai_agents.py:solve"`. The demo's model has no chat template, and so no
tools: with another one, `tools=[function_tool(calculator)]` has the model ask for itself.
"""

import re

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled

set_tracing_disabled(True)  # it would go to OpenAI


def calculator(expression: str) -> int:
    """Adds what an expression such as `7+8+3=` holds."""
    return sum(map(int, re.findall(r"\d+", expression)))


async def solve(task, client, *, tries=3):
    """Work on one task; the number that it returns is the reward."""
    agent = Agent(name="solver", model=OpenAIChatCompletionsModel("policy", openai_client=client))
    messages = [{"role": "user", "content": task["prompt"]}]
    for number in range(tries):
        result = await Runner.run(agent, messages)
        numbers = re.findall(r"\d+", result.final_output)
        if numbers and int(numbers[-1]) == calculator(task["prompt"]):
            return 1 - number / tries
        messages = [*result.to_input_list(), messages[0]]
    return 0.0

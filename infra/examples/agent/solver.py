"""An agent with a tool: it asks the model, checks the answer with a calculator, and asks again.

It knows nothing of rlstreams: `client` is the `openai` client, pointed at the run's gateway.
"""

import re


def calculator(expression: str) -> int:
    """The tool: adds what an expression such as `7+8+3=` holds."""
    return sum(map(int, re.findall(r"\d+", expression)))


async def solve(task, client, *, tries=3):
    """Work on one task; the number that it returns is the reward.

    A right answer at once earns 1, each further try costs a share; no right answer earns 0.
    """
    problem = task["prompt"]
    messages = [{"role": "user", "content": problem}]
    for number in range(tries):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content or ""
        numbers = re.findall(r"\d+", said)
        if numbers and int(numbers[-1]) == calculator(problem):
            return 1 - number / tries, {"first": float(number == 0), "calls": number + 1.0}
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": problem},
        ]
    return 0.0, {"first": 0.0, "calls": float(tries)}

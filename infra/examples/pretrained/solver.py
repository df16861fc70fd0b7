"""An agent with a calculator, for a small model: plain text instead of calls in JSON.

The model ends its turn behind `12 * 4 =`; the next message is `48`, and it goes on from there. A
turn that asks for nothing is the last one, and the run's verifier judges it. `client` is the
`openai` client, pointed at the run's gateway.
"""

import operator
import re

ASKED = re.compile(r"(?<!\d)(\d{1,9}) ([-+*]) (\d{1,9}) =\s*\Z")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculated(said):
    """The tool: what the end of a text asks for; None if it asks for nothing."""
    found = ASKED.search(said)
    return found and str(OPERATORS[found[2]](int(found[1]), int(found[3])))


async def solve(task, client):
    """Work on one task until a turn without a question to the calculator."""
    messages = [{"role": "user", "content": task["prompt"]}]
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content or ""
        result = calculated(said)
        if result is None:
            return
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": result}]

"""Libraries that agents are written with, unchanged, against the gateway: their loops end, and each
call is seen to continue the one before, so that its tokens are never made anew from text.

They are in no lock file: what is not installed is skipped. infra/docs/agents.md names the versions
that ran.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlstreams.workers.gateway.canonical import Matcher, answer_message
from rlstreams.workers.gateway.port import CallRequest, Parsed, ToolCall
from tests.gateways import Running, gateway
from tests.late import Late

openai = Late("openai")

ASKED = "What is 17 + 25, and then 8 more?"


def says(request: CallRequest) -> Parsed:
    """Calls the calculator twice, thinking; then says the result, as the library wants it."""
    names = [tool["function"]["name"] for tool in request.tools]
    number = sum(message["role"] == "assistant" for message in request.messages)
    if number < 2:
        arguments = {"a": 42, "b": 8} if number else {"a": 17, "b": 25}
        return _calls("add", number, arguments, reasoning="hm")
    if "final_answer" in names:
        return _calls("final_answer", number, {"answer": "50"})
    return Parsed(content=f"It is {request.messages[-1]['content']}.")


def _calls(name: str, number: int, arguments: dict[str, Any], reasoning: str = "") -> Parsed:
    call = ToolCall(id=f"call_{number}", name=name, arguments=json.dumps(arguments))
    return Parsed(content="", reasoning=reasoning, tool_calls=(call,))


@pytest.fixture
def running() -> Iterator[Running]:
    with gateway(says) as made:
        made.calls.max_model_len = 1_000_000  # some write long system prompts
        yield made


def openai_agents(running: Running, *, responses: bool) -> object:
    """OpenAI's own, by either of its dialects."""
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    kind = agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel

    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    async def run() -> object:
        url, key = f"{running.url}/v1", running.key()
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            agent = agents.Agent(
                name="adder",
                instructions="Use the tool.",
                model=kind(model="policy", openai_client=client),
                tools=[agents.function_tool(add)],
            )
            return (await agents.Runner.run(agent, ASKED)).final_output

    agents.set_tracing_disabled(True)  # it would go to OpenAI
    return asyncio.run(run())


def smolagents(running: Running) -> object:
    """Its agent that calls tools; the one that writes code sends no tools."""
    smol = pytest.importorskip("smolagents", reason="smolagents is not installed")

    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: One.
            b: The other.
        """
        return a + b

    model = smol.OpenAIModel("policy", api_base=f"{running.url}/v1", api_key=running.key())
    agent = smol.ToolCallingAgent(
        tools=[smol.tool(add)], model=model, max_steps=4, verbosity_level=0
    )
    return agent.run(ASKED)


def langgraph(running: Running) -> object:
    """The loop that comes with it, by the client of langchain."""
    prebuilt = pytest.importorskip("langgraph.prebuilt", reason="langgraph is not installed")
    chat = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    model = chat.ChatOpenAI(model="policy", base_url=f"{running.url}/v1", api_key=running.key())
    agent = prebuilt.create_react_agent(model, [add])
    said = agent.invoke({"messages": [{"role": "user", "content": ASKED}]})
    return said["messages"][-1].content


LIBRARIES: dict[str, Callable[[Running], object]] = {
    "openai-agents by chat": lambda running: openai_agents(running, responses=False),
    "openai-agents by responses": lambda running: openai_agents(running, responses=True),
    "smolagents": smolagents,
    "langgraph": langgraph,
}


# It sends its own words back ("Calling tools: ...") in place of the answer that it was given.
REWRITES = {"smolagents"}


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", LIBRARIES)
def test_its_loop_ends_and_each_call_continues_the_one_before(running: Running, name: str) -> None:
    assert "50" in str(LIBRARIES[name](running))
    requests, matcher = running.calls.requests, Matcher()
    assert len(requests) == 3
    for one, other in itertools.pairwise(requests):
        answered = matcher.spelled((*one.messages, answer_message(says(one))), one.tools)
        is_known = answered.chain[-1] in matcher.spelled(other.messages, other.tools).chain
        assert is_known == (name not in REWRITES)

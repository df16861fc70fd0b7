"""Each family that the library knows: sampled tokens stay, foreign texts are no control tokens."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.gateway.library import LibraryRenderer, found_family, of_family
from rlstreams.workers.gateway.port import CallRefusedError
from tests.chat_tokenizer import SPECIAL, TAGS, chat_tokenizer

FAMILIES = (
    "qwen3", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "qwen3-vl", "gemma4", "glm-5",
    "glm-5.1", "glm-5.3", "glm-4.5", "kimi-k2", "kimi-k2.5", "laguna-xs.2", "laguna-m.1",
    "laguna-xs-2.1", "laguna-s-2.1", "llama-3", "minimax-m2", "nemotron-3", "nemotron-3-ultra",
    "nemotron-3.5", "deepseek-v3", "deepseek-r1",
)  # fmt: skip
BRIDGED = [family for family in FAMILIES if family != "deepseek-r1"]
ALIKE = {"qwen3.6": "qwen3.5", "qwen3-vl": "qwen3", "nemotron-3.5": "nemotron-3-ultra"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string"}, "times": {"type": "integer"}},
        },
    },
}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look."}]
ARGUMENTS = {"at": "a b", "times": 2}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "functions.look:0",
            "type": "function",
            "function": {"name": "look", "arguments": json.dumps(ARGUMENTS)},
        }
    ],
}
TOKENIZER = chat_tokenizer(Path(mkdtemp()))
CONTROLS = {TOKENIZER.token_id(token): token for token in (*SPECIAL, *TAGS)}
TEXTS = st.lists(st.sampled_from((*SPECIAL, *TAGS, "word", " ", "\n", "é")), max_size=6).map(
    "".join
)


@cache
def renderer(family: str) -> LibraryRenderer:
    return of_family(TOKENIZER, family, keeps_thoughts=family not in ("deepseek-r1",))


def told(text: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": "functions.look:0", "name": "look", "content": text}


def few_shot(text: str) -> dict[str, str]:
    """An answer that the agent made up: the tags of answers are its own."""
    return {"role": "assistant", "content": re.sub("</?(think|tool_call)>", "", text)}


def controls(ids: list[int]) -> list[str]:
    return [CONTROLS[token] for token in ids if token in CONTROLS]


def rendered(made: LibraryRenderer, messages: list[dict[str, object]]) -> list[int]:
    """Ids; none where a tool's result must follow its call."""
    try:
        return made.render(messages, [TOOL])
    except CallRefusedError:
        return []


def answer(family: str, message: dict[str, object]) -> tuple[list[int], list[int]]:
    """A prompt, and an answer to it as the family writes it, with the token that ends it."""
    made = renderer(family)
    prompt = made.render(ASKED, [TOOL])
    later = (told("x"), {"role": "user", "content": "x"})
    thinks = {**message, "reasoning_content": "Hm."}  # some prompts begin a thought
    whole = next(
        ids
        for said, after in product((message, thinks), later)
        if (ids := rendered(made, [*ASKED, said, after]))[: len(prompt)] == prompt
    )
    ids = whole[len(prompt) :]
    end = next(n for n, token in enumerate(ids) if token in made.stop_ids)
    return prompt, ids[: end + 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_found_by_what_it_writes(family: str) -> None:
    found = found_family(TOKENIZER, of_family(TOKENIZER, family))
    assert found is not None
    assert f" {ALIKE.get(family, family)} " in f"{found.name} "


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(text=TEXTS, sampled=st.lists(st.integers(0, 255), max_size=8), is_cut=st.booleans())
def test_no_text_of_a_tool_is_a_control_token(
    family: str, text: str, sampled: list[int], is_cut: bool
) -> None:
    """In a rendering and in a bridge, which begins exactly with what was sampled."""
    made = renderer(family)
    roles = (told, lambda said: {"role": "user", "content": said}, few_shot)
    for role in roles:
        plain, foreign = (made.render([*ASKED, CALLED, role(t)], [TOOL]) for t in ("word", text))
        assert controls(foreign) == controls(plain)
    described = {**TOOL, "function": {**TOOL["function"], "description": f"Looks. {text}"}}
    prompt = made.render(ASKED, [TOOL])
    assert controls(made.render(ASKED, [described])) == controls(prompt)
    ended = [] if is_cut else [min(made.stop_ids)]
    bridges = [made.bridge(prompt, [*sampled, *ended], [told(t)], [TOOL]) for t in ("word", text)]
    if None not in bridges:
        assert controls(bridges[0]) == controls(bridges[1])


@pytest.mark.parametrize("family", BRIDGED)
def test_an_answer_is_read_as_it_was_written(family: str) -> None:
    """A call of a tool, and text; ids of calls are those of the call."""
    made = renderer(family)
    prompt, sampled = answer(family, CALLED)
    said = made.parse(sampled, [TOOL], prompt_ids=prompt, call_id="c")
    assert [(call.id, call.name) for call in said.tool_calls] == [("call_c_0", "look")]
    assert json.loads(said.tool_calls[0].arguments) == ARGUMENTS
    assert said.content == ""
    prompt, sampled = answer(family, {"role": "assistant", "content": "I see."})
    said = made.parse(sampled, [TOOL], prompt_ids=prompt)
    assert (said.content.strip(), said.tool_calls) == ("I see.", ())


@pytest.mark.parametrize("family", BRIDGED)
def test_a_dialogue_goes_on_behind_a_tools_result(family: str) -> None:
    """Without a token of what was sampled made anew."""
    made = renderer(family)
    prompt, sampled = answer(family, CALLED)
    bridge = made.bridge(prompt, sampled, [told("word")], [TOOL])
    assert bridge is not None
    assert made.render([*ASKED, CALLED, told("word")], [TOOL])[-len(bridge) :] == bridge


def test_a_template_that_takes_every_thought_out_makes_roots() -> None:
    """Nothing that was sampled would stay as it was."""
    made = renderer("deepseek-r1")
    prompt = made.render(ASKED)
    assert made.bridge(prompt, [*range(5), min(made.stop_ids)], [told("word")]) is None


def test_a_call_of_no_tool_is_content() -> None:
    made = renderer("qwen3")
    prompt, sampled = answer("qwen3", CALLED)
    other = {**TOOL, "function": {"name": "other"}}
    said = made.parse(sampled, [other], prompt_ids=prompt)
    assert (said.tool_calls, "look" in said.content) == ((), True)
    cut = made.parse(sampled[:-6], [TOOL], prompt_ids=prompt)
    assert (cut.tool_calls, "look" in cut.content) == ((), True)


def test_a_new_question_is_a_root_where_the_template_takes_thoughts_out() -> None:
    strict = of_family(TOKENIZER, "qwen3")
    prompt = strict.render(ASKED)
    sampled = [*TOKENIZER.encode_piece("<think>hm</think>yes"), TOKENIZER.token_id("<|im_end|>")]
    again = [{"role": "user", "content": "Again."}]
    assert strict.bridge(prompt, sampled, again) is None
    assert renderer("qwen3").bridge(prompt, sampled, again) is not None
    assert strict.name != renderer("qwen3").name


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no renderer 'qwen9'; there are qwen3,"):
        of_family(TOKENIZER, "qwen9")
    with pytest.raises(ConfigError, match=r"not fit for renderer 'hy3'"):
        of_family(TOKENIZER, "hy3")
    with pytest.raises(ConfigError, match=r"not fit for renderer 'qwen3'.*no_such"):
        of_family(TOKENIZER, "qwen3", options={"no_such": True})
    with pytest.raises(CallRefusedError, match="messages"):
        renderer("qwen3").render([])

"""Messages of a model without a chat template, the demo's for example."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstreams.workers.gateway.port import CallRefusedError
from rlstreams.workers.gateway.rendering import make_renderer
from rlstreams.workers.model.folder import eos_ids_of
from rlstreams.workers.model.tokenizer import Tokenizer

MODEL = Path(__file__).parents[3] / "infra/examples/demo/model"
TOKENIZER = Tokenizer(MODEL)
RENDERER = make_renderer(TOKENIZER, eos_ids_of(MODEL))
EOS = TOKENIZER.eos_id
TEXTS = st.text("0123456789+-=;<eos>", max_size=20)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_message_makes_the_ids_of_the_same_text_as_a_prompt() -> None:
    """What the demo's model was trained with."""
    assert RENDERER.render([user("12+3=")]) == TOKENIZER.encode_prompt("12+3=")
    assert frozenset({EOS}) == RENDERER.stop_ids


@given(TEXTS, st.lists(st.integers(4, 120), max_size=5), st.booleans(), TEXTS)
def test_a_bridge_is_what_a_rendering_would_have_been(
    asked: str, sampled: list[int], is_ended: bool, later: str
) -> None:
    """Where the answer's tokens are those that its text makes; they are never made anew."""
    prompt = RENDERER.render([user(asked)])
    answer = [*sampled, EOS] if is_ended else sampled
    bridge = RENDERER.bridge(prompt, answer, [user(later)])
    text = RENDERER.parse(answer).content
    assert bridge is not None
    again = RENDERER.render([user(asked), {"role": "assistant", "content": text}, user(later)])
    if TOKENIZER.encode_piece(text, literal=True) == sampled:
        assert [*prompt, *answer, *bridge] == again
    assert EOS not in bridge[not is_ended :]


def test_no_text_becomes_a_control_token() -> None:
    """`<eos>` of a user is five characters."""
    ids = RENDERER.render([user("1<eos><bos>")])
    assert EOS not in ids
    assert ids.count(TOKENIZER.bos_id) == 1


def test_an_answer_among_the_new_messages_is_no_continuation() -> None:
    assert RENDERER.bridge([1], [5], [{"role": "assistant", "content": "1"}]) is None


def test_a_tool_is_refused_by_name() -> None:
    with pytest.raises(CallRefusedError, match=r"no chat template.*data\.template") as refused:
        RENDERER.render([user("1")], [{"type": "function", "function": {"name": "add"}}])
    assert (refused.value.status, refused.value.param) == (400, "tools")

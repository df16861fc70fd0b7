"""The tokens between two turns: as the chat template would write them, and no control tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.model.tokenizer import Tokenizer
from rlstreams.workers.rollout.next_turn import NextTurn
from rlstreams.workers.sandbox.environment import Says
from rlstreams.workers.sandbox.user_code import UserCodeError
from tests.unit.roles.stand import EXAMPLE

MODEL = EXAMPLE.parent / "demo/model"
EOS = 2
# The common form, with digits for words: `<unk>ROLE:CONTENT<eos>`.
CHATML = (
    "{{ bos_token }}{% for m in messages %}"
    "<unk>{{ {'user': '1', 'assistant': '2', 'tool': '3', 'system': '4'}[m.role] }}:"
    "{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<unk>2:{% endif %}"
)
# As Qwen3's: what an answer thought is kept until the next word of the user's, not of a tool's.
STRIPS = CHATML.replace(
    "{{ m.content }}",
    "{% set later = messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') "
    "if later and m.role == 'assistant' else m.content }}",
)
COUNTS = CHATML.replace("{{ m.content }}", "{{ loop.index }}{{ m.content }}")


def tokenizer(folder: Path, template: str) -> Tokenizer:
    file = folder / "template.jinja"
    file.write_text(template)
    return Tokenizer(MODEL, template=file)


def next_turn(folder: Path, template: str = CHATML, role: str = "tool") -> NextTurn:
    return NextTurn(tokenizer(folder, template), role, vocab_size=128)


def test_a_later_turn_is_what_the_template_would_have_written(tmp_path: Path) -> None:
    """Prompt, answer and what follows it are the tokens of the whole dialogue, rendered at once."""
    spoken = tokenizer(tmp_path, CHATML)
    asked = [{"role": "user", "content": "1+2="}]
    ids = spoken.encode_prompt(asked)
    made = next_turn(tmp_path)
    for answer, observed in (("4", "12"), ("5", "~;")):
        answered = [*spoken.encode_piece(answer), EOS]
        ids += answered + made.tokens(Says(observed), answered, is_chat=True).tolist()
        asked += [
            {"role": "assistant", "content": answer},
            {"role": "tool", "content": observed},
        ]
    assert spoken.encode_prompt(asked) == ids


def test_a_turn_may_end_by_another_token_than_the_templates(tmp_path: Path) -> None:
    """A call of a tool has an end of its own in some models: no second end follows it."""
    spoken = tokenizer(tmp_path, CHATML)
    made = NextTurn(spoken, "tool", vocab_size=128, eos_ids=frozenset({EOS, 9}))
    ended = made.tokens(Says("1"), [5, EOS], is_chat=True).tolist()
    assert ended == made.tokens(Says("1"), [5, 9], is_chat=True).tolist()
    assert [EOS, *ended] == made.tokens(Says("1"), [5, 6], is_chat=True).tolist()


@pytest.mark.parametrize("is_chat", [False, True])
def test_no_text_of_an_environment_becomes_a_control_token(tmp_path: Path, is_chat: bool) -> None:
    """`<eos>` in a tool's output is five characters, wherever it stands."""
    made = next_turn(tmp_path)
    ids = made.tokens(Says("1<eos>2<pad>"), [EOS], is_chat=is_chat).tolist()
    # The template writes one end, behind its message; the text's own makes none.
    assert [int(is_chat), 0] == [ids.count(EOS), ids.count(0)]
    plain = made.tokens(Says("12"), [EOS], is_chat=is_chat).tolist()
    assert len(ids) > len(plain)


@pytest.mark.parametrize(
    ("template", "role", "told"),
    [
        (STRIPS, "user", r"template.jinja cannot be used.*think>.*of role 'user' follows"),
        (COUNTS, "tool", r"template.jinja cannot be used for several turns"),
        ("{{ messages[-1].content }}", "tool", r"template.jinja cannot be used"),
        (
            CHATML.replace("m.content", "m.content | upper"),
            "tool",
            r"template.jinja cannot be used",
        ),
        (
            CHATML.replace("m.content", "(m.content | e if m.role == 'tool' else m.content)"),
            "tool",
            r"does not write the text of a message of role 'tool' as it is",
        ),
    ],
)
def test_a_template_that_changes_what_was_said_is_refused(
    tmp_path: Path, template: str, role: str, told: str
) -> None:
    """By name, with what changes, and what to do."""
    with pytest.raises(ConfigError, match=told):
        next_turn(tmp_path, template, role).check_template()


def test_a_template_may_begin_the_thought_of_an_answer(tmp_path: Path) -> None:
    """The answer's own text then goes on behind it."""
    template = CHATML.replace("<unk>2:{% endif %}", "<unk>2:<think>\n{% endif %}").replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' and '<think>' not in m.content %}<think>\n{% endif %}"
        "{{ m.content }}",
    )
    next_turn(tmp_path, template).check_template()


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (Says(""), "makes no tokens"),
        (Says([{"role": "tool", "content": "1"}]), "the prompt is text: return text"),
    ],
)
def test_what_cannot_follow_a_text_is_refused(tmp_path: Path, says: Says, told: str) -> None:
    """Nothing at all, and messages."""
    with pytest.raises(UserCodeError, match=told):
        next_turn(tmp_path).tokens(says, [EOS], is_chat=False)


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_text_that_is_not_unicode_is_refused(tmp_path: Path, is_chat: bool) -> None:
    """Half of a surrogate pair has no tokens; the error itself can be written down."""
    with pytest.raises(UserCodeError, match=r"answer '1.ud800' cannot be a turn") as raised:
        next_turn(tmp_path).tokens(Says("1\ud800"), [EOS], is_chat=is_chat)
    str(raised.value).encode()


def test_json_in_a_template_is_what_models_were_trained_with(tmp_path: Path) -> None:
    """As Llama's writes the answer of a tool: no escapes for HTML, and control tokens plain."""
    template = CHATML.replace("{{ m.content }}", "{{ m.content | tojson }}").replace(
        "{{ m.content | tojson }}",
        "{{ m.content | tojson if m.role == 'tool' else m.content }}",
    )
    spoken = tokenizer(tmp_path, template)
    rendered = spoken.apply_chat_template([{"role": "tool", "content": "<\u00e4&'>"}])
    assert '"<\u00e4&\'>"' in rendered
    made = next_turn(tmp_path, template)
    ids = made.tokens(Says("1<eos>2"), [5], is_chat=True).tolist()
    assert [EOS, EOS] == [token for token in ids if token == EOS]  # both the template's


def test_a_role_that_changes_what_was_said_is_refused_where_it_is_first_returned(
    tmp_path: Path,
) -> None:
    """Thoughts are stripped behind a user's message: only the sample that returns one pays."""
    made = next_turn(tmp_path, STRIPS, "tool")
    made.check_template()
    says = Says([{"role": "tool", "content": "1"}, {"role": "user", "content": "2"}])
    with pytest.raises(UserCodeError, match="think>"):
        made.tokens(says, [EOS], is_chat=True)
    assert len(made.tokens(Says("1"), [EOS], is_chat=True)) > 0


REFUSES = CHATML.replace(
    "{{ m.content }}",
    "{% if 'BAD' in m.content %}{{ raise_exception('no such word') }}{% endif %}{{ m.content }}",
)
FAILS = CHATML.replace("{{ m.content }}", "{% if m.x %}{{ 'a' + m.x }}{% endif %}{{ m.content }}")
LOOKS_AHEAD = CHATML.replace(
    "<unk>{{", "{{ '9' if 'ends' in (messages | last) else '' }}<unk>{{", 1
)


@pytest.mark.parametrize(
    ("template", "message", "told"),
    [
        (REFUSES, {"role": "tool", "content": "BAD"}, "no such word"),
        (FAILS, {"role": "tool", "content": "1", "x": 3}, "cannot be a turn"),
        (LOOKS_AHEAD, {"role": "tool", "content": "1", "ends": True}, "cannot be a turn"),
    ],
)
def test_messages_that_the_template_cannot_take_cost_their_own_sample(
    tmp_path: Path, template: str, message: dict[str, str], told: str
) -> None:
    """It raises, or writes what was said before in another way: the template itself is fit."""
    made = next_turn(tmp_path, template)
    made.check_template()
    with pytest.raises(UserCodeError, match=told):
        made.tokens(Says([message]), [EOS], is_chat=True)


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    """A tokenizer may know more tokens than the model."""
    made = NextTurn(tokenizer(tmp_path, CHATML), "tool", vocab_size=10)
    with pytest.raises(UserCodeError, match=r"holds token \d+, and the model knows 10"):
        made.tokens(Says("99"), [EOS], is_chat=False)

"""Text to ids and back, special tokens, chat templates."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.load import load
from rlstreams.workers.dataset.open import prompt_encoder
from rlstreams.workers.model.tokenizer import Tokenizer, TokenizerError

ROOT = Path(__file__).parents[3]
DEMO_MODEL = ROOT / "infra" / "examples" / "demo" / "model"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ raise_exception('no tools') }}{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def edited(folder: Path, **config: object) -> Path:
    """A copy of the demo's tokenizer with another `tokenizer_config.json`."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def test_the_demo_tokenizer() -> None:
    """A number is one token; what is encoded decodes to the same text."""
    tokenizer = Tokenizer.load(DEMO_MODEL)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.vocab_size == 128
    text = "7+18+3="
    ids = tokenizer.encode(text)
    assert len(ids) == 6
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, 2]) == text
    assert tokenizer.decode([*ids, 2], skip_special_tokens=False) == text + "<eos>"
    assert [tokenizer.text_of(token) for token in [*ids, 2]] == [*"7+", "18", *"+3=", "<eos>"]
    assert tokenizer.text_of(ids[2]) is tokenizer.text_of(ids[2]), "a token's text is made once"
    content = (DEMO_MODEL / "tokenizer.json").read_bytes()
    assert tokenizer.hash == hashlib.sha256(content).hexdigest()


def test_a_prompt_begins_with_one_bos(tmp_path: Path) -> None:
    """It is added where the tokenizer does not, not twice where it does, and not invented."""
    tokenizer = Tokenizer(DEMO_MODEL)
    assert tokenizer.encode_prompt("7=") == [1, *tokenizer.encode("7=")]
    assert tokenizer.encode_prompt("<bos>7=") == [1, *tokenizer.encode("7=")]
    without = Tokenizer(edited(tmp_path, bos_token=None))
    assert without.encode_prompt("7=") == without.encode("7=")


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    """The template writes the special tokens; its refusal is the user's error."""
    tokenizer = Tokenizer(edited(tmp_path, chat_template=TEMPLATE))
    messages = [{"role": "user", "content": "7+8"}]
    assert tokenizer.encode_prompt(messages) == [1, *tokenizer.encode("7+8=")]
    with pytest.raises(TokenizerError, match="no tools"):
        tokenizer.encode_prompt([{"role": "tool", "content": "7"}])


def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(TokenizerError, match="give `prompt` as text"):
        Tokenizer(DEMO_MODEL).encode_prompt([{"role": "user", "content": "7"}])


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    folder = edited(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer(folder)


def test_a_named_template_is_read_even_if_no_prompt_is_a_chat() -> None:
    config = load([ROOT / "infra/examples/demo.toml"], ["data.template=nowhere.jinja"])
    with pytest.raises(ConfigError, match=r"^data\.template: .*nowhere\.jinja cannot be read"):
        prompt_encoder(config)

"""Text to token ids and back, without torch or transformers: a folder's `tokenizer.json`.

Tokens are made once, where prompts are issued; every later hop is token in, token out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")  # written by templates only


class TokenizerError(ValueError):
    """A folder without a usable tokenizer, or a prompt that it cannot take."""


class Tokenizer:
    """A Hugging Face tokenizer, with the methods that prompts and answers need."""

    def __init__(
        self,
        folder: Path | str,
        *,
        template: Path | str = "",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Load `tokenizer.json` and the special tokens of `tokenizer_config.json`.

        Args:
            template: file of a chat template instead of the folder's.
            options: variables for the template, such as `enable_thinking`.

        Raises:
            TokenizerError: a file is missing or not readable; names it.
        """
        from tokenizers import Tokenizer as Core

        self._folder = Path(folder)
        path = self._folder / "tokenizer.json"
        try:
            content = path.read_bytes()
            self._core = Core.from_str(content.decode("utf-8"))
        except Exception as err:  # the library raises bare Exception
            raise TokenizerError(f"{path} cannot be loaded: {err}") from err
        self.hash: str = hashlib.sha256(content).hexdigest()
        """SHA-256 of `tokenizer.json`, hexadecimal."""
        self._config = {
            **_read_json(self._folder / "special_tokens_map.json"),
            **_read_json(self._folder / "tokenizer_config.json"),
        }
        self._template_file = Path(template) if template else None
        self._options = dict(options or {})
        self._compiled: Any = None  # the chat template, at its first use
        self._content = content
        self._texts: dict[int, str] = {}  # of single tokens
        self._plain: Any = None  # the same without special tokens, at its first use
        self.bos_id = self._special_id("bos_token")
        """Begins a sequence; None: the model has none."""
        self.eos_id = self._special_id("eos_token")
        """Ends an answer; None: the model has none."""
        if template:
            self._template()  # also where no prompt is a chat: its name was meant

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """The tokenizer of a model folder; raises as the constructor does."""
        return cls(folder)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._core.get_vocab_size(with_added_tokens=True))

    @property
    def tokens(self) -> Mapping[int, str]:
        """All tokens by id, added ones included, as the vocabulary writes them."""
        found: Mapping[str, int] = self._core.get_vocab(with_added_tokens=True)
        return {token_id: token for token, token_id in found.items()}

    def token(self, token_id: int) -> str | None:
        """The token of an id, as the vocabulary writes it; None: there is none."""
        token: str | None = self._core.id_to_token(token_id)
        return token

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`, with those that the tokenizer itself adds around them."""
        return list(self._core.encode(text).ids)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of the control tokens, longest first; tags such as `<tool_call>` are among them,
        though libraries decode those as text."""
        found = self._core.get_added_tokens_decoder().values()
        texts = (t.content for t in found if t.special or _TAG.fullmatch(t.content))
        return tuple(sorted(texts, key=len, reverse=True))

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it; None: there is none."""
        token_id: int | None = self._core.token_to_id(token)
        return token_id

    def text_of(self, token_id: int) -> str:
        """The text of one token; each is made once."""
        if (text := self._texts.get(token_id)) is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def encode_piece(self, text: str, *, literal: bool = False) -> list[int]:
        """The tokens of a piece of a text, with nothing added around them.

        Args:
            literal: `<eos>` and the like are plain characters, not control tokens.
        """
        core = self._core
        if literal:
            if self._plain is None:
                content = json.loads(self._content)
                for token in content.get("added_tokens") or ():
                    token["special"] |= _TAG.fullmatch(token["content"]) is not None
                self._plain = type(core).from_str(json.dumps(content))
                self._plain.encode_special_tokens = True
            core = self._plain
        return list(core.encode(text, add_special_tokens=False).ids)

    def encode_prompt(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a prompt given as text or as chat messages, with one `bos` at the beginning, if
        the model has it: tokenizers differ in adding it, and a template writes its own.

        Raises:
            TokenizerError: messages without a chat template, or one that refuses them.
        """
        if isinstance(prompt, str):
            ids, bos = self.encode(prompt), self.bos_id
            return ids if bos is None or ids[:1] == [bos] else [bos, *ids]
        ids = self.encode(self.apply_chat_template(prompt))
        is_twice = self.bos_id is not None and ids[:2] == [self.bos_id] * 2
        return ids[1:] if is_twice else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`."""
        text: str = self._core.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    @property
    def begin_ids(self) -> list[int]:
        """Tokens that the tokenizer itself puts before every text."""
        own = self.encode("")
        return own[:1] if self.bos_id is not None and own[:1] == [self.bos_id] else []

    @property
    def template_hash(self) -> str:
        """SHA-256 of the chat template and its options, hexadecimal; raises TokenizerError."""
        said = f"{self._template()}\n{json.dumps(self._options, sort_keys=True)}"
        return hashlib.sha256(said.encode()).hexdigest()

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        try:
            return bool(self._template())
        except TokenizerError:
            return False

    @property
    def template_name(self) -> str:
        """Source of the chat template, for messages."""
        return f"{self._template_file or f'of {self._folder}'}"

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """A dialogue in the text form that the model was trained on, ready for its answer.

        Args:
            messages: as chat completions write them, arguments of tool calls as objects.
            tools: declarations, as chat completions write them.

        Raises:
            TokenizerError: the folder has no chat template, or it refuses the messages.
        """
        import jinja2

        try:
            self._compiled = self._compiled or _compiled(self._template())
            rendered: str = self._compiled.render(
                **{
                    "messages": list(messages),
                    **({"tools": list(tools)} if tools else {}),
                    "add_generation_prompt": True,
                    "bos_token": _text_of(self._config.get("bos_token")) or "",
                    "eos_token": _text_of(self._config.get("eos_token")) or "",
                    **self._options,
                }
            )
        except jinja2.TemplateError as err:
            raise TokenizerError(f"the chat template {self.template_name} fails: {err}") from err
        return rendered

    def _template(self) -> str:
        path = self._template_file or self._folder / "chat_template.jinja"
        if self._template_file or path.exists():
            try:
                return path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as err:
                what = "data.template: " if self._template_file else ""
                raise TokenizerError(f"{what}chat template {path} cannot be read: {err}") from err
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {t["name"]: t["template"] for t in template}.get("default")
        if not isinstance(template, str):
            raise TokenizerError(
                f"{self._folder} has no chat template: give `prompt` as text and no system "
                "prompt, or name a template's file in data.template"
            )
        return template

    def _special_id(self, name: str) -> int | None:
        text = _text_of(self._config.get(name))
        token_id: int | None = None if text is None else self._core.token_to_id(text)
        return token_id


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise TokenizerError(f"{path} cannot be read: {err}") from err
    return content


def _text_of(token: object) -> str | None:
    """Text of a special token, which is given as text or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _compiled(template: str) -> Any:  # noqa: ANN401
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = _to_json
    return environment.from_string(template)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained with; the filter of jinja2 writes for HTML: `<` as an escape."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)  # fmt: skip


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)

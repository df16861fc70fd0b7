"""Makes problems of rows: picks columns, cuts the answer out, completes the prompt. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.data import DataSection

ChatMessages: TypeAlias = list[dict[str, Any]]
PromptText: TypeAlias = str | ChatMessages
Fields: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem."""

    number: int  # within its split, from 0
    place: str  # "file:line", for messages
    prompt: PromptText  # as the policy gets it
    answer: str
    metadata: str  # JSON object


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preset:
    """Column names; of several the first that a row has."""

    prompt: tuple[str, ...] = ("prompt",)
    answer: tuple[str, ...] = ("answer",)
    answer_pattern: str = ""


PRESETS: Mapping[str, _Preset] = {
    "": _Preset(),
    # Columns that verl's `examples/data_preprocess` scripts write.
    "verl": _Preset(answer=("reward_model.ground_truth",)),
    # TRL leaves the answer's name to the reward function; its own reward uses `solution`.
    "trl": _Preset(answer=("solution", "answer", "ground_truth")),
    # openai/gsm8k: the working, then `#### ` and the number.
    "gsm8k": _Preset(prompt=("question",), answer_pattern=r"####\s*(.+)"),
    # Environments of `verifiers`, which prime-rl trains on.
    "verifiers": _Preset(prompt=("prompt", "question")),
}


class RowReader:
    """Makes problems of rows' fields.

    Args:
        field: of the configuration that named the data, for messages.

    Raises:
        ConfigError: from the constructor: a pattern that is no regular expression.
    """

    def __init__(self, data: DataSection, field: str) -> None:
        preset, columns = PRESETS[data.preset], data.columns
        self._field = field
        self._prompt = (columns.prompt,) if columns.prompt else preset.prompt
        self._answer = (columns.answer,) if columns.answer else preset.answer
        # Rows need no answer (a reward function may do without), unless its column was named.
        self._needs_answer = bool(columns.answer or data.preset)
        self._metadata = columns.metadata
        self._is_chat = data.is_always_chat
        self._system: ChatMessages = []
        if data.system_prompt:
            self._system = [{"role": "system", "content": data.system_prompt}]
        self._shots: ChatMessages = [
            message
            for shot in data.few_shot
            for message in (
                {"role": "user", "content": shot.prompt},
                {"role": "assistant", "content": shot.answer},
            )
        ]
        self._text = "".join(f"{e.prompt}{e.answer}{data.few_shot_join}" for e in data.few_shot)
        # The preset's pattern is about the preset's column.
        pattern = columns.answer_pattern or ("" if columns.answer else preset.answer_pattern)
        try:
            self._pattern = re.compile(pattern) if pattern else None
        except re.error as err:
            raise ConfigError(f"data.columns.answer_pattern: {pattern!r}: {err}") from err
        if self._pattern is not None and not self._pattern.groups:
            raise ConfigError(
                f"data.columns.answer_pattern: {pattern!r} has no group: put ( ) around the answer"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read, outermost names; empty: all."""
        named = (*self._prompt, *self._answer, *self._metadata) if self._metadata else ()
        return tuple(dict.fromkeys(name.partition(".")[0] for name in named))

    def bare_prompt(self, fields: Fields, place: str) -> PromptText:
        """The prompt as the row has it.

        Raises:
            ConfigError: there is none, or it is neither text nor messages.
        """
        _, prompt = self._pick("prompt", self._prompt, fields, place)
        if not is_text(prompt) and not is_chat(prompt):
            raise ConfigError(
                f"{self._field}: {place}: `{self._prompt[0]}` must be text that is not empty, or a "
                f'list of messages {{"role": ..., "content": ...}}, got {brief(prompt)}'
            )
        return prompt  # type: ignore[no-any-return]

    def dressed(self, prompt: PromptText) -> PromptText:
        """A bare prompt behind the system prompt and the solved problems."""
        if isinstance(prompt, str):
            if not self._is_chat:
                return self._text + prompt
            prompt = [{"role": "user", "content": prompt}]
        own = [m for m in prompt[:1] if m["role"] == "system"]  # a row's own one is closer to it
        return [*(own or self._system), *self._shots, *prompt[len(own) :]]

    def check_rest(self, fields: Fields, place: str) -> None:
        """Check that all but the prompt is there.

        Raises:
            ConfigError: names field, place and what is there instead.
        """
        self._answer_of(fields, place)
        for name in self._metadata:
            self._pick("metadata", (name,), fields, place)

    def row(self, fields: Fields, number: int, place: str) -> Row:
        """The problem.

        Raises:
            ConfigError: names field, place and what is there instead.
        """
        prompt = self.bare_prompt(fields, place)
        name, answer = self._answer_of(fields, place)
        used = {self._pick("prompt", self._prompt, fields, place)[0], name}
        return Row(
            number=number,
            place=place,
            prompt=self.dressed(prompt),
            answer=answer,
            metadata=json.dumps(self._free(fields, used, place)),
        )

    def _answer_of(self, fields: Fields, place: str) -> tuple[str, str]:
        """Name of its column, and the answer; empty if the row has none and need not."""
        if not self._needs_answer and not _has(fields, self._answer[0]):
            return "", ""
        name, answer = self._pick("answer", self._answer, fields, place)
        if answer is None and self._needs_answer:
            raise ConfigError(
                f"{self._field}: {place}: `{name}` is null: fill it in, or leave the row out"
            )
        return name, self._cut(answer if isinstance(answer, str) else json.dumps(answer), place)

    def _cut(self, answer: str, place: str) -> str:
        if self._pattern is None:
            return answer
        found = self._pattern.search(answer)
        if found is None:
            raise ConfigError(
                f"{self._field}: {place}: data.columns.answer_pattern {self._pattern.pattern!r} "
                f"is not in the answer {brief(answer)}"
            )
        return found.group(1).strip()

    def _free(self, fields: Fields, used: set[str], place: str) -> Fields:
        if not self._metadata:
            return {name: value for name, value in fields.items() if name not in used}
        return {name: self._pick("metadata", (name,), fields, place)[1] for name in self._metadata}

    def _pick(
        self, what: str, names: tuple[str, ...], fields: Fields, place: str
    ) -> tuple[str, Any]:
        for name in names:
            if _has(fields, name):
                return name, _at(fields, name)
        known = ", ".join(sorted(fields)) or "none"
        hint = "" if what == "metadata" else f"; name it: data.columns.{what}"
        wanted = "` or `".join(names)
        raise ConfigError(f"{self._field}: {place}: no `{wanted}` (fields: {known}){hint}")


_OF_AN_ARRAY = "; a row is one object on one line: `jq -c '.[]' FILE` makes lines of an array"


def parse(line: str | bytes, place: str, field: str) -> Fields:
    """The fields of a line of JSON.

    Raises:
        ConfigError: names the place, with the column, and what is there.
    """
    try:
        fields = msgspec.json.decode(line)  # five times as fast as the library's
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = _parsed(line, f"{field}: {place}")  # which takes NaN, and says what is wrong
    if not isinstance(fields, dict):
        hint = _OF_AN_ARRAY if isinstance(fields, list) else ""
        raise ConfigError(f"{field}: {place}: not a JSON object: {brief(fields)}{hint}")
    return fields


def _parsed(line: str | bytes, place: str) -> object:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as err:
        column = min(err.pos, len(err.doc.rstrip())) + 1  # a line that was cut ends in its newline
        hint = _OF_AN_ARRAY if err.doc.lstrip().startswith("[") else ""
        raise ConfigError(f"{place}:{column}: not a line of JSON: {err.msg}{hint}") from err
    except UnicodeDecodeError as err:
        byte = f"byte {err.object[err.start]:#04x}"
        raise ConfigError(
            f"{place}: not UTF-8 ({byte} at position {err.start}); save the file as UTF-8"
        ) from err
    except ValueError as err:  # an integer of too many digits
        raise ConfigError(f"{place}: not a line of JSON: {err}") from err
    except RecursionError as err:
        raise ConfigError(f"{place}: nested too deeply") from err
    # Half of a surrogate pair is an escape that stands for no character: nothing can send it.
    for name, value in fields.items() if isinstance(fields, dict) else ():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as err:
            raise ConfigError(
                f"{place}: `{brief(name)[1:-1]}` has {err.object[err.start]!a}, half of a "
                "character; write the character itself, or both halves"
            ) from err
    return fields


def is_text(prompt: object) -> bool:
    """Whether it is text with something in it."""
    return isinstance(prompt, str) and prompt != ""


def is_chat(prompt: object) -> bool:
    """Whether it is a list of messages."""
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in prompt)
    )


def brief(value: object) -> str:
    """JSON of at most 80 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _has(fields: Fields, name: str) -> bool:
    if name in fields:
        return True
    head, dot, tail = name.partition(".")
    inner = fields.get(head)
    return bool(dot) and isinstance(inner, dict) and _has(inner, tail)


def _at(fields: Fields, name: str) -> Any:  # noqa: ANN401
    if name in fields:
        return fields[name]
    head, _, tail = name.partition(".")
    return _at(fields[head], tail)

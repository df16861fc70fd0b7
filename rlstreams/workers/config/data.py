"""The sections of a configuration about problems: the places of data, the names of columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from rlstreams.workers.config.checks import NonNegativeInt, PositiveInt, Section, ShareBelow1
from rlstreams.workers.config.user_code import Option

HUB, GYM = "hf:", "gym:"  # begin names that are no paths


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnsSection:
    """Names of the data set's columns; `a.b` is field `b` of column `a`."""

    prompt: str = ""
    """Text, or a list of messages with `role` and `content`; empty: the preset's, or `prompt`."""
    answer: str = ""
    """The reference answer for the verifier; empty: the preset's, or `answer`."""
    answer_pattern: str = ""
    """Regular expression whose first group is the answer in the column; empty: the whole column."""
    metadata: tuple[str, ...] = ()
    """Columns that the verifier gets as metadata; empty: all the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GymSection(Section, section="data.gym"):
    """A `reasoning-gym` task, named by `data.train = "gym:TASK"`."""

    rows: PositiveInt = 1000
    """Problems to generate."""
    seed: NonNegativeInt = 0
    """Seed of the task's generator; a different seed gives different problems."""
    options: dict[str, Option] = field(default_factory=dict)
    """Fields of the task's own configuration, e.g. `max_terms = 4`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A few-shot example: a problem with its answer, placed before every prompt."""

    prompt: str
    """The problem."""
    answer: str
    """The answer to imitate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection(Section, section="data"):
    """Problems: a prompt (text or chat messages), an answer, free fields."""

    train: str = ""
    """Training data: `.jsonl`, `.parquet` or `.csv`, a folder of Parquet files or one saved by
    `datasets`, `hf:NAME[:SUBSET][@SPLIT]` from the hub, or `gym:TASK`."""
    held_out: str = ""
    """Evaluation data, in the same notation; empty, and no rows of `train` held out: no
    evaluation."""
    held_out_rows: NonNegativeInt = 0
    """Rows of `train` to hold out for evaluation, chosen by content; 0: none."""
    held_out_fraction: ShareBelow1 = 0.0
    """Share of `train` to hold out for evaluation, chosen by content; 0: none."""
    preset: Literal["", "verl", "trl", "gsm8k", "verifiers"] = ""
    """Column names of data sets made for other systems; `columns` overrides single ones."""
    system_prompt: str = ""
    """A system message before every chat; with it, text becomes a user message. Empty: none."""
    few_shot: tuple[Example, ...] = ()
    """Few-shot examples before every prompt: as chat turns, or as text before text."""
    few_shot_join: str = "\n\n"
    """Separator between few-shot examples and before a prompt given as text."""
    chat: Literal["auto", "always"] = "auto"
    """`always` makes text a user message; `auto` does so only for a system prompt."""
    template: str = ""
    """File of a chat template (Jinja) to use instead of the model folder's; empty: the folder's."""
    template_options: dict[str, Option] = field(default_factory=dict)
    """Variables for the chat template, e.g. `enable_thinking = false`."""
    min_prompt_tokens: NonNegativeInt = 0
    """Shorter prompts are skipped and counted, tokens; 0: no limit."""
    max_prompt_tokens: NonNegativeInt = 0
    """Longer prompts are skipped and counted, tokens; 0: one too long for the model is an error."""
    revision: str = ""
    """Branch, tag or commit of a hub data set; empty: the newest."""
    token: str = ""
    """Access token for a private hub data set, as `env:NAME` or `file:PATH`."""
    columns: ColumnsSection = field(default_factory=ColumnsSection)
    gym: GymSection = field(default_factory=GymSection)

    @property
    def has_held_out(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.held_out or self.held_out_rows or self.held_out_fraction)

    @property
    def is_always_chat(self) -> bool:
        """Whether every prompt is rendered by a chat template, whatever the rows hold."""
        return self.chat == "always" or bool(self.system_prompt)

    def _problems(self) -> Iterator[str]:
        ways = ("held_out", "held_out_rows", "held_out_fraction")
        named = [f"data.{name}" for name in ways if getattr(self, name)]
        if len(named) > 1:
            yield f"{' and '.join(named)} are both set: name one held-out split"
        if 0 < self.max_prompt_tokens < self.min_prompt_tokens:
            yield "[max_prompt_tokens], but [min_prompt_tokens]: no prompt would be left"

"""Opens the splits of `[data]`, checked: for the role `prompts`, `doctor` and `try`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.data import DataSection
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.dataset.limits import PromptEncoder, PromptLimits
from rlstreams.workers.dataset.row import Row, RowReader, parse
from rlstreams.workers.dataset.sources import numbered_rows, source_of
from rlstreams.workers.dataset.table import Dataset, Pass, check_disjoint, hold_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    """The splits of a run."""

    train: Dataset
    held_out: Dataset | None
    summary: Sequence[str]  # a line for each file: its rows, used and skipped


def open_problems(
    data: DataSection,
    encoder: PromptEncoder,
    longest: int | None,
    progress: Callable[[str], None] = lambda _: None,
) -> Problems:
    """Read the data that `[data]` names, or take the table that is kept, and check it.

    Args:
        encoder: the tokenizer, with the chat template.
        longest: tokens that the model takes; None: unknown.
        progress: called now and then with the state of a first pass.

    Raises:
        ConfigError: names field, file and line, and what is wrong there.
    """
    limits = PromptLimits.of(data, encoder, longest)

    def read(field: str) -> Dataset:
        source, reader = source_of(data, field), RowReader(data, field)
        return Pass(source=source, reader=reader, limits=limits, progress=progress).dataset()

    whole = train = read("data.train")
    held_out, parts, summary = None, [], []
    if data.held_out_rows or data.held_out_fraction:
        train, held_out = hold_out(whole, data.held_out_rows, data.held_out_fraction)
        parts = [f"{len(held_out):,} held out"]
    parts += whole.skipped()
    if num_copies := len(whole) - len(train) - len(held_out or ()):
        parts.append(f"{num_copies:,} skipped as copies of held-out prompts")
    summary.append(_line(whole, len(train), "for training", parts))
    if data.held_out:
        held_out = read("data.held_out")
        summary.append(_line(held_out, len(held_out), "to evaluate on", held_out.skipped()))
        check_disjoint(train, held_out)
    return Problems(train=train, held_out=held_out, summary=summary)


def prompt_encoder(config: RunConfig) -> PromptEncoder:
    """The model folder's tokenizer, with the chat template that `[data]` asks for.

    Raises:
        ConfigError: the folder has none, or the template cannot be read.
    """
    from rlstreams.workers.model.tokenizer import Tokenizer, TokenizerError

    data = config.data
    folder = model_folder(config.model.path)
    try:
        return Tokenizer(folder, template=data.template, options=data.template_options)
    except TokenizerError as err:
        raise ConfigError(str(err)) from err


def first_rows(data: DataSection, count: int) -> list[Row]:
    """The first rows of `data.train`, without a pass over the others.

    Raises:
        ConfigError: names field, file and line, and what is wrong there.
    """
    field = "data.train"
    reader, source = RowReader(data, field), source_of(data, field)
    rows: list[Row] = []
    for line, text in itertools.islice(numbered_rows(source, reader.columns), count):
        place = source.place(line)
        rows.append(reader.row(parse(text, place, field), len(rows), place))
    if not rows:
        raise ConfigError(f"{field}: {source.name} has no rows")
    return rows


def _line(read: Dataset, num_used: int, use: str, others: Sequence[str]) -> str:
    """Line of a source's rows: how many it has, are used, and are skipped."""
    parts = ", ".join([f"{num_used:,} {use}", *others]) if others else use
    return f"{read.source.name}: {len(read.table):,} rows{': ' if others else ' '}{parts}"

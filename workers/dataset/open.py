"""From `[data]` to its splits, checked: what the role `prompts`, `doctor` and `try` begin with."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.data import DataSection
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.dataset.dataset import Dataset
from rlstreams.workers.dataset.files import Signature, content_hash, numbered_lines, signature
from rlstreams.workers.dataset.identity import shape_of
from rlstreams.workers.dataset.index import Index
from rlstreams.workers.dataset.indexing import Pass, open_index, parse, skipped
from rlstreams.workers.dataset.limits import Limits, PromptEncoder
from rlstreams.workers.dataset.row import Row, RowReader
from rlstreams.workers.dataset.sources import Kind, json_lines, raw_rows, source_of
from rlstreams.workers.dataset.split import Share, first_common

NO_LIMIT = 1 << 62
WATCH_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    """The splits of a run."""

    train: Dataset
    held_out: Dataset | None
    told: Sequence[str]  # a line for each file: its rows, and what became of them
    watch: FileWatch


def open_problems(
    data: DataSection,
    encoder: PromptEncoder,
    longest: int | None,
    progress: Callable[[str], None] = lambda _: None,
) -> Problems:
    """Index what `[data]` names, or take the index that is kept, and check it.

    Args:
        encoder: the tokenizer, with the chat template.
        longest: tokens that the model takes; None: unknown.
        progress: told now and then how far a first pass is.

    Raises:
        ConfigError: names field, file and line, and what is wrong there.
    """
    limits = Limits(
        encoder=encoder,
        longest=longest - 1 if longest else NO_LIMIT,
        min_tokens=data.min_prompt_tokens,
        max_tokens=data.max_prompt_tokens,
    )
    share = Share(num_rows=data.held_out_rows, fraction=data.held_out_fraction)
    source = _pass(data, "data.train", limits, share, progress)
    index = open_index(source)
    train = Dataset(source, index.train)
    held_out = Dataset(source, index.held_out) if index.held_out else None
    lines = [_line(source, index, "for training")]
    watched = _watched(data, "data.train")
    if data.held_out:
        other = _pass(data, "data.held_out", limits, Share(), progress)
        other_index = open_index(other)
        held_out = Dataset(other, other_index.train)
        lines.append(_line(other, other_index, "to evaluate on"))
        watched |= _watched(data, "data.held_out")
        _check_disjoint(train, held_out)
    return Problems(train=train, held_out=held_out, told=lines, watch=FileWatch(watched))


def prompt_encoder(config: RunConfig) -> PromptEncoder:
    """The model folder's tokenizer, with the chat template that `[data]` asks for.

    Raises:
        TokenizerError: the folder has none.
    """
    from rlstreams.workers.model.tokenizer import Tokenizer

    data = config.data
    folder = model_folder(config.model.path)
    return Tokenizer(folder, template=data.template, options=data.template_options)


def first_rows(data: DataSection, field: str, count: int) -> list[Row]:
    """The first rows of `data.train` or `data.held_out`, without a pass over the others.

    Raises:
        ConfigError: names field, file and line, and what is wrong there.
    """
    reader = RowReader(data, field)
    source = source_of(data, field)
    if source.kind is Kind.JSON_LINES:
        fields = _first_lines(source.path, field)
    else:
        raws = raw_rows(source, reader.columns)
        fields = ((f"{source.name}: row {n}", raw) for n, raw in enumerate(raws, 1))
    rows = [
        reader.row(raw, number, place)
        for number, (place, raw) in enumerate(itertools.islice(fields, count))
    ]
    if not rows:
        raise ConfigError(f"{field}: {source.name} has no rows")
    return rows


class FileWatch:
    """Notices, by hash, that a file of a running run was changed."""

    def __init__(self, contents: dict[Path, str], every_s: float = WATCH_S) -> None:
        self._contents = contents
        self._every_s = every_s
        self._signatures: dict[Path, Signature | None] = {p: _signature(p) for p in contents}
        self._next_s = time.monotonic() + every_s

    def check(self) -> None:
        """Look, if it is time; a file is read again only if it seems to have been written.

        Raises:
            ConfigError: its content is another one.
        """
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + self._every_s
        for path, content in self._contents.items():
            now = _signature(path)
            if now == self._signatures[path]:
                continue
            if now is None or content_hash(path) != content:
                raise ConfigError(
                    f"{path} was changed while the run goes on (its SHA-256 was {content[:12]}...):"
                    " put it back as it was, or begin another run.id"
                )
            self._signatures[path] = now


def _watched(data: DataSection, field: str) -> dict[Path, str]:
    return {path: content_hash(path) for path in source_of(data, field).files()}


def _signature(path: Path) -> Signature | None:
    try:
        return signature(path)
    except OSError:
        return None


def _pass(
    data: DataSection,
    field: str,
    limits: Limits,
    share: Share,
    progress: Callable[[str], None],
) -> Pass:
    reader = RowReader(data, field)
    source = source_of(data, field)
    path = json_lines(source, reader.columns, progress)
    return Pass(
        name=field,
        title=source.name,
        path=path,
        reader=reader,
        limits=limits,
        share=share,
        shape=shape_of(data),
        progress=progress,
    )


def _line(source: Pass, index: Index, use: str) -> str:
    """How many rows a file has, and what became of them."""
    held_out = [f"{len(index.held_out):,} held out"] if index.held_out else []
    others = held_out + skipped(index.facts.left_out)
    parts = ", ".join([f"{len(index.train):,} {use}", *others]) if others else use
    return f"{source.title}: {index.facts.num_read:,} rows{': ' if others else ' '}{parts}"


def _check_disjoint(train: Dataset, held_out: Dataset) -> None:
    count, pair = first_common(train.split, held_out.split)
    if pair is not None:
        raise ConfigError(
            f"data.held_out: {count:,} of {len(held_out):,} prompts are in data.train too, first "
            f"{held_out.place(pair[0])}, which is {train.place(pair[1])}: remove them there, or "
            "let data.held_out_rows keep rows of data.train out"
        )


def _first_lines(path: Path, field: str) -> Iterator[tuple[str, dict[str, object]]]:
    try:
        with path.open("rb") as file:
            for number, line in numbered_lines(file, f"{field}: {path}"):
                if not line.isspace():
                    place = f"{path}:{number}"
                    yield place, parse(line, place, field)
    except OSError as err:
        raise ConfigError(f"{field}: cannot read {str(path)!r}: {err.strerror}") from err

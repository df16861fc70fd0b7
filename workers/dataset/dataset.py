"""One split of a data set: rows by number, each held to the digest that it was indexed under."""

from __future__ import annotations

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.dataset.index import Split, digest
from rlstreams.workers.dataset.indexing import Pass, parse
from rlstreams.workers.dataset.row import Row


class Dataset:
    """Rows of one split; holds no row, only where each lies."""

    def __init__(self, source: Pass, split: Split) -> None:
        self._source = source
        self._split = split

    def __len__(self) -> int:
        return len(self._split)

    @property
    def split(self) -> Split:
        """Its index."""
        return self._split

    @property
    def field(self) -> str:
        """Of the configuration."""
        return self._source.name

    def place(self, number: int) -> str:
        """`file:line` of a row."""
        return self._source.place(self._split.entry(number).line)

    def row(self, number: int) -> Row:
        """Row `number`, from 0, read from the file.

        Raises:
            ConfigError: the file was changed since it was indexed.
        """
        entry = self._split.entry(number)
        place = self._source.place(entry.line)
        try:
            with self._source.path.open("rb", buffering=0) as file:
                file.seek(entry.offset)
                line = file.read(entry.num_bytes)
        except OSError as err:
            raise ConfigError(f"{self.field}: {place}: cannot be read: {err.strerror}") from err
        if digest(line) != entry.digest:
            raise ConfigError(
                f"{self.field}: {place} was changed while the run goes on: put the file back as it "
                "was, or begin another run.id"
            )
        return self._source.reader.row(parse(line, place, self.field), number, place)

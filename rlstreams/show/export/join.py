"""Join of prompts and steps to samples, held on disk: a run may be larger than memory."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlstreams.schemas.events import DeadLetter, GroupsDropped, Prompt, StepCompleted
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.lineage.fold import Outcome
from rlstreams.streams.log.bus import Closing
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import STEPS
from rlstreams.streams.run.run_log import RunLog

_TABLES = """
CREATE TABLE prompts (group_id TEXT PRIMARY KEY, prompt TEXT, expected TEXT, metadata TEXT,
    issued_at_ms INTEGER) WITHOUT ROWID;
CREATE TABLE trained (group_id TEXT, sample INTEGER, step INTEGER, advantage REAL,
    staleness INTEGER, made_version INTEGER, PRIMARY KEY (group_id, sample)) WITHOUT ROWID;
CREATE TABLE fates (group_id TEXT, sample INTEGER, outcome TEXT, reason TEXT,
    PRIMARY KEY (group_id, sample)) WITHOUT ROWID;
"""
_PROMPT = ("prompt", "expected", "metadata", "issued_at_ms")
_TRAINED = ("step", "advantage", "staleness", "made_version")
_FATE = ("outcome", "reason")
_ALL = -1  # a fate of every sample of the group


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What other topics say of a sample; None: nothing."""

    prompt: str | None = None
    expected: str | None = None
    metadata: str | None = None
    issued_at_ms: int | None = None
    step: int | None = None
    advantage: float | None = None
    staleness: int | None = None
    made_version: int | None = None
    outcome: str = ""  # of a sample that no step used
    reason: str | None = None


class Join(Closing):
    """Reads `prompts`, `steps` and `dead-letters` once, then answers by sample."""

    def __init__(self, log: RunLog) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rlstreams-export-")
        self._db = sqlite3.connect(Path(self._folder.name) / "join.sqlite", isolation_level=None)
        self._db.executescript(f"PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF; {_TABLES}")
        self._db.execute("BEGIN")
        self._insert("prompts", 5, _prompts(log))
        self._ledger(log)
        letters = (
            (r.event.group_id, r.event.sample, str(Outcome.DEAD), r.event.reason)
            for r in log.read(DeadLetter, skip_unreadable=True)
        )
        self._insert("fates", 4, letters)

    def known(self, group_id: str, sample: int) -> Known:
        """What is known of a sample."""
        known = self._with(Known(), "prompts", _PROMPT, "group_id = ?", (group_id,))
        own = (group_id, sample)
        known = self._with(known, "trained", _TRAINED, "group_id = ? AND sample = ?", own)
        if known.step is not None:
            return known
        where = "group_id = ? AND sample IN (?, ?) ORDER BY sample DESC"
        return self._with(known, "fates", _FATE, where, (*own, _ALL))

    def _with(
        self, known: Known, table: str, columns: Sequence[str], where: str, values: Sequence[object]
    ) -> Known:
        """`known` and what a table's first matching row says."""
        text = f"SELECT {', '.join(columns)} FROM {table} WHERE {where} LIMIT 1"
        row = self._db.execute(text, values).fetchone()
        return known if row is None else replace(known, **dict(zip(columns, row, strict=True)))

    def _ledger(self, log: RunLog) -> None:
        ledger = Ledger(begins_anywhere=True, on_step=self._step, on_drop=self._drop)
        for record in log.read_topic(STEPS, skip_unreadable=True):
            ledger.apply(record.event)

    def _step(self, event: StepCompleted, _: Position) -> None:
        self._insert("trained", 6, _trained(event))
        left_out = str(Outcome.ABSENT)
        absent = ((a.group_id, a.sample, left_out, a.reason) for a in event.absent)
        self._insert("fates", 4, absent)

    def _drop(self, event: GroupsDropped, _: Position) -> None:
        rows = ((g.group_id, _ALL, str(Outcome.DROPPED), g.reason) for g in event.groups)
        self._insert("fates", 4, rows)

    def _insert(self, table: str, num_columns: int, rows: Iterator[tuple[object, ...]]) -> None:
        marks = ", ".join("?" * num_columns)
        self._db.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", rows)

    def close(self) -> None:
        """Remove the file; idempotent."""
        self._db.close()
        self._folder.cleanup()


def _prompts(log: RunLog) -> Iterator[tuple[object, ...]]:
    for record in log.read(Prompt, skip_unreadable=True):
        event = record.event
        yield event.group_id, event.text, event.answer, event.metadata, event.issued_at_ms


def _trained(event: StepCompleted) -> Iterator[tuple[object, ...]]:
    base = event.policy_version - 1
    for ref in event.samples:
        staleness = base - ref.oldest_policy_version
        yield (
            ref.group_id, ref.sample, event.step, ref.advantage, staleness, event.policy_version,
        )  # fmt: skip

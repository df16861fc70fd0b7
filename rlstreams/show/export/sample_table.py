"""The table `samples`: a row for each finished rollout, with its prompt, scores and fate.

All that fine-tuning, distillation and evaluation need of a run. Token columns have one
entry per token of `token_ids`, prompt included; one that nobody filled is null as a whole. Written
batch by batch: Parquet, or JSON lines with the same columns and types.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rlstreams.schemas.events import (
    NO_VERSION,
    Prompt,
    ScoredTrajectory,
    TensorError,
    Trajectory,
)
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.fencing import FirstRecords
from rlstreams.streams.log.group_ids import sample_name
from rlstreams.streams.log.text import plain_json
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS, STEPS
from rlstreams.streams.run.run_log import RunLog
from rlstreams.streams.samples.fold import ALL, Samples
from rlstreams.streams.samples.life import Outcome, Sample
from rlstreams.streams.segments import sampled_segments, turns
from rlstreams.streams.synced import beside
from rlstreams.streams.tokens import TokenTable, token_table
from rlstreams.words.spelling import Spelling

_IN_FLIGHT = "in flight"


class Join:
    """Reads `prompts`, `steps` and `dead-letters` once, then answers by sample."""

    def __init__(self, log: RunLog) -> None:
        self._samples = Samples(keeps=ALL)
        self._prompts: dict[str, dict[str, Any]] = {}  # columns by group
        for topic in (PROMPTS, STEPS, DEAD_LETTERS):
            for record in log.read_topic(topic, skip_unreadable=True):
                counts = self._samples.apply(record.event, record.position)
                if counts and isinstance(record.event, Prompt):
                    self._prompt(record.event)

    def columns(self, event: Trajectory, scored: ScoredTrajectory | None) -> dict[str, Any]:
        """Columns of a sample that other topics fill, given its first record; a column without a
        value is missing."""
        self._samples.apply(event if scored is None else scored)
        found = self._prompts.get(event.group_id, {})
        sample = self._samples.get(event.group_id, event.sample)
        return {**found, **({"outcome": _IN_FLIGHT} if sample is None else self._fate(sample))}

    def _fate(self, sample: Sample) -> dict[str, Any]:
        outcome, dropped = sample.outcome, sample.group.dropped
        reasons = {
            Outcome.DEAD: sample.dead,
            Outcome.ABSENT: sample.absent,
            Outcome.DROPPED: "" if dropped is None else dropped.reason,
        }
        is_over = outcome in (Outcome.TRAINED, Outcome.EVALUATED, *reasons)
        columns: dict[str, Any] = {
            "outcome": str(outcome) if is_over else _IN_FLIGHT,
            "mismatch": sample.mismatch,
        }
        if sample.step is not None:
            columns |= {
                "step": sample.step,
                "advantage": sample.advantage,
                "staleness": sample.staleness,
                "made_version": self._samples.ledger.steps[sample.step].policy_version,
            }
        return columns | ({"reason": reasons[outcome]} if outcome in reasons else {})

    def _prompt(self, event: Prompt) -> None:
        columns = {
            "prompt": event.text,
            "expected": event.answer,
            "metadata": event.metadata,
            "issued_at": event.issued_at_ms,
        }
        self._prompts.setdefault(event.group_id, columns)


_NAMED = pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.float64())]))
_TURNS = pa.list_(pa.struct([pa.field("author", pa.string()), pa.field("text", pa.string())]))
_FLOATS = pa.list_(pa.float32())
_TIME = pa.timestamp("ms", "UTC")

_COLUMNS: tuple[tuple[str, pa.DataType, str], ...] = (
    ("id", pa.string(), "GROUP/SAMPLE: what `rlstreams inspect` takes"),
    ("group_id", pa.string(), "samples of one group answer the same prompt"),
    ("sample", pa.int64(), "number in its group, from 0"),
    ("purpose", pa.string(), "train or evaluate"),
    ("row", pa.int64(), "line of the data set, from 0"),
    ("dataset_epoch", pa.int64(), "how often the data set was gone through before"),
    ("prompt", pa.string(), "text of the prompt; null if its record is gone"),
    (
        "completion",
        pa.string(),
        "text that the policy sampled, without special tokens; turns are glued",
    ),
    ("turns", _TURNS, "who wrote what behind the prompt: policy and environment, in order"),
    ("expected", pa.string(), "what the verifier compared with"),
    ("metadata", pa.string(), "free fields of the row, a JSON object"),
    ("reward", pa.float64(), "of the whole completion"),
    ("reward_parts", _NAMED, "what the reward was made of"),
    ("reward_note", pa.string(), "why, in the words of a reward function or a judge"),
    ("outcome", pa.string(), "trained, left out, dropped, dead-lettered, evaluated or in flight"),
    ("reason", pa.string(), "why it was left out or dropped"),
    ("step", pa.int64(), "that trained on it"),
    ("advantage", pa.float64(), "in that step"),
    ("staleness", pa.int64(), "versions from the oldest trained token to the trained version"),
    ("made_version", pa.int64(), "policy version that the step made"),
    ("mismatch", pa.float64(), "largest |proximal - behavior| under one version, nats"),
    ("finish_reason", pa.string(), "of the last segment: stop, length, abort"),
    ("num_sampled", pa.int64(), "tokens that a policy sampled"),
    ("token_ids", pa.list_(pa.int32()), "of the tokenizer of the run's model"),
    ("completion_mask", pa.list_(pa.uint8()), "1: the policy sampled it"),
    ("policy_versions", pa.list_(pa.int32()), "that sampled each token; null: no policy did"),
    ("behavior_logprobs", _FLOATS, "under the policy that sampled, nats"),
    ("proximal_logprobs", _FLOATS, "as rescored by the log-prob worker, nats"),
    ("reference_logprobs", _FLOATS, "under the reference policy, nats"),
    ("entropy", _FLOATS, "of the distribution that was rescored, nats"),
    ("engine", pa.string(), "name and version of what sampled"),
    ("worker", pa.string(), "that sampled"),
    ("issued_at", _TIME, "clock of prompts"),
    ("started_at", _TIME, "clock of the rollout worker"),
    ("finished_at", _TIME, "clock of the rollout worker"),
    ("scored_at", _TIME, "clock of the log-prob worker"),
)
SCHEMA = pa.schema(
    [pa.field(name, kind, metadata={"doc": doc}) for name, kind, doc in _COLUMNS],
    metadata={"doc": "A row for each finished rollout: the first record of each sample."},
)


def sample_rows(log: RunLog, spelling: Spelling) -> Iterator[dict[str, Any]]:
    """Scored samples in the order of their topic, then those that have no scores.

    A record whose tensors cannot be read is counted by the log as unreadable.
    """
    firsts = FirstRecords()  # of both topics: a sample that has scores comes with them
    join = Join(log)
    for scored in log.read(ScoredTrajectory, skip_unreadable=True):
        event = scored.event.trajectory
        if firsts.admits(event):
            yield from _row(log, event, scored.event, join, spelling)
    for record in log.read(Trajectory, skip_unreadable=True):
        if firsts.admits(record.event):
            yield from _row(log, record.event, None, join, spelling)


def _row(
    log: RunLog, event: Trajectory, scored: ScoredTrajectory | None, join: Join, spelling: Spelling
) -> Iterator[dict[str, Any]]:
    try:
        tokens = token_table(event, scored)
    except TensorError:
        log.num_unreadable += 1
        return
    sampled = sampled_segments(event)
    yield {
        "id": sample_name(event),
        "group_id": event.group_id,
        "sample": event.sample,
        "purpose": event.purpose,
        "row": event.row,
        "dataset_epoch": event.dataset_epoch,
        "turns": turns_of(event, spelling),
        "completion": spelling.plain(tokens.ids_N[tokens.is_policy_N].tolist()),
        "reward": event.reward,
        "reward_parts": _named(event.reward_parts),
        "reward_note": event.reward_note,
        "finish_reason": sampled[-1].finish_reason if sampled else None,
        "engine": event.engine,
        "worker": event.worker,
        "started_at": event.started_at_ms,
        "finished_at": event.finished_at_ms,
        "scored_at": None if scored is None else scored.scored_at_ms,
        **join.columns(event, scored),
        **_tokens(tokens),
    }


def _named(values: Mapping[str, float]) -> list[dict[str, Any]]:
    """A map as a list of name and value, so that every reader knows the types."""
    return [{"name": name, "value": value} for name, value in values.items()]


def turns_of(event: Trajectory, spelling: Spelling) -> list[dict[str, str]]:
    """Author and text of each turn after the prompt; segments of one turn are one text."""
    return [
        {"author": author, "text": spelling.plain(ids)} for author, _, ids in turns(event.segments)
    ]


def _tokens(tokens: TokenTable) -> dict[str, Any]:
    is_policy_N = tokens.is_policy_N
    return {
        "num_sampled": int(is_policy_N.sum()),
        "token_ids": tokens.ids_N,
        "completion_mask": is_policy_N.astype(np.uint8),
        "policy_versions": pa.array(tokens.version_N, mask=tokens.version_N == NO_VERSION),
        "behavior_logprobs": _floats(tokens.behavior_N),
        "proximal_logprobs": _floats(tokens.proximal_N),
        "reference_logprobs": _floats(tokens.reference_N),
        "entropy": _floats(tokens.entropy_N),
    }


def _floats(array_N: npt.NDArray[np.float32]) -> pa.Array | None:
    """The numbers, null for NaN; None where all are NaN."""
    is_missing_N = np.isnan(array_N)
    return None if is_missing_N.all() else pa.array(array_N, mask=is_missing_N)


SUFFIXES = (".parquet", ".jsonl")
STDOUT = "-"
_BATCH_ROWS = 500


def check_name(name: str) -> None:
    """Refuse a name that `write` does not write. Raises ConfigError: another suffix."""
    if name != STDOUT and Path(name).suffix not in SUFFIXES:
        raise ConfigError(
            f"--out must end in {' or '.join(SUFFIXES)}, or be {STDOUT} for JSON lines on "
            f"standard output, got {name!r}"
        )


def write(rows: Iterator[Mapping[str, Any]], schema: pa.Schema, name: str) -> int:
    """Write all rows; the file has its name only once it is whole.

    Args:
        rows: values by column; a missing one is null.
        name: of a file, whose suffix says the format; or `-`.

    Returns:
        How many rows there were.
    """
    check_name(name)
    if name == STDOUT:
        return _write_json(rows, schema, sys.stdout)
    path = Path(name)
    with beside(path) as unfinished:
        if path.suffix == ".parquet":
            return _write_parquet(rows, schema, unfinished)
        with unfinished.open("w", encoding="utf-8") as file:
            return _write_json(rows, schema, file)


def batches(rows: Iterator[Mapping[str, Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Rows as Arrow record batches; a missing value is null."""
    while chunk := list(itertools.islice(rows, _BATCH_ROWS)):
        yield pa.RecordBatch.from_pylist(chunk, schema=schema)


def _write_parquet(rows: Iterator[Mapping[str, Any]], schema: pa.Schema, path: Path) -> int:
    num_rows = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in batches(rows, schema):
            writer.write_batch(batch)
            num_rows += batch.num_rows
    return num_rows


def _write_json(rows: Iterator[Mapping[str, Any]], schema: pa.Schema, file: TextIO) -> int:
    num_rows = 0
    for batch in batches(rows, schema):
        for row in batch.to_pylist():
            file.write(plain_json(row, default=datetime.isoformat) + "\n")
        num_rows += batch.num_rows
    return num_rows

"""`rlstreams.run`: a run from a script or a notebook, by `rlstreams up` in a process of its own.

It yields a `Step` for each step, with the newest `Evaluation`, while it goes on.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, Self

import msgspec

from rlstreams.show.metrics.rows import EVALUATION, STEP
from rlstreams.streams.log import errors
from rlstreams.streams.log.errors import ConfigError, StreamsError
from rlstreams.streams.process.child import Child, Orphaned
from rlstreams.up.api.given import GivenFile, function_place, rows_file
from rlstreams.up.live.figures import END
from rlstreams.workers.config.layers import Layer, file_layers, put, tree_layer
from rlstreams.workers.config.load import Loaded, check_secrets, merged, tree_of
from rlstreams.workers.config.packaged import example
from rlstreams.workers.config.run import RunConfig, RunSection
from rlstreams.workers.config.shown import toml_lines
from rlstreams.workers.config.user_code import ADVANTAGE, LOSS, OPTIMIZER


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The held-out rows, as they were answered by one version of the weights."""

    step: int
    """Step that made the version; 0: the model that the run began with."""
    policy_version: int
    accuracy: float
    """Mean reward of the answers."""
    best: float
    """Mean over the rows of the best answer to each."""
    samples: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Read a line that `up --json` printed."""
        return cls(
            step=row["step"],
            policy_version=row["policy_version"],
            accuracy=row["evaluation/mean_reward"],
            best=row["evaluation/best_reward"],
            samples=row["evaluation/samples"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A completed optimizer step."""

    step: int
    step_target: int
    """Last step of the run."""
    at: datetime
    policy_version: int
    """Version of the weights that the step made."""
    epoch: int
    """Number of the trainer's start that made the step, from 1."""
    reward: float
    """Mean reward of the batch."""
    loss: float
    samples: int
    tokens: int
    """Tokens of the batch, prompts included."""
    masked_segments: int
    staleness_mean: float
    """Versions between the weights that sampled a token and those trained, mean over tokens."""
    staleness_max: int
    seconds: float
    tokens_per_s: float
    """Answer tokens of trained samples, mean over the last ten steps."""
    evaluation: Evaluation | None
    """Newest finished evaluation; None before the first."""
    metrics: Mapping[str, float]
    """All else that the trainer measured: `entropy`, `grad_norm`, `kl`, `clip_fraction`, ..."""

    @classmethod
    def of(cls, row: Mapping[str, Any], evaluation: Evaluation | None) -> Self:
        """Read a line that `up --json` printed."""
        own = {field.name for field in fields(cls)} - {"at", "evaluation", "metrics"}
        rest = {name: value for name, value in row.items() if name not in {*own, "at", "kind"}}
        return cls(
            **{name: row[name] for name in own},
            at=datetime.fromisoformat(row["at"]),
            evaluation=evaluation,
            metrics=rest,
        )

    @property
    def held_out(self) -> float | None:
        """Accuracy of `evaluation`; None before the first."""
        return None if self.evaluation is None else self.evaluation.accuracy

    def __str__(self) -> str:
        """Write the step as a line, as `up` prints it."""
        held_out = "-" if self.held_out is None else f"{self.held_out:.3f}"
        return (
            f"step {self.step:>4}/{self.step_target}  reward {self.reward:.3f}  "
            f"held-out {held_out}  {self.tokens_per_s:,.0f} tokens/s  "
            f"staleness {self.staleness_mean:.2f}"
        )


ORIGIN = "rlstreams.run()"
EXAMPLE = "example:"  # before the name of a file that comes with the package
_OPTIONS = ("--json", "--no-live", "--owner", "rlstreams.run")
LAST_LINES = 20  # of a supervisor that ended without a word

Source = str | Path | RunConfig | Mapping[str, object]
Function = Callable[..., object] | str
Reward = Function | Mapping[str, object]
_REWARD = "reward.verifier"
_STEMS = {_REWARD: "reward", LOSS: "loss", ADVANTAGE: "advantage", OPTIMIZER: "optimizer"}


class RunFailedError(StreamsError):
    """A role cannot go on, or the audit found a breach; the message is as `up` prints it."""


def run(
    config: Source | Sequence[str | Path],
    *,
    reward: Reward | None = None,
    loss: Function | None = None,
    advantage: Function | None = None,
    optimizer: Function | None = None,
    dataset: str | Path | Iterable[Mapping[str, Any]] | None = None,
    resume: bool = False,
    web: int | None = None,
    say: Callable[[str], object] | None = None,
    **overrides: object,
) -> Run:
    """Start a run on this machine, as `rlstreams up` does; iterate over it for its steps.

    Args:
        config: TOML files, `example:demo.toml` for one of the package's, a `RunConfig`, or a dict
            of sections.
        reward: a function of (prompt, completion, answer, metadata), plain or async; or as
            `reward.verifier`; or the section as a dict.
        loss: a function of the tokens, as `trainer.loss.kind` names one; or as that field.
        advantage: a function of the samples, as `trainer.loss.advantage` names one; or as that.
        optimizer: a function of a parameter, as `trainer.optimizer.kind` names one; or as that.
        dataset: as `data.train`, or rows: dicts with the columns that the configuration names.
        resume: go on with a run that has steps.
        web: show the run in a browser, at this port of this machine; 0: a free one. `say` gets it.
        say: called with each line that `up` prints, from another thread: `print`, for example.
        overrides: sections as dicts, `trainer={"steps": 10}`, or fields by their dotted names,
            `**{"trainer.steps": 10}`. Relative paths are of the working folder.

    Raises:
        ConfigError: a value that cannot be used, or a function that cannot be given to another
            process. What is found only while the run starts is raised by the first iteration.
    """
    trees: list[Mapping[str, object]] = [{name: value} for name, value in overrides.items()]
    section = RunSection(**_section("run", _layers(config, trees)))
    folder = Path(RunConfig(run=section).folder)
    functions = {LOSS: loss, ADVANTAGE: advantage, OPTIMIZER: optimizer}
    if isinstance(reward, Mapping):
        trees.append({"reward": reward})
    else:
        functions[_REWARD] = reward
    named, files = _named(functions, folder)
    trees.append(named)
    if dataset is not None and not isinstance(dataset, str | Path):
        files.append(rows_file(dataset, folder))
        dataset = files[-1].path
    if dataset is not None:
        trees.append({"data.train": dataset})
    loaded = merged(_layers(config, trees))
    check_secrets(loaded)
    for file in (*files, configured := _configuration_file(loaded, folder)):
        file.write()
    options = ["--resume"] * resume + ([] if web is None else ["--web", str(web)])
    return Run(loaded.config, configured.path, options, say)


def _named(
    functions: Mapping[str, Function | None], folder: Path
) -> tuple[dict[str, str], list[GivenFile]]:
    """Place of each function that is given, by its field, and the files that are to hold them."""
    places: dict[str, str] = {}
    files: list[GivenFile] = []
    for field, given in functions.items():
        if callable(given):
            places[field], file = function_place(_STEMS[field], given, folder)
            files.extend([file] if file else [])
        elif given is not None:
            places[field] = given
    return places, files


def _configuration_file(loaded: Loaded, folder: Path) -> GivenFile:
    lines = toml_lines(tree_of(loaded.config), loaded.origins)
    head = "# Configuration of an `rlstreams.run`; `rlstreams up` takes it too.\n"
    return GivenFile.of(folder, "run", ".toml", "\n".join([head, *lines, ""]))


class Run:
    """A run in progress. Iterating yields its steps; leaving the loop, or Ctrl-C, drains it.

    The end of a `with` block drains it too, and so does the end of this process. A run that did
    not complete goes on with `resume=True`.
    """

    def __init__(
        self,
        config: RunConfig,
        file: Path,
        options: Sequence[str] = (),
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.config = config
        self.folder = Path(config.folder)
        """Folder of the run, for `open_run` and for every command."""
        self.evaluations: list[Evaluation] = []
        """Finished evaluations, oldest first."""
        self.outcome = ""
        """Empty while the run goes on, then `complete`, `drained` or `failed`."""
        self._error: StreamsError | None = None
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()  # None: that was all
        self._is_asked = False  # to drain
        self._is_over = False  # nothing more will be printed
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._say = say or _silent
        # Ctrl-C of a terminal reaches us alone; it drains when we are gone, however we end.
        self._child = Child.started(
            [sys.executable, "-m", "rlstreams", "up", str(file), *options, *_OPTIONS],
            orphaned=Orphaned.DRAINS, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        readers = (self._take, self._child.stdout), (self._hear, self._child.stderr)
        self._readers = [
            threading.Thread(
                target=take, args=(TextIOWrapper(pipe, "utf-8", errors="replace"),), daemon=True
            )
            for take, pipe in readers
        ]
        for reader in self._readers:
            reader.start()

    def __iter__(self) -> Iterator[Step]:
        """Yield steps as they are made.

        Raises:
            StreamsError: the error of `up`: a `ConfigError` of a start that is refused, a
                `RunFailedError` of a role that cannot go on, a `BrokerError`.
        """
        try:
            while (step := self._steps.get()) is not None:
                yield step
        finally:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with suppress(*(() if kind is None else (StreamsError,))):  # the first error is raised
            self.close()

    def close(self) -> None:
        """Drain the run, if it goes on, and wait until its last process is gone; idempotent.

        The deadlines are those of `up`: `deadlines.drain_s` for each role, longer for a checkpoint.
        Ctrl-C meanwhile kills the roles; nothing that was committed is lost.

        Raises StreamsError: as an iteration does.
        """
        is_going_on = not self.outcome and not self._is_over
        self._is_asked |= is_going_on
        try:
            self._end(is_interrupted=is_going_on)
        except KeyboardInterrupt:
            self._end(is_interrupted=True)
            raise
        if not self.outcome and self._is_asked:
            self.outcome = "drained"
        elif not self.outcome:
            self.outcome, lines = "failed", "\n".join(self._lines)
            self._error = RunFailedError(f"`up` ended with {self._child.poll()}:\n{lines}")
        if self._error is not None:
            raise self._error

    def _end(self, *, is_interrupted: bool) -> None:
        if is_interrupted:
            self._child.signal(signal.SIGINT)
        for reader in self._readers:
            reader.join()
        self._child.wait(math.inf)

    def _take(self, pipe: IO[str]) -> None:
        """Standard output: a JSON object a line; what else a library prints is kept as text."""
        try:
            with pipe:
                for line in pipe:
                    self._take_line(line)
        finally:
            self._is_over = True
            self._steps.put(None)

    def _take_line(self, line: str) -> None:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        kind = row.get("kind") if isinstance(row, dict) else None
        if kind == EVALUATION:
            self.evaluations.append(Evaluation.of(row))
        elif kind == STEP:
            self._steps.put(Step.of(row, self.evaluations[-1] if self.evaluations else None))
        elif kind == END:
            self._error = _error_of(row)
            self.outcome = row["outcome"]
        else:
            self._lines.append(line.rstrip("\n"))

    def _hear(self, pipe: IO[str]) -> None:
        """Standard error: what a person reads."""
        with pipe:
            for line in pipe:
                self._lines.append(text := line.rstrip("\n"))
                try:
                    self._say(text)
                except Exception:  # noqa: BLE001 - the caller's own; `up` must not meet a closed pipe
                    traceback.print_exc()
                    self._say = _silent


def _silent(_: str) -> None:
    """Say nothing."""


def _error_of(row: Mapping[str, Any]) -> StreamsError | None:
    if not row["problem"]:
        return None
    kind = getattr(errors, row["error"], None) if row["error"] else RunFailedError
    return (kind or StreamsError)(row["problem"])


def _layers(
    config: Source | Sequence[str | Path], trees: Sequence[Mapping[str, object]]
) -> list[Layer]:
    """Layers of a configuration, and of what goes over it."""
    files: Sequence[str | Path] = ()
    if isinstance(config, RunConfig):
        trees = [tree_of(config), *trees]
    elif isinstance(config, Mapping):
        trees = [config, *trees]
    else:
        files = [config] if isinstance(config, str | Path) else config
    layers = [layer for name in files for layer in file_layers(_file(name))]
    return layers + [_layer(tree) for tree in trees]


def _section(name: str, layers: Sequence[Layer]) -> dict[str, Any]:
    """Return the fields of one section; of several layers that set a field, the last one counts."""
    values = {key: value for layer in layers for key, value in layer.values.items()}
    return {key[len(name) + 1 :]: v for key, v in values.items() if key.startswith(f"{name}.")}


def _file(name: str | Path) -> Path:
    text = str(name)
    return example(text.removeprefix(EXAMPLE)) if text.startswith(EXAMPLE) else Path(text)


def _layer(tree: Mapping[str, object]) -> Layer:
    nested: dict[str, Any] = {}
    for name, value in tree.items():
        try:
            put(nested, name, msgspec.to_builtins(value, enc_hook=os.fspath))
        except TypeError as err:
            raise ConfigError(f"{ORIGIN}: {name} is no value of a configuration: {err}") from err
    return tree_layer(nested, ORIGIN, Path.cwd())

"""Structured logs: one event a line on stderr, JSON for machines, readable on a terminal.

    log = get("trainer", "trainer-0", instance)
    log.info("step_finished", step=3, duration_s=0.2)

`RLSTREAMS_LOG` is the level: info (per step; the default), warning, error.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.loop.host import host_name

_LONG = ("role", "instance", "host")  # not for a terminal
_LEVELS = ("info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Log:
    """Writes events with the fields bound to it."""

    bound: Mapping[str, object] = field(default_factory=dict)

    def info(self, event: str, **fields: object) -> None:
        """Log a step or state, once each."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log an event that is worth a look; the worker goes on."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log that the worker cannot go on, or that a record was given up."""
        self._write(logging.ERROR, event, fields)

    def _write(self, level: int, event: str, fields: Mapping[str, object]) -> None:
        logger = _logger()
        if logger.isEnabledFor(level):
            name = logging.getLevelName(level).lower()
            logger.log(level, "%s", _line(name, event, {**self.bound, **fields}))


def get(role: str, worker: str, instance: str) -> Log:
    """The log of one worker process.

    Raises:
        ConfigError: `RLSTREAMS_LOG` is no level.
    """
    _logger()
    return Log({"role": role, "worker": worker, "instance": instance, "host": host_name()})


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler of our own, to recognise it among others."""


def _line(level: str, event: str, fields: Mapping[str, object]) -> str:
    if sys.stderr.isatty():
        shown = " ".join(f"{k}={_short(v)}" for k, v in fields.items() if k not in _LONG)
        return f"{time.strftime('%H:%M:%S')} {level:<7} {event} {shown}"
    at_ms = time.time_ns() // 1_000_000
    return json.dumps({"at_ms": at_ms, "level": level, "event": event, **fields}, default=str)


def _short(value: object) -> object:
    """Return four digits of a fraction; the log's JSON and the event have all."""
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1000 else value


def _logger() -> logging.Logger:
    logger = logging.getLogger("rlstreams")
    if not any(type(handler) is _Handler for handler in logger.handlers):
        level = os.environ.get("RLSTREAMS_LOG", "info").lower()
        if level not in _LEVELS:
            raise ConfigError(f"RLSTREAMS_LOG must be one of {', '.join(_LEVELS)}, got {level!r}")
        logger.addHandler(_Handler())
        logger.setLevel(level.upper())
        logger.propagate = False
    return logger

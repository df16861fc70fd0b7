"""User code that a sandbox runs, and how a call of it fails."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from rlstreams.streams.log.errors import StreamsError
from rlstreams.workers.config.user_code import Option, code_hashes, option_hashes


class UserCodeError(Exception):
    """User code raised, hung, died or answered nonsense; names the place."""


class EditedCodeError(StreamsError):
    """Another process cannot be started: it would read other files than the first one did."""


class LostCallError(UserCodeError):
    """A call, or the state that it needs, is gone, and another attempt may fare better."""


class SuspectCallError(LostCallError):
    """Its process ended, and this call was one of several that may have been the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """A function, or a class whose objects are stepped, and how it is called."""

    name: str
    kind: Literal["function", "class"] = "function"
    file: str = ""  # absolute path, or empty ...
    module: str = ""  # ... and the name of a module
    extra: tuple[str, ...] = ()  # parameters that are filled in where the code has them
    options: Mapping[str, Option] = field(default_factory=dict)
    timeout_s: float = 10.0
    memory_mb: int = 0
    processes: int = 2
    concurrency: int = 1  # calls at a time in a process, if it is asynchronous
    title: str = ""  # for messages; empty: made from the others

    def __str__(self) -> str:
        return self.title or f"{self.file or self.module}:{self.name}"

    def files(self) -> dict[str, str]:
        """SHA-256 of each file that its process reads, as they are now."""
        found = code_hashes(f"{self.file or self.module}:{self.name}")
        return found | option_hashes("options", self.options)

    def spec(self) -> str:
        """The spec for its process, as JSON: see `program.py`."""
        return json.dumps(asdict(self))

"""Event-sourced, asynchronous RL post-training of language models over Apache Kafka.

`open_run` opens a run for reading: infra/docs/python-api.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlstreams.streams.run.open_run import open_run
    from rlstreams.streams.run.run_log import RunLog

__all__ = ["RunLog", "open_run"]


def __getattr__(name: str) -> object:
    """What is exported, imported when it is asked for: `import rlstreams` costs nothing."""
    if name in __all__:
        from rlstreams.streams.run import open_run as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

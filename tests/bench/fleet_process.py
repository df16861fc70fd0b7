"""A role of the bench's fleet: `rlstreams worker ...` in a fork that has paid for its imports.

A paced rollout worker waits instead of computing: a step of its decoder takes `step_s` by the
clock, however many sequences it advances, as that of a GPU that is busy elsewhere would. So a
machine of two cores has as much engine as the bench asks for.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

_PROCESSES = get_context("forkserver")
_PRELOADED = ["rlstreams.workers.bootstrap.preload", __name__]


def started(words: list[str], log: Path, step_s: float = 0.0) -> BaseProcess:
    """The command on its way.

    Args:
        log: gets what it prints.
        step_s: of its decoder; 0: as quick as it is.
    """
    _PROCESSES.set_forkserver_preload(_PRELOADED)
    process = _PROCESSES.Process(target=_work, args=(words, log, step_s))
    process.start()
    return process


def _work(words: list[str], log: Path, step_s: float) -> None:
    from rlstreams.__main__ import main

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(output, number)
    if step_s:
        _pace(step_s)
    sys.exit(main(words))


def _pace(step_s: float) -> None:
    from rlstreams.workers.engines.decode import CacheDecoder

    step, ends_s = CacheDecoder.step, [time.monotonic()]

    def paced(self: CacheDecoder) -> None:
        step(self)
        # Admissions since the last step are in it; behind a pause it does not catch up.
        ends_s[0] = max(time.monotonic(), ends_s[0] + step_s)
        time.sleep(max(0.0, ends_s[0] - time.monotonic()))

    CacheDecoder.step = paced  # type: ignore[method-assign]

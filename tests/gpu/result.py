"""A script's result, which is written however the script ends, and its limit of time."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any


class LimitError(BaseException):
    """The limit was reached: no `except Exception` on the way takes it for a failure to retry."""


@contextmanager
def kept(out: Path | str | None, limit_s: float) -> Iterator[dict[str, Any]]:
    """Figures to fill in. At the end they are printed and written to `out`, with `ended`: the
    reason if the block did not reach its end.

    Args:
        limit_s: after it the block is broken off; its `finally` parts run. A part that C code holds
            up is broken off as that returns.

    Raises:
        SystemExit: 124, the limit was reached.
    """
    told: dict[str, Any] = {}

    def break_off(_number: int, _frame: FrameType | None) -> None:
        raise LimitError(f"the limit of {limit_s:g} s was reached")

    before = signal.signal(signal.SIGALRM, break_off)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield told
    except BaseException as err:
        told["ended"] = f"{type(err).__name__}: {err}"
        if isinstance(err, LimitError):
            raise SystemExit(124) from err
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        text = json.dumps(told, indent=1) + "\n"
        sys.stdout.write(text)
        if out:
            Path(out).write_text(text, encoding="utf-8")

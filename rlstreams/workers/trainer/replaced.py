"""Errors of a replaced trainer: whatever it met first, it ends because it was replaced.

A trainer that slept may find files removed, records expired, deadlines over. Status 75 reports to
its supervisor that a successor is at work; after any other status the supervisor would restart it
as if it had failed, or end the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlstreams.streams.log.errors import BrokerError, FencedError, OutcomeUnknownError
from rlstreams.workers.loop.stall import StuckError

# After these another request would not help: a commit failed, or would be refused again.
_FINAL = (FencedError, OutcomeUnknownError, StuckError)
FINAL_IN_LOOP = (BrokerError, *_FINAL)  # there a broker mostly refuses a commit


@contextmanager
def unless_replaced(
    ask: Callable[[], None], final: tuple[type[Exception], ...] = _FINAL
) -> Iterator[None]:
    """Pass errors on from the block, unless this trainer has been replaced.

    Args:
        ask: raises `FencedError` if somebody took over.
        final: errors after which `ask` is not called. Outside of the loop a broker's error is not
            among them: a request that was slept through looks like a broker that is away.

    Raises:
        FencedError: this trainer was replaced; from the error in the block.
    """
    try:
        yield
    except final:
        raise
    except Exception as err:
        try:
            ask()
        except FencedError as fenced:
            raise fenced from err
        except Exception as other:  # noqa: BLE001  (the first error is the one to report)
            err.add_note(f"whether it was replaced could not be asked: {other}")
        raise

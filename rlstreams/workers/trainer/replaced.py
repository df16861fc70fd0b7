"""Why a trainer ends that slept while somebody else took over: because of that, whatever it met.

Who slept may find files removed, records expired, deadlines over. Status 75 tells its supervisor
that a successor is at work; any other one would restart it as if it had failed, or end the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlstreams.streams.log.errors import BrokerError, FencedError, OutcomeUnknownError
from rlstreams.workers.loop.stall import StuckError

# To ask once more would not help: a commit failed, or what is reported with it is refused again.
_FINAL = (FencedError, OutcomeUnknownError, StuckError)
FINAL_IN_LOOP = (BrokerError, *_FINAL)  # where most of what a broker refuses is a commit


@contextmanager
def unless_replaced(
    ask: Callable[[], None], final: tuple[type[Exception], ...] = _FINAL
) -> Iterator[None]:
    """What is raised inside passes through, unless we are not the owner any more.

    Args:
        ask: raises `FencedError` if somebody took over.
        final: errors behind which nobody is asked. Outside the loop a broker's refusal is none: a
            question that was slept through looks like a broker that is away.

    Raises:
        FencedError: from what was met.
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
        except Exception as other:  # noqa: BLE001  (the first error says what happened)
            err.add_note(f"whether it was replaced could not be asked: {other}")
        raise

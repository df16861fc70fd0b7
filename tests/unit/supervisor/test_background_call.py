"""A call that nobody waits for still says how it ended."""

from __future__ import annotations

from rlstreams.streams.log.errors import BrokerError
from rlstreams.up.supervisor.background_call import BackgroundCall

WAIT_S = 10.0


def test_its_answer_comes() -> None:
    """And it is over then."""
    call = BackgroundCall(lambda: 7, WAIT_S)
    assert call.wait(WAIT_S)
    assert call.is_over()
    assert (call.answer, call.error) == (7, None)


def test_a_refusal_is_kept() -> None:
    """As it was raised."""
    refusal = BrokerError("away")

    def ask() -> int:
        raise refusal

    call = BackgroundCall(ask, WAIT_S)
    assert call.wait(WAIT_S)
    assert call.error is refusal


def test_an_error_of_any_kind_ends_it() -> None:
    """Whoever waits asks again, rather than wait for a thread that is gone."""

    def ask() -> int:
        raise ZeroDivisionError("of what")

    call = BackgroundCall(ask, WAIT_S)
    assert call.wait(WAIT_S)
    assert str(call.error) == "ZeroDivisionError: of what"

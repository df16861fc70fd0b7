"""Keys of sessions: sealed by the run's secret, read by whoever has it, carried in four ways."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstreams.workers.gateway.keys import Keys, key_of
from rlstreams.workers.gateway.port import CallRefusedError

NOW_S = 1_000_000
KEYS = Keys("secret", clock=lambda: NOW_S)


@given(
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=100),
    st.integers(0, 2**31),
)
def test_a_gateway_that_forgot_everything_knows_the_session(session_id: str, start: int) -> None:
    """All that it needs is in the key; and that stands in a path and in a header."""
    key = KEYS.make(session_id, start, NOW_S + 1)
    read = Keys("secret", clock=lambda: NOW_S).read(key)
    assert (read.session_id, read.start) == (session_id, start)
    assert set(key) <= {*string.ascii_letters, *string.digits, "-", "_"}


@given(st.data())
def test_a_key_that_was_changed_is_none(data: st.DataObject) -> None:
    """In any place, to any character."""
    key = KEYS.make("g/0", 0, NOW_S + 1)
    at = data.draw(st.integers(0, len(key) - 2))  # the last one may hold bits that mean nothing
    other = data.draw(st.characters().filter(lambda c: c != key[at]))
    with pytest.raises(CallRefusedError) as refused:
        KEYS.read(key[:at] + other + key[at + 1 :])
    assert (refused.value.status, refused.value.retry_after_s) == (401, None)


@pytest.mark.parametrize("key", ["", "rls-", "sk-abc", "rls-!", "rls-" + "A" * 5000, "rls-A", "ä"])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(CallRefusedError, match="not one of this run's sessions"):
        KEYS.read(key)


def test_keys_of_another_run_and_old_ones_are_refused() -> None:
    with pytest.raises(CallRefusedError, match="not one of this run's"):
        KEYS.read(Keys("other").make("g/0", 0, NOW_S + 1))
    with pytest.raises(CallRefusedError, match="session g/0 has expired"):
        KEYS.read(KEYS.make("g/0", 0, NOW_S))
    with pytest.raises(ValueError, match="secret is empty"):
        Keys("")


@pytest.mark.parametrize(
    ("headers", "path", "key"),
    [
        ({"authorization": "Bearer a"}, "", "a"),
        ({"authorization": "bearer  a "}, "", "a"),
        ({"x-api-key": "b", "x-goog-api-key": "c"}, "", "b"),
        ({"authorization": "Basic eA==", "x-goog-api-key": "c"}, "", "c"),
        ({"authorization": "Bearer dummy", "x-session-id": "s"}, "d", "d"),
    ],
)
def test_a_key_is_carried_in_four_ways(headers: dict[str, str], path: str, key: str) -> None:
    assert key_of(headers, path) == key


def test_no_key_is_refused() -> None:
    with pytest.raises(CallRefusedError, match="no API key"):
        key_of({"authorization": "Bearer "})

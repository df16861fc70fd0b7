"""Words as differences: every bit comes back, and few bytes are needed where little changed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstreams.workers.weights.store.delta import (
    DENSE,
    SPARSE,
    WHOLE,
    DeltaError,
    apply,
    encode,
)

DTYPES = ["<i1", "<i2", "<i4", "<i8"]


def again(words: np.ndarray, base: np.ndarray | None) -> tuple[int, np.ndarray]:
    form, data = encode(words, base)
    found = np.zeros_like(words) if base is None else base.copy()
    apply(form, data, found)
    return form, found


@given(
    st.sampled_from(DTYPES),
    st.integers(0, 300),
    st.floats(0, 1),
    st.integers(0, 2**32 - 1),
)
def test_every_bit_comes_back(dtype: str, num: int, share: float, seed: int) -> None:
    """Any words on any base, from none changed to all, over the whole range of the word."""
    draw = np.random.default_rng(seed)
    base = draw.bytes(num * np.dtype(dtype).itemsize)
    olds = np.frombuffer(base, dtype)
    words = olds.copy()
    changed = draw.random(num) < share
    words[changed] = np.frombuffer(draw.bytes(len(base)), dtype)[changed]
    for given_base in (olds, None):
        _, found = again(words, given_base)
        assert found.tobytes() == words.tobytes()


def test_the_form_goes_by_how_much_changed() -> None:
    """A change of one word in 10,000 costs some bytes, whatever its place and sign."""
    base = np.random.default_rng(0).integers(-(2**15), 2**15, 10_000).astype("<i2")
    few, many = base.copy(), base + np.int16(1)
    few[[0, 9_999]] += np.array([-1, 1], "<i2")
    assert WHOLE == again(few, None)[0]
    assert DENSE == again(many, base)[0]
    form, data = encode(few, base)
    assert form == SPARSE
    assert len(data) < 50


@pytest.mark.parametrize("form", [WHOLE, DENSE, SPARSE, 7])
def test_bytes_of_other_words_are_refused(form: int) -> None:
    """Damaged, too long, too short, of places that are not there: an error, never other words."""
    words = np.zeros(100, "<i2")
    longer = words.copy() if form == WHOLE else np.arange(100).astype("<i2") % 2
    sparse = words.copy()
    sparse[99] = 1
    _, data = encode(*{WHOLE: (longer, None), SPARSE: (sparse, words)}.get(form, (longer, words)))
    with pytest.raises(DeltaError):
        apply(form, data, words[:50])
    with pytest.raises(DeltaError):
        apply(form, data[:-1], words.copy())
    flipped = bytearray(data)
    flipped[-1] ^= 1  # of the checksum
    with pytest.raises(DeltaError):
        apply(form, bytes(flipped), words.copy())

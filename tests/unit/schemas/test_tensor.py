"""Tensors are views where they can be, and never a wrong array."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard

from rlstreams.schemas import Tensor, TensorError, decode, encode
from rlstreams.schemas.tensor import CODECS, DTYPES
from tests.factories import prompt


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (4, 0, 2), (3, 2, 2)])
def test_round_trip(dtype, codec, shape):
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    event = decode(b"".join(encode(prompt(token_ids=Tensor.of(array, codec)))))
    read = event.token_ids.numpy()
    assert (array.dtype, array.shape) == (read.dtype, read.shape)
    assert array.tolist() == read.tolist()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_decoded_arrays_are_views_of_the_record(kind):
    """By address: the array lies inside the record, and nobody can write to it."""
    array = np.arange(1000, dtype=np.int32)
    wire = kind(b"".join(encode(prompt(token_ids=Tensor.of(array)))))
    read = decode(wire).token_ids.numpy()
    start = np.frombuffer(wire, np.uint8).__array_interface__["data"][0]
    address = read.__array_interface__["data"][0]
    assert start < address < address + read.nbytes <= start + len(wire)
    assert not read.flags.writeable


def test_wrapping_does_not_copy():
    array = np.arange(10, dtype=np.float32)
    tensor = Tensor.of(array)
    array[0] = 7
    assert 7 == tensor.numpy()[0]


def test_other_layouts_are_brought_in_order():
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert array.T.tolist() == Tensor.of(array.T).numpy().tolist()
    assert array.tolist() == Tensor.of(array.astype(">i4")).numpy().tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (4,)}, r"int32 \(4,\) needs 16 bytes, got 12"),
        ({"shape": (-3,)}, "negative axis"),
        ({"shape": (1 << 60,)}, "needs"),
        ({"dtype": "float64"}, "dtype 'float64' is unknown"),
        ({"shape": (0, 1 << 62, 1 << 62), "data": b""}, "too big"),
        ({"shape": (1,) * 17}, "has 17 axes, at most 16"),
        ({"codec": "lz4"}, "codec 'lz4' is unknown"),
        ({"codec": "zstd"}, r"int32 \(3,\)"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes, message):
    good = {"dtype": "int32", "shape": (3,), "codec": "raw", "data": bytes(12)}
    with pytest.raises(TensorError, match=message):
        Tensor(**{**good, **changes}).numpy()


def test_compressed_bytes_of_another_length_are_refused():
    """A frame is not even unpacked if it declares more than the shape needs."""
    big = Tensor.of(np.zeros(1 << 20, np.uint8), "zstd")
    small = Tensor(dtype="uint8", shape=(4,), codec="zstd", data=big.data)
    with pytest.raises(TensorError, match="needs 4 bytes, its frame declares 1048576"):
        small.numpy()
    cut = Tensor(dtype="uint8", shape=(1 << 20,), codec="zstd", data=bytes(big.data)[:-3])
    with pytest.raises(TensorError, match="uint8"):
        cut.numpy()


def frame(num_bytes: int, body: bytes) -> bytes:
    """A zstd frame that declares this content (RFC 8878, 3.1.1)."""
    return bytes.fromhex("28b52ffdc058") + num_bytes.to_bytes(8, "little") + body


@pytest.mark.parametrize("num_bytes", [1 << 50, (1 << 63) - 1])
def test_a_size_that_no_memory_has_is_an_error_of_the_tensor(num_bytes):
    """Where shape and frame agree on it."""
    bomb = Tensor(dtype="uint8", shape=(num_bytes,), codec="zstd", data=frame(num_bytes, b"\1\0\0"))
    with pytest.raises(TensorError, match="uint8"):
        bomb.numpy()


def test_a_frame_is_unpacked_no_further_than_it_declares():
    """One run of 1000 bytes behind a header that says ten, or nothing; and bytes behind a frame."""
    run_of_1000 = (1000 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"A"
    whole = {"dtype": "uint8", "codec": "zstd"}
    large = Tensor(**whole, shape=(1000,), data=frame(1000, run_of_1000))
    assert large.numpy().tolist() == [65] * 1000
    with pytest.raises(TensorError, match=r"uint8 \(10,\)"):
        Tensor(**whole, shape=(10,), data=frame(10, run_of_1000)).numpy()
    untold = zstandard.ZstdCompressor(write_content_size=False).compress(b"A" * 1000)
    with pytest.raises(TensorError, match="needs 1000 bytes, its frame does not say how many"):
        Tensor(**whole, shape=(1000,), data=untold).numpy()
    with pytest.raises(TensorError, match="unused"):
        Tensor(**whole, shape=(1000,), data=bytes(large.data) + b"junk").numpy()


@pytest.mark.parametrize(
    ("dtype", "codec", "message"),
    [("float64", "raw", "got 'float64'"), ("int32", "lz4", "got 'lz4'")],
)
def test_unknown_kinds_are_not_wrapped(dtype, codec, message):
    with pytest.raises(TensorError, match=message):
        Tensor.of(np.zeros(2, dtype), codec)

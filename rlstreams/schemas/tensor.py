"""Arrays on the wire: bytes beside their dtype, shape and codec, never Avro arrays."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

Buffer = bytes | bytearray | memoryview

DTYPES = ("uint8", "uint16", "int32", "int64", "float32", "float16")
CODECS = ("raw", "zstd")
MAX_AXES = 16
_ZSTD_LEVEL = 1
_NUMPY = {name: np.dtype(name).newbyteorder("<") for name in DTYPES}
# In both byte orders. numpy makes a dtype's name anew each time it is asked, in 2.5 us.
_NAMES = {dtype: name for name, own in _NUMPY.items() for dtype in (own, own.newbyteorder())}


class TensorError(ValueError):
    """A tensor whose bytes, dtype, shape and codec do not fit together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One little-endian, row-major array.

    `data` holds the array as it is (`codec == "raw"`) or compressed (`"zstd"`). A raw tensor that
    was decoded from a record is a view of that record's bytes: copy what you keep.
    """

    dtype: str
    shape: tuple[int, ...]
    codec: str
    data: Buffer

    @classmethod
    def of(cls, array: npt.NDArray[Any], codec: str = "raw") -> Tensor:
        """Wrap `array` without a copy where it is contiguous and little-endian already.

        Raises:
            TensorError: a dtype or codec that the wire does not know.
        """
        name = _NAMES.get(array.dtype)
        if name is None:
            raise TensorError(f"tensor dtype must be one of {DTYPES}, got {array.dtype.name!r}")
        flat = np.ascontiguousarray(array, _NUMPY[name])
        data: Buffer = memoryview(flat.reshape(-1)).cast("B") if flat.size else b""
        if codec == "zstd":
            data = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(data)
        elif codec != "raw":
            raise TensorError(f"tensor codec must be one of {CODECS}, got {codec!r}")
        return cls(dtype=name, shape=array.shape, codec=codec, data=data)

    def numpy(self) -> npt.NDArray[Any]:
        """The array with its shape; of a decoded record it is read-only, and a view where raw.

        Raises:
            TensorError: unknown dtype or codec, corrupt compressed bytes, or a wrong length. Never
                more is unpacked than dtype and shape ask for; the caller checks the limit of its
                field before.
        """
        dtype = _NUMPY.get(self.dtype)
        if dtype is None:
            raise TensorError(f"tensor dtype {self.dtype!r} is unknown; known: {DTYPES}")
        shape = self.shape
        if self.codec == "raw" and len(shape) == 1 and len(self.data) == shape[0] * dtype.itemsize:
            return np.frombuffer(self.data, dtype)
        if len(shape) > MAX_AXES:
            raise TensorError(f"tensor shape has {len(shape)} axes, at most {MAX_AXES} are known")
        if shape and min(shape) < 0:
            raise TensorError(f"tensor shape {self.shape} has a negative axis")
        num_bytes = prod(self.shape) * dtype.itemsize
        data = self.data if self.codec == "raw" else self._uncompressed(num_bytes)
        if len(data) != num_bytes:
            raise TensorError(
                f"tensor of {self.dtype} {self.shape} needs {num_bytes} bytes, got {len(data)}"
            )
        array = np.frombuffer(data, dtype)
        try:
            return array if len(self.shape) == 1 else array.reshape(self.shape)
        except ValueError as err:  # no elements, and axes beyond what an array can have
            raise TensorError(f"tensor of {self.dtype} {self.shape}: {err}") from err

    def _uncompressed(self, num_bytes: int) -> Buffer:
        if self.codec != "zstd":
            raise TensorError(f"tensor codec {self.codec!r} is unknown; known: {CODECS}")
        try:
            # The decompressor would believe the frame header and allocate what it says.
            declared = zstandard.frame_content_size(self.data)
            if declared != num_bytes:
                size = f"declares {declared}" if declared >= 0 else "does not say how many it has"
                raise TensorError(
                    f"tensor of {self.dtype} {self.shape} needs {num_bytes} bytes, its frame {size}"
                )
            return zstandard.ZstdDecompressor().decompress(self.data, allow_extra_data=False)
        except (zstandard.ZstdError, MemoryError, OverflowError) as err:
            reason = str(err) or "more than there is memory for"
            raise TensorError(f"tensor of {self.dtype} {self.shape}: {reason}") from err

    def __len__(self) -> int:
        """Length of the first axis; 0 for a scalar shape."""
        return self.shape[0] if self.shape else 0

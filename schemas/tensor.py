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
_ZSTD_LEVEL = 1


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
        if array.dtype.name not in DTYPES:
            raise TensorError(f"tensor dtype must be one of {DTYPES}, got {array.dtype.name!r}")
        flat = np.ascontiguousarray(array)
        data: Buffer = memoryview(flat.reshape(-1)).cast("B") if flat.size else b""
        if codec == "zstd":
            data = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(data)
        elif codec != "raw":
            raise TensorError(f"tensor codec must be one of {CODECS}, got {codec!r}")
        return cls(dtype=flat.dtype.name, shape=tuple(array.shape), codec=codec, data=data)

    def numpy(self) -> npt.NDArray[Any]:
        """The array with its shape; read-only, and a view of the record where the codec is raw.

        Raises:
            TensorError: unknown dtype or codec, corrupt compressed bytes, or a wrong length.
        """
        if self.dtype not in DTYPES:
            raise TensorError(f"tensor dtype {self.dtype!r} is unknown; known: {DTYPES}")
        if any(n < 0 for n in self.shape):
            raise TensorError(f"tensor shape {self.shape} has a negative axis")
        dtype = np.dtype(self.dtype)
        num_bytes = prod(self.shape) * dtype.itemsize
        data = self._uncompressed(num_bytes)
        if len(data) != num_bytes:
            raise TensorError(
                f"tensor of {self.dtype} {self.shape} needs {num_bytes} bytes, got {len(data)}"
            )
        return np.frombuffer(data, dtype).reshape(self.shape)

    def _uncompressed(self, num_bytes: int) -> Buffer:
        if self.codec == "raw":
            return self.data
        if self.codec != "zstd":
            raise TensorError(f"tensor codec {self.codec!r} is unknown; known: {CODECS}")
        try:
            # The bound keeps a corrupt frame header from asking for gigabytes.
            return zstandard.ZstdDecompressor().decompress(self.data, max_output_size=num_bytes)
        except zstandard.ZstdError as err:
            raise TensorError(f"tensor of {self.dtype} {self.shape}: {err}") from err

    def __len__(self) -> int:
        """Length of the first axis; 0 for a scalar shape."""
        return self.shape[0] if self.shape else 0

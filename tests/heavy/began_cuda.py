"""For `test_spawners`: a fork server that imports this looks as if it had initialised CUDA, and no
fork of it can be a worker."""

import ctypes
import sys
from types import SimpleNamespace

ctypes.CDLL = lambda *_, **__: SimpleNamespace(cuDeviceGetCount=lambda _: 0)  # type: ignore[assignment, misc]
sys.modules["rlstreams.__main__"] = None  # type: ignore[assignment]

"""For `test_spawners`: a fork server that imports this looks as if it had initialised CUDA, and no
fork of it can be a worker."""

import sys
from types import SimpleNamespace

from rlstreams.up.supervisor.spawner import PRELOAD

sys.modules[PRELOAD] = SimpleNamespace(BEGAN_CUDA=True)  # type: ignore[assignment]
sys.modules["rlstreams.__main__"] = None  # type: ignore[assignment]

"""The module that a fork server imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_REPORT = """
import sys, threading
import rlstreams.workers.bootstrap.preload
from pathlib import Path
tasks = Path("/proc/self/task")
print(threading.active_count(), len(list(tasks.iterdir())) if tasks.exists() else 1)
print("transformers.models.qwen3_moe.modeling_qwen3_moe" in sys.modules)
before = set(sys.modules)
import rlstreams.streams.kafka.bus, rlstreams.workers.bootstrap.parts
import rlstreams.workers.bootstrap.weights, rlstreams.workers.compute.team
for role in ("trainer", "logprob", "rollout"):
    __import__(f"rlstreams.workers.{role}.worker")
print(len(set(sys.modules) - before))
"""


@pytest.mark.slow
def test_preloading_imports_the_model_and_starts_no_thread() -> None:
    """A process with threads must not be forked, and roles must have nothing left to import."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "RLSTREAMS_PRELOAD_MODEL": str(ROOT / "infra" / "examples" / "demo" / "model"),
    }
    done = subprocess.run(
        [sys.executable, "-c", _REPORT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout.split() == ["1", "1", "True", "0"]


@pytest.mark.parametrize(
    ("modules", "costly"),
    [
        (("trainer",), ("torch.distributed.fsdp",)),  # five seconds
        (("rollout", "logprob"), ("torch", "uvicorn")),
    ],
)
def test_a_role_starts_without_what_few_runs_need(
    modules: tuple[str, ...], costly: tuple[str, ...]
) -> None:
    """Each start of a role waits for its imports, after a kill too."""
    names = ", ".join(f"rlstreams.workers.{name}.worker" for name in modules)
    program = f"import sys, {names}; print(sys.modules.keys() & set({costly}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_a_link_between_ranks_needs_no_torch() -> None:
    """A follower that a test ends at once took three seconds of CPU to begin."""
    program = "import sys, tests.heavy.trainer.odd_follower; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"

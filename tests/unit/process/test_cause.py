"""The line of a process's log that says why it died."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rlstreams.streams.process import cause
from rlstreams.streams.process.cause import last_error
from rlstreams.streams.process.child import Child, Orphaned


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("a\nValueError: first\nb\nlib.OtherError: second\nits note\n", "lib.OtherError: second"),
        ("RuntimeError: \n\n   Some tensors share memory\n  more\n", "RuntimeError: Some tensors"),
        ("RuntimeError: \n", "RuntimeError: "),
        ("nothing of it\n", ""),
        (
            "usage: vllm serve\nvllm serve: error: unrecognized arguments: --no\n",
            "vllm serve: error: u",
        ),
        (
            "(EngineCore_DP0 pid=7) ERROR 11-27 18:00:01 [core.py:772] ValueError: No memory\n"
            "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause "
            "above. Failed core proc(s): {}\n",
            "ValueError: No memory",
        ),
        ("RuntimeError: failed. See root cause above.\n", "RuntimeError: failed."),
        (
            "(APIServer pid=5) pydantic_core.ValidationError: 1 validation error for CacheConfig\n"
            "(APIServer pid=5) gpu_memory_utilization\n"
            "(APIServer pid=5)   Input should be less than or equal to 1 [type=less_than_equal]\n",
            "pydantic_core.ValidationError: 1 validation error for CacheConfig "
            "gpu_memory_utilization Input should be less than or equal to 1",
        ),
    ],
)
def test_the_last_error_is_found_with_its_text(tmp_path: Path, log: str, cause: str) -> None:
    (tmp_path / "log").write_text(log)
    found = last_error(tmp_path / "log")
    assert found.startswith(cause)
    assert bool(found) == bool(cause)
    assert "" == last_error(tmp_path / "log", start=len(log))


def test_a_kill_by_the_kernel_for_memory_is_told_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = tmp_path / "vmstat"
    monkeypatch.setattr(cause, "_KERNEL", counts)
    for before, after, is_memory in (
        ("oom_kill 4", "oom_kill 5", True),
        ("", "", False),
        ("oom_kill 5", "oom_kill 5", False),
    ):
        counts.write_text(f"pgfault 7\n{before}\n")
        child = Child.started(["sleep", "60"], orphaned=Orphaned.DRAINS)
        assert not child.ran_out_of_memory()
        counts.write_text(f"pgfault 9\n{after}\n")
        child.signal(signal.SIGKILL)
        assert child.wait(10.0)
        assert is_memory == child.ran_out_of_memory()
    counts.unlink()
    assert 0 == cause.memory_kills()

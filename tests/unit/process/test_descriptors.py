"""A low limit of open files: raised where it may be, and told before anything starts."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rlstreams.check.doctor.diagnose import preflight
from rlstreams.check.doctor.machine import files
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.process import descriptors
from rlstreams.streams.process.child import Child, Orphaned
from rlstreams.workers.config.load import load

DEMO = Path(__file__).parents[3] / "infra/examples/demo.toml"
_ASK = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
_RAISE = (
    "import resource; from rlstreams.streams.process.descriptors import raise_limit; "
    "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300)); print(raise_limit()); "
    f"import subprocess, sys; sys.stdout.flush(); subprocess.run([sys.executable, '-c', '{_ASK}'])"
)


def test_the_soft_limit_becomes_the_hard_one_and_children_have_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _RAISE], capture_output=True, text=True, check=True
    )
    assert ["300", "300 300"] == done.stdout.splitlines()


def test_a_start_that_would_run_out_of_files_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With 128 files the broker came up, lost its log folder, and `up` waited 90 s for it."""
    config = load([DEMO], [f"--run.dir={tmp_path / 'run'}"])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (128, 128))
    with pytest.raises(ConfigError, match=r"may have 128 files open, .* raise the hard limit"):
        preflight(config)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert "warn" == files(config).level  # it starts; more of a log than some GB would not fit
    elsewhere = load([DEMO], ["--broker.bootstrap=kafka:9092"])
    assert "ok" == files(elsewhere).level


def test_a_child_is_started_by_a_process_with_a_thousand_files_open() -> None:
    """`select` refuses descriptors above 1023."""
    if descriptors.raise_limit() < 2048:
        pytest.skip("this machine lets a process have no 2048 files")
    null = os.open(os.devnull, os.O_RDONLY)
    held = [os.dup(null) for _ in range(1100)]
    try:
        child = Child.started(["true"], orphaned=Orphaned.DIES)
        assert child.wait(20.0)
        assert 0 == child.poll()
    finally:
        for fd in (null, *held):
            os.close(fd)

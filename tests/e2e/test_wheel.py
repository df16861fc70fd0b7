"""From a fresh wheel in an empty folder: a newcomer's own rows, tried and learned from."""

from __future__ import annotations

import json
import random
import re
import resource
from pathlib import Path

import pytest

from tests.e2e.installed import Installed

TRY_CPU_S = 40.0  # for a slow machine: on a quick one it is a few
_ACCURACY = re.compile(r"accuracy from (\d\.\d\d) \(version 0\) to (\d\.\d\d) \(version 60\)")


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed.of(tmp_path_factory.mktemp("wheel"))


def sums(path: Path, count: int) -> None:
    """Rows as a newcomer has them: columns of their own names, a number as number."""
    rng = random.Random(5)
    terms = [[rng.randint(1, 9) for _ in range(rng.randint(3, 6))] for _ in range(count)]
    rows = ({"question": f"{'+'.join(map(str, t))}=", "target": sum(t), "id": i}
            for i, t in enumerate(terms))  # fmt: skip
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")


def test_a_project_of_ones_own_learns(installed: Installed, tmp_path: Path) -> None:
    """init, the reward's test, try, up: each says what is next, and the last one learns."""
    sums(tmp_path / "my.jsonl", 300)
    made = installed.run(tmp_path, "rlstreams", "init", "x", "--from", "my.jsonl")
    assert 0 == made.returncode, made.stdout
    assert "column 'question'; answer: column 'target', a number" in made.stdout
    project = tmp_path / "x"
    checked = installed.run(project, "python", "test_reward.py")
    assert (0, "20 rows: the reward is as expected\n") == (checked.returncode, checked.stdout)

    before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    tried = installed.run(project, "rlstreams", "try")
    assert 0 == tried.returncode, tried.stdout
    assert re.search(r"12 answers, mean reward 0\.\d\d\n", tried.stdout)
    # Of CPU, which another load does not stretch; on a free machine the clock says less.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s < TRY_CPU_S

    done = installed.run(project, "rlstreams", "up")
    assert 0 == done.returncode, done.stdout
    found = _ACCURACY.search(done.stdout)
    assert found is not None, done.stdout
    assert float(found[2]) >= float(found[1]) + 0.2
    assert (project / "runs/x/report.html").is_file()
    audited = installed.run(project, "rlstreams", "audit")
    assert 0 == audited.returncode, audited.stdout


def test_the_demo_needs_no_files(installed: Installed, tmp_path: Path) -> None:
    """Twice, beside a user's modules with the names of our folders; each run has its own name."""
    (tmp_path / "runs/demo").mkdir(parents=True)
    for stranger in ("schemas.py", "workers/__init__.py", "streams/__init__.py"):
        (tmp_path / stranger).parent.mkdir(exist_ok=True)
        (tmp_path / stranger).write_text("raise RuntimeError('a stranger was imported')\n", "utf-8")
    assert {"rlstreams"} == installed.packages
    # `python -m` puts the working folder first on the path, where the strangers are.
    demo = ("python", "-m", "rlstreams", "demo", "--steps", "3", "--prompts.evaluate_rows=8")
    done = installed.run(tmp_path, *demo)
    assert 0 == done.returncode, done.stdout
    assert "run demo-2: complete" in done.stdout
    assert (tmp_path / "runs/demo-2/report.html").is_file()

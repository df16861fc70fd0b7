"""From a fresh wheel in an empty folder: the tutorial, and the demo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlstreams import open_run
from tests.e2e.command import ROOT
from tests.e2e.installed import Installed
from tests.readme_blocks import blocks

TUTORIAL = ROOT / "infra/docs/tutorial.md"
PACKAGED = """
from rlstreams.workers.config.load import load
from rlstreams.workers.config.packaged import example
from rlstreams.workers.dataset.open import first_rows
config = load([example("demo.toml")], [])
assert (example("demo/model") / "model.safetensors").is_file()
assert len(first_rows(config.data, 3)) == 3
"""
_ACCURACY = re.compile(
    r"held-out \w+ from (\d\.\d\d) \(version 0\) to (\d\.\d\d) \(version (\d+)\)"
)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed.of(tmp_path_factory.mktemp("wheel"))


def script(page: str) -> str:
    """What somebody types who follows the page: its files written, its commands run, in order."""
    lines = ["set -euo pipefail"]
    for block in blocks(page):
        if block.saved_as:
            lines.append(f"cat > {block.saved_as} <<'END'\n{block.text}END")
        elif block.language == "bash":
            lines.append(block.text)
    return "\n".join(lines)


def test_the_tutorial_leads_to_its_run(installed: Installed, tmp_path: Path) -> None:
    """Rows, init, the reward and its test, try: all that stands before `up`, from the wheel."""
    typed, up, _ = script(TUTORIAL.read_text("utf-8")).partition("rlstreams up --steps 40\n")
    assert up
    done = installed.run(tmp_path, "bash", "-c", typed)
    assert 0 == done.returncode, done.stdout
    assert "column 'question'; answer: column 'target', a number" in done.stdout
    assert "the reward is as expected\n" in done.stdout
    assert re.search(r"12 answers, mean reward 0\.\d\d\n", done.stdout)


@pytest.mark.slow
def test_the_tutorial_leads_to_a_result(installed: Installed, tmp_path: Path) -> None:
    """Rows, init, the reward and its test, try, up, a look, and a change: the model learns.

    The reward is edited as well before the run goes on, which the page promises to name.
    """
    edit, go_on = "echo '# edited' >> reward.py\n", "rlstreams up --resume"
    typed = script(TUTORIAL.read_text("utf-8")).replace(go_on, edit + go_on)
    assert 1 == typed.count(edit)
    done = installed.run(tmp_path, "bash", "-c", typed)
    assert 0 == done.returncode, done.stdout
    assert "column 'question'; answer: column 'target', a number" in done.stdout
    assert "the reward is as expected\n" in done.stdout
    assert re.search(r"12 answers, mean reward 0\.\d\d\n", done.stdout)
    first, resumed = _ACCURACY.findall(done.stdout)
    assert ["40", "50"] == [first[2], resumed[2]]
    assert float(first[1]) >= float(first[0]) + 0.2, first
    assert "step 40, worst by reward" in done.stdout
    assert 2 == done.stdout.count("lost 0, trained twice 0 (read from the log)")
    assert "trainer.optimizer.lr: 0.0002 -> 0.0001" in done.stdout
    edited = r"SHA-256 of reward\.verifier: reward\.py: [0-9a-f]{12} -> [0-9a-f]{12}"
    assert re.search(edited, done.stdout)
    run = tmp_path / "sums/runs/sums"
    assert re.search(edited.replace(" -> ", " -&gt; "), (run / "report.html").read_text("utf-8"))
    assert (run / "report.html").is_file()
    with open_run(run) as log:
        rates = [round(step.metrics["lr"], 7) for step in log.steps()]
    assert ([2e-4], [1e-4] * 10) == (rates[39:40], rates[40:])


@pytest.fixture
def among_strangers(tmp_path: Path) -> Path:
    """A folder with a user's modules that have the names of our folders: `python -m` puts it first
    on the path."""
    for stranger in ("schemas.py", "workers/__init__.py", "streams/__init__.py"):
        (tmp_path / stranger).parent.mkdir(exist_ok=True)
        (tmp_path / stranger).write_text("raise RuntimeError('a stranger was imported')\n", "utf-8")
    return tmp_path


def test_a_broker_and_a_configuration_need_no_files(
    installed: Installed, among_strangers: Path
) -> None:
    """The wheel has the broker's `jars.lock` and the demo; no stranger is imported."""
    assert {"rlstreams"} == installed.packages
    for words in (
        ("-m", "rlstreams", "broker", "start", "broker"),
        ("-m", "rlstreams", "broker", "stop", "broker"),
        ("-c", PACKAGED),
    ):
        done = installed.run(among_strangers, "python", *words)
        assert 0 == done.returncode, done.stdout


@pytest.mark.slow
def test_the_demo_needs_no_files(installed: Installed, among_strangers: Path) -> None:
    """Beside a run of the same name: each has its own."""
    tmp_path = among_strangers
    (tmp_path / "runs/demo").mkdir(parents=True)
    demo = ("python", "-m", "rlstreams", "demo", "--steps", "3", "--prompts.evaluate_rows=8")
    done = installed.run(tmp_path, *demo)
    assert 0 == done.returncode, done.stdout
    assert "run demo-2: complete" in done.stdout
    assert (tmp_path / "runs/demo-2/report.html").is_file()

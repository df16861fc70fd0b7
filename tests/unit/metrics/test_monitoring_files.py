"""Dashboard and alert rules ask for metrics that the exposition has, by labels that these have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rlstreams.show.metrics.prometheus import families
from rlstreams.streams.views.feed import Feed, Views
from tests import factories
from tests.memory.bus import MemoryBus
from tests.unit.metrics.test_metrics import begun, evaluation, send

FILES = Path(__file__).parents[3] / "infra/monitoring"
ALERTS = FILES / "alerts.yaml"


def expressions() -> list[str]:
    board = json.loads((FILES / "grafana.json").read_text("utf-8"))
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = re.findall(r"expr: (?:>-\n)?(.*?)\n +(?:for|annotations):", ALERTS.read_text(), re.S)
    assert (17, 11) == (len(found), len(rules))
    return found + rules


def labels_of_metrics() -> dict[str, set[str]]:
    log, views = begun(), Views()
    send(log, *evaluation())
    feed = Feed(MemoryBus(log, "run"), views)
    feed.catch_up(60)
    feed.close()
    views.apply(factories.worker_report())
    return {
        f"rlstreams_{f.name}{'_total' * f.is_total}": {"run", *f.labels}
        for f in families(views.state)
    }


def test_expressions_name_metrics_and_labels_that_are_served() -> None:
    """A renamed metric leaves no panel empty and no alert silent."""
    known = labels_of_metrics()
    for expression in expressions():
        used = re.findall(r"(rlstreams_\w+)(?:\{(.*?)\})?", expression)
        assert used, expression
        for name, matchers in used:
            assert name in known, expression
            assert set(re.findall(r"(\w+)[!=]~?=?\"", matchers)) <= known[name], expression
        grouped = re.findall(r"\b(?:by|on|ignoring) \((.*?)\)", expression)
        labels = {label.strip() for group in grouped for label in group.split(",")}
        assert labels <= set().union(*(known[name] for name, _ in used)), expression


def test_prometheus_itself_reads_them(tmp_path: Path) -> None:
    """By promtool, where it is installed; the board's expressions as rules."""
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("no promtool: it comes with Prometheus")
    rules = [
        {"record": f"rule:n{number}", "expr": text} for number, text in enumerate(expressions())
    ]
    (tmp_path / "board.yaml").write_text(json.dumps({"groups": [{"name": "a", "rules": rules}]}))
    words = [promtool, "check", "rules", str(ALERTS), str(tmp_path / "board.yaml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert 0 == done.returncode, done.stdout + done.stderr

"""One fold of samples, of workers, of sessions, one ledger in `up`; and the lives are true."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from tests.syntax_trees import MODULES, ROOT, Module, is_within

# Who may ask an event which stage of a sample it is: roles at their own work, and readers of single
# records. All others ask `Samples`; none of these keeps what became of a sample.
TOLD_SAMPLES = (
    "rlstreams.streams.samples.fold",
    "rlstreams.streams.audit",  # a fold of its own: it checks the other
    "rlstreams.streams.ledger",
    "rlstreams.streams.log",
    "rlstreams.streams.recording",  # columns of records, valid or not
    "rlstreams.streams.workers",  # which process wrote it
    "rlstreams.streams.lineage.fold",  # the records themselves, told by `Samples` which count
    "rlstreams.streams.views.evaluation",  # answers as text, as the next four
    "rlstreams.streams.views.feed",
    "rlstreams.show.metrics.rows",
    "rlstreams.cli.inspect",
    "rlstreams.show.web.reading",
    "rlstreams.show.web.placed",  # where records lie, valid or not
    "rlstreams.show.export.sample_table",
    "rlstreams.debug.letters.view",  # each letter, as the next two
    "rlstreams.show.report.fold",
    "rlstreams.show.health.poison",
    "rlstreams.workers",
)
TOLD_WORKERS = (
    "rlstreams.streams.workers",
    "rlstreams.streams.audit",
    "rlstreams.streams.lineage.fold",
    "rlstreams.show.health.health",  # dates reports by its own clock
    "rlstreams.workers.loop.reporter",  # the newest one of each, for roles that may not fold a run
    "rlstreams.workers.trainer.publisher",  # requests to itself
)
TOLD_SESSIONS = (
    "rlstreams.streams.sessions.fold",
    "rlstreams.streams.audit",  # a fold of its own, as of samples
    "rlstreams.streams.recording",  # columns of records, valid or not
    "rlstreams.streams.log",
    "rlstreams.workers",
)


def askers(modules: Sequence[Module], events: Sequence[str], told: Sequence[str]) -> list[str]:
    """Product modules that ask an event whether it is one of these, and are not told."""
    names = "|".join(events)
    check = rf"isinstance\(.*\b({names})\b|({names})\(\)$"
    allowed = (*told, "tests", "infra")
    others = [m for m in modules if not any(is_within(m.name, place) for place in allowed)]
    return sorted({m.name for m in others for text in m.asked if re.match(check, text)})


def unknown_lives(text: str, modules: Sequence[Module]) -> list[str]:
    """Names `file:Class.function` of a text that the code has not."""
    home = ROOT / "rlstreams"
    own = [m for m in modules if m.path.is_relative_to(home)]
    trees = {str(m.path.relative_to(home)): m.tree for m in own}
    wrong = []
    for file, dotted in re.findall(r"`([a-z_/]+\.py):([A-Za-z_.]+)`", text):
        node: ast.AST | None = trees.get(file)
        for part in dotted.split("."):
            defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            inside = [] if node is None else list(ast.iter_child_nodes(node))
            node = next((n for n in inside if isinstance(n, defined) and n.name == part), None)
        if node is None:
            wrong.append(f"{file}:{dotted}")
    return wrong


def test_one_class_folds_samples_and_one_folds_workers() -> None:
    """What became of a sample, and what a worker does, is decided in one place each."""
    stages = ("Prompt", "Trajectory", "ScoredTrajectory", "DeadLetter", "GroupsDropped")
    assert askers(MODULES, stages, TOLD_SAMPLES) == []
    assert askers(MODULES, ("WorkerReport", "PolicyLoaded", "PullRequested"), TOLD_WORKERS) == []


def test_one_class_folds_sessions() -> None:
    """Which record of a session counts, and what its calls continue, is decided in one place."""
    events = ("SessionOpened", "CallCommitted", "CallReplayed", "SessionClosed", "OutcomeReported")
    assert askers(MODULES, events, TOLD_SESSIONS) == []


def test_one_ledger_in_the_supervisor() -> None:
    """All that `up` shows and watches asks the ledger of its `Folds`."""
    own = [m for m in MODULES if is_within(m.name, "rlstreams.up")]
    calls = [(m.name, n) for m in own for n in m.nodes if isinstance(n, ast.Call)]
    made = [name for name, n in calls if ast.unparse(n.func) in ("Ledger", "Samples", "Workers")]
    folds = [name for name, n in calls if ast.unparse(n.func) == "Folds"]
    assert (made, folds) == ([], ["rlstreams.up.supervisor.watcher"])


def test_every_name_in_lives_exists() -> None:
    text = (ROOT / "infra/docs/lives.md").read_text(encoding="utf-8")
    assert len(re.findall(r"\.py:", text)) >= 20
    assert unknown_lives(text, MODULES) == []
    assert unknown_lives("`show/health/poison.py:PoisonWatch.gone`", MODULES)

"""One class learns and one scores, on any mesh: counted in the syntax trees, nothing is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.syntax_trees import MODULES, Module, is_within, modules_of

# All that learns or scores tokens. A list here only ever gets shorter.
COMPUTING = {
    "Learner": "rlstreams.workers.compute.learn",
    "MeshScorer": "rlstreams.workers.compute.score",
    "PassingScorer": "rlstreams.workers.logprob.passing",  # without a model
    "Scorer": "rlstreams.workers.engines.base",  # the port
    "TokenScorer": "rlstreams.workers.model.token_scores",  # a model as a function
}
# Sentences with which configuration refuses ranks, a backend or a layout. A number here only ever
# gets smaller.
REFUSALS = 9
_OF_A_MESH = re.compile(
    r"\[(trainer\.|logprob\.)?(ranks|backend|layout)[\].]|\[\{role\}\.ranks\]|trainer\.hosts"
)


def computing_classes(modules: Sequence[Module]) -> dict[str, str]:
    """Classes of the workers that learn or score, and where each is."""
    of_workers = [m for m in modules if is_within(m.name, "rlstreams.workers")]
    nodes = [(m.name, node) for m in of_workers for node in m.nodes]
    named = [(where, n.name) for where, n in nodes if isinstance(n, ast.ClassDef)]
    return {name: where for where, name in named if name.endswith(("Learner", "Scorer", "Leader"))}


def refusals(modules: Sequence[Module]) -> list[str]:
    """Problems of ranks, backends and layouts that sections yield."""
    of_config = [m for m in modules if is_within(m.name, "rlstreams.workers.config")]
    yields = [n for m in of_config for n in m.nodes if isinstance(n, ast.Yield)]
    told = [ast.unparse(one.value) for one in yields if one.value]
    return [sentence for sentence in told if _OF_A_MESH.search(sentence)]


def test_one_class_learns_and_one_scores() -> None:
    """Ranks, layers and layouts are dimensions of one mesh, no classes of their own."""
    assert computing_classes(MODULES) == COMPUTING


def test_few_meshes_are_refused() -> None:
    """What a mesh can compute, configuration lets through."""
    assert len(refusals(MODULES)) == REFUSALS


@pytest.fixture
def bad(tmp_path: Path) -> list[Module]:
    place = tmp_path / "rlstreams" / "workers"
    (place / "config").mkdir(parents=True)
    (place / "second.py").write_text("class RankLearner: ...\nclass Scores: ...\n")
    (place / "config" / "bad.py").write_text("def f():\n    yield '[layout.cp]'\n    yield 'x'\n")
    return modules_of(tmp_path)


def test_the_checks_find_what_is_wrong(bad: list[Module]) -> None:
    """Each counts what it should, and nothing else there."""
    assert computing_classes(bad) == {"RankLearner": "rlstreams.workers.second"}
    assert refusals(bad) == ["'[layout.cp]'"]

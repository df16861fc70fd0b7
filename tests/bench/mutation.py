"""What quick tests notice: one operator, number or statement changes; the tests that pass it run.

    nice -n 15 python tests/bench/mutation.py [--sample 25] [--under PATH ...] [--save NAME]

A mutant costs some seconds: libraries are imported once, before the fork that mutates and tests.
Which tests pass a line is measured first, by `sys.monitoring`, and kept in `--folder`; a mutant is
met by those that pass its line and little else. Survivors are printed as they come; `--again` meets
those of a saved result once more, with `--seconds` of tests.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

TARGETS = [
    "rlstreams/workers/loop",
    *(f"rlstreams/workers/trainer/{name}" for name in ("claim.py", "intake", "redo", "learn")),
]
TESTS = ["tests/unit", "tests/served", "tests/contract", "tests/heavy"]
# What starts ranks, processes or compilers passes the same lines, and takes minutes.
NOT_TESTS = (
    "parallel", "rank", "context", "shifts", "any_sample", "scripts", "processes", "spawners",
    "hang", "hub", "examples", "preload", "server_role", "packages",
)  # fmt: skip
LIBRARIES = (
    *("torch", "transformers", "numpy", "aiohttp", "fastavro", "confluent_kafka", "pytest"),
    *("hypothesis", "xdist"),
)
MARKS = "not (broker or e2e or docker or vllm or slow)"
TESTS_S = 6.0  # of tests for one mutant, the narrowest first
LOG = "build/mutation/last.log"  # what the last run of tests said
CPU_S = 90  # of one mutant, whose tests take a tenth of it: one that computes longer hangs
LIMIT_S = 400.0  # on a busy machine
_NOT_TRIED = 70  # exit status of a fork in which the tool failed, not a test
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}  # fmt: skip
_CUT = (ast.Assign, ast.AugAssign, ast.Raise, ast.Expr, ast.Continue, ast.Break)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A file in which one thing is another; `number` finds it again among all of the file."""

    path: str
    number: int
    line: int
    before: str
    after: str


def _changed(node: ast.AST) -> ast.AST | None:
    """Another node for this one, or None if nothing is tried there."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[only]) if type(only) in _SWAPS:
            new.ops = [_SWAPS[type(only)]()]  # type: ignore[list-item]
        case ast.BoolOp() | ast.BinOp() if type(new.op) in _SWAPS:
            new.op = _SWAPS[type(new.op)]()  # type: ignore[assignment]
        case ast.UnaryOp(op=ast.Not()):
            return new.operand
        case ast.Constant(value=bool()):
            new.value = not new.value
        case ast.Constant(value=int() | float() as number):
            new.value = number + 1
        case ast.Expr(value=ast.Constant() | ast.Yield() | ast.YieldFrom()):
            return None  # a docstring; a cut `yield` would make another kind of function
        case ast.Return(value=value) if value is not None:
            new.value = ast.copy_location(ast.Constant(None), value)
        case _ if isinstance(new, _CUT):
            return ast.copy_location(ast.Pass(), node)
        case _:
            return None
    return new


class _Mutate(ast.NodeTransformer):
    """Counts what can be changed, and changes one; no annotation, no decorator."""

    def __init__(self, chosen: int = -1) -> None:
        self.chosen = chosen
        self.found: list[tuple[int, str, str]] = []

    def visit(self, node: ast.AST) -> Any:
        changed = _changed(node)
        if changed is not None and hasattr(node, "lineno"):
            self.found.append((node.lineno, ast.unparse(node), ast.unparse(changed)))
            if len(self.found) - 1 == self.chosen:
                return changed
        kept: Any = node
        decorators, kept.decorator_list = getattr(node, "decorator_list", []), []
        self.generic_visit(node)
        kept.decorator_list = decorators
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node


def mutants(path: Path) -> list[Mutant]:
    """All of a file."""
    seen = _Mutate()
    seen.visit(ast.parse(path.read_text("utf-8")))
    name = str(path.relative_to(ROOT))
    return [
        Mutant(path=name, number=number, line=line, before=before, after=after)
        for number, (line, before, after) in enumerate(seen.found)
    ]


def mutated(mutant: Mutant) -> CodeType:
    """The module's code; line numbers are those of the file."""
    tree = ast.parse((ROOT / mutant.path).read_text("utf-8"))
    changed = ast.fix_missing_locations(_Mutate(mutant.number).visit(tree))
    return compile(changed, str(ROOT / mutant.path), "exec")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutant in the place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self._code = mutated(mutant)
        self._name = mutant.path.removesuffix(".py").replace("/", ".")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(
            fullname, self._code.co_filename, loader=self  # type: ignore[arg-type]
        )  # fmt: skip

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, module.__dict__)


class _Passed:
    """A plugin of pytest: which lines of the targets each test passes, and how long it takes."""

    def __init__(self, files: set[str]) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self._files, self._lines = files, set[tuple[str, int]]()
        watch = sys.monitoring
        watch.use_tool_id(watch.COVERAGE_ID, "mutation")
        watch.register_callback(watch.COVERAGE_ID, watch.events.LINE, self._line)
        watch.set_events(watch.COVERAGE_ID, watch.events.LINE)

    def _line(self, code: CodeType, line: int) -> object:
        if code.co_filename in self._files:
            self._lines.add((os.path.relpath(code.co_filename, ROOT), line))
        return sys.monitoring.DISABLE

    def pytest_runtest_setup(self) -> None:
        self._lines = set()
        sys.monitoring.restart_events()

    def pytest_runtest_logreport(self, report: Any) -> None:
        known = self.tests.setdefault(report.nodeid, {"seconds": 0.0, "passed": True, "lines": []})
        known["seconds"] += report.duration
        known["passed"] &= report.outcome == "passed"
        if report.when == "teardown":
            known["lines"] = sorted(self._lines)


def forked(
    work: Callable[[], int], limit_s: float, cpu_s: int = resource.RLIM_INFINITY
) -> int | None:
    """Its exit status from a process of its own; None if it took too long."""
    child = os.fork()
    if child == 0:
        status = _NOT_TRIED
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
            said = os.open(LOG, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            for stream in (0, 1, 2):
                os.dup2(said, stream)
            status = work()
        except BaseException:  # noqa: BLE001  (a fork returns nowhere)
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    until_s = time.monotonic() + limit_s
    ended, status = 0, 0
    while not ended and time.monotonic() < until_s:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what its tests left, too
    if not ended:
        os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def pytest_words(out: Path) -> list[str]:
    """For each run of tests in a fork."""
    plugins = ("cacheprovider", "xdist", "randomly")
    return [
        "-q",
        "-m",
        MARKS,
        "--assert=plain",
        f"--basetemp={out}",
        *(f"-pno:{name}" for name in plugins),
    ]


def passed_lines(
    files: list[Path], tests: Sequence[str], folder: Path
) -> dict[str, dict[str, Any]]:
    """By test: its seconds and the lines of the files that it passes."""
    import pytest

    kept = folder / "passed.json"

    def work() -> int:
        plugin = _Passed({str(file) for file in files})
        slow = [f"--ignore-glob=tests/heavy/*test_*{name}*" for name in NOT_TESTS]
        pytest.main([*pytest_words(folder / "tmp"), *slow, *tests], plugins=[plugin])
        kept.write_text(json.dumps(plugin.tests), "utf-8")
        return 0

    if not kept.is_file() and forked(work, 3600.0) != 0:
        raise RuntimeError(f"the tests could not be measured: see {LOG}")
    found: dict[str, dict[str, Any]] = json.loads(kept.read_text("utf-8"))
    return {test: known for test, known in found.items() if known["passed"]}


def tests_of(mutant: Mutant, passed: dict[str, dict[str, Any]], limit_s: float) -> list[str]:
    """Those that pass its line, or any of its file where only the import does, or else those in a
    folder of its folder's name; first those that pass little of other files."""
    place = [mutant.path, mutant.line]
    of_line = [test for test, known in passed.items() if place in known["lines"]]
    if not of_line and _at_import(mutant):
        of_line = [t for t, k in passed.items() if any(mutant.path == p for p, _ in k["lines"])]
        room = f"/{Path(mutant.path).parent.name}/"  # a file of classes has no line but these
        of_line = of_line or [test for test in passed if room in test]
    chosen, seconds = list[str](), 0.0
    for test in sorted(of_line, key=lambda one: len(passed[one]["lines"])):
        if chosen and seconds + passed[test]["seconds"] > limit_s:
            continue
        seconds += passed[test]["seconds"]
        chosen.append(test)
    return chosen


def _at_import(mutant: Mutant) -> bool:
    tree = ast.parse((ROOT / mutant.path).read_text("utf-8"))
    return not any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body[0].lineno <= mutant.line <= (node.end_lineno or 0)
        for node in ast.walk(tree)
    )


def outcome(mutant: Mutant, tests: list[str], folder: Path) -> str:
    """`killed`, `survived`, `hung`, or `unreached`."""
    import pytest

    if not tests:
        return "unreached"

    def work() -> int:
        sys.meta_path.insert(0, _Finder(mutant))
        return int(pytest.main([*pytest_words(folder / "tmp"), "-x", *tests]))

    status = forked(work, LIMIT_S, CPU_S)
    if status == _NOT_TRIED:
        raise RuntimeError(f"no test could be asked: see {LOG}")
    return (
        "hung"
        if status in {None, -signal.SIGXCPU, -signal.SIGKILL}
        else "survived"
        if status == 0
        else "killed"
    )


def sampled(every: list[Mutant], target: str, args: argparse.Namespace) -> list[Mutant]:
    """Some of one path, drawn by the seed."""
    there = [one for one in every if Path(one.path).is_relative_to(target)]
    return random.Random(args.seed).sample(there, min(args.sample, len(there)))


def tried(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, object]]:
    """Each mutant of the sample with its outcome."""
    files = [
        file
        for target in args.under
        for file in ([ROOT / target] if target.endswith(".py") else (ROOT / target).rglob("*.py"))
    ]
    for library in LIBRARIES:
        importlib.import_module(library)
    passed = passed_lines(files, args.tests, folder)
    every = [mutant for file in sorted(files) for mutant in mutants(file)]
    if args.again:
        before = json.loads(args.again.read_text("utf-8"))["unnoticed"]
        known = {(one["path"], one["before"], one["after"]) for one in before}
        chosen = [one for one in every if (one.path, one.before, one.after) in known]
    else:
        chosen = [one for target in args.under for one in sampled(every, target, args)]
    print(  # noqa: T201
        f"{len(every)} mutants in {len(files)} files, {len(passed)} tests; {len(chosen)} are tried"
    )
    for mutant in chosen:
        tests = tests_of(mutant, passed, args.seconds)
        how = outcome(mutant, tests, folder)
        if how in {"survived", "unreached"}:
            place = f"{mutant.path}:{mutant.line}"
            print(f"{how} {place}: {mutant.before} -> {mutant.after}", flush=True)  # noqa: T201
        yield {**asdict(mutant), "outcome": how, "tests": len(tests)}


def main() -> None:
    """Try a sample, and say what survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=25, help="of each path")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=Path, metavar="RESULT", help="only what it left unnoticed")
    parser.add_argument("--seconds", type=float, default=TESTS_S, help="of tests for one mutant")
    parser.add_argument("--under", nargs="+", default=TARGETS, metavar="PATH")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/mutation")
    parser.add_argument("--save", metavar="NAME", help="below tests/bench/results")
    args = parser.parse_args()
    os.chdir(ROOT)
    for folder in (args.folder, Path(LOG).parent):
        folder.mkdir(parents=True, exist_ok=True)
    since_s = time.monotonic()
    found: list[dict[str, object]] = []
    for one in tried(args, args.folder):
        found.append(one)
        if args.save:  # after each, so that a run that is broken off has told what it knows
            text = json.dumps(told(found, args.seed, args.under), indent=1, sort_keys=True)
            (ROOT / "tests/bench/results" / args.save).write_text(f"{text}\n", "utf-8")
    print(f"{dict(outcomes(found))} in {time.monotonic() - since_s:.0f} s")  # noqa: T201


def outcomes(found: Sequence[Mapping[str, object]]) -> Counter[str]:
    """How many ended how."""
    return Counter(str(one["outcome"]) for one in found)


def told(
    found: Sequence[Mapping[str, object]], seed: int, under: Sequence[str]
) -> dict[str, object]:
    """What is kept: the counts, and each mutant that nobody noticed."""
    from tests.bench.hardware import hardware

    counts = outcomes(found)
    rooms = {
        room: outcomes([one for one in found if Path(str(one["path"])).is_relative_to(room)])
        for room in under
    }
    return {
        "sample": len(found), "seed": seed, "outcomes": counts, "rooms": rooms,
        "noticed": round((counts["killed"] + counts["hung"]) / len(found), 3),
        "unnoticed": [one for one in found if one["outcome"] in {"survived", "unreached"}],
        "machine": hardware(),
    }  # fmt: skip


if __name__ == "__main__":
    main()

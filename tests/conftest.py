"""One real broker for the whole session, and the markers that follow from where a test lies."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.broker.visits import visited
from rlstreams.streams.process.child import Child, Orphaned
from rlstreams.streams.run.place import RunPlace
from tests import marked
from tests.e2e.command import Workspace

_MARKERS = {
    "integration": (pytest.mark.broker,),
    "e2e": (pytest.mark.e2e,),
    "cluster": (pytest.mark.broker, pytest.mark.docker),
    "hosts": (pytest.mark.broker, pytest.mark.docker),
}
_BROKERS = {"broker", "proxied"}

# Of a run of a minute the broker takes half, and half of that goes into its second compiler, which
# pays after hours. It takes part in production and in measurements, not in tests.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")

# The same examples each time, and no limit of time that a busy machine would break.
settings.register_profile(
    "ours", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ours")


# What is imported stays to the end: to look through it for garbage again and again, while torch is
# read and at each `gc.collect()` of a test, took a tenth of the time of all tests. And what tests
# leave behind is looked through more rarely than usual (Python 3.12: every 700 objects).
gc.disable()
_MANY_OBJECTS = 50_000


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """From here on garbage is collected, and what is there by now is none."""
    gc.freeze()
    gc.set_threshold(_MANY_OBJECTS)
    gc.enable()


SESSION = "RLSTREAMS_TEST_SESSION"  # carried by every process of one pytest, its workers included
_SWEEPER = pytest.StashKey[Child]()


def pytest_configure(config: pytest.Config) -> None:
    """If this pytest is killed, all that it started goes with it."""
    if not hasattr(config, "workerinput"):
        os.environ[SESSION] = secrets.token_hex(8)
        command = (sys.executable, "-I", "-S", marked.__file__, SESSION, os.environ[SESSION])
        config.stash[_SWEEPER] = Child.started(command, orphaned=Orphaned.DRAINS)


def pytest_unconfigure(config: pytest.Config) -> None:
    """It ends in order: what tests leave behind is to be seen."""
    if (sweeper := config.stash.get(_SWEEPER, None)) is not None:
        sweeper.end()


_ASYNC_S = 600.0  # only ends a hang


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is an `async def` has an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(asyncio.wait_for(test, _ASYNC_S))
    return True


_seconds: Counter[str] = Counter()  # by folder; on several cores together


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Sum up what each folder costs."""
    path = Path(report.nodeid.partition("::")[0])
    _seconds[path.parts[1] if len(path.parts) > 2 else path.name] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say it, where it is more than one."""
    if len(_seconds) > 1:
        parts = (f"{folder} {seconds:.0f} s" for folder, seconds in _seconds.most_common())
        terminalreporter.write_line(f"seconds in tests: {', '.join(parts)}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by folder and by fixture, so that no test can forget to."""
    for item in items:
        parts = item.nodeid.partition("::")[0].split("/")
        folder = parts[1] if len(parts) > 2 else ""
        for marker in _MARKERS.get(folder, ()):
            item.add_marker(marker)
        if _BROKERS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.broker)
    items.sort(key=lambda item: _place(_scope(item.nodeid)))


# What shares a run, a model server, the broker behind a proxy or the process that ranks are forked
# from shares a worker of pytest-xdist; all else goes by the file.
_SHARES = {
    "a model server": (
        "contract/test_engine.py",
        "contract/test_engine_control.py",
        "contract/test_vllm_logprobs.py",
        "contract/test_vllm_records.py",
    ),
    "tests/faults/": tuple(f"faults/test_{name}.py" for name in ("admin", "commits", "roles")),
    "a finished run": (
        "e2e/test_demo.py",
        "e2e/test_demo_log.py",
        "e2e/test_replay.py",
        "test_readme.py",
    ),
    "syntax trees": tuple(
        f"test_{name}.py"
        for name in (
            "architecture", "docstrings", "one_fold", "one_mesh", "rooms", "starts", "symptoms",
        )
    ),
    "ranks": tuple(
        f"heavy/trainer/test_{name}.py"
        for name in (
            "context", "megatron_ranks", "mesh_losses", "own_loss_ranks", "packed_ranks",
            "parallel", "parallel_adapters", "parallel_deaths", "rank_hosts", "rank_network",
            "rank_scorer", "shifts",
        )
    ),
}  # fmt: skip
_SHARED = {f"tests/{file}": shared for shared, files in _SHARES.items() for file in files}
# Longest first, so that workers end together. The first of these wait for processes.
_WAITING = (
    *("a model server", "a finished run"),
    *(f"tests/{name}/" for name in ("e2e", "integration", "faults", "contract")),
)
_COMPUTING = (
    "ranks",
    *(f"tests/{name}/" for name in ("heavy", "processes", "chaos", "served")),
    *("syntax trees", "tests/"),
)
_ORDER = (*_WAITING, *_COMPUTING)
_LAST = ("tests/cluster/", "tests/hosts/")  # they cost CPU while they idle
_NUM_WAITING = 2  # workers that begin with what waits


def _scope(nodeid: str) -> str:
    """What stays on one worker."""
    file = nodeid.partition("::")[0]
    return _SHARED.get(file, file)


def _place(scope: str) -> int:
    if scope.startswith(_LAST):
        return len(_ORDER)
    return next((n for n, begin in enumerate(_ORDER) if scope.startswith(begin)), len(_ORDER))


class _TwoWait(LoadFileScheduling):
    """Two workers take what waits first, all others what computes."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if int(node.gateway.id.removeprefix("gw")) >= _NUM_WAITING:
            computes = (scope for scope in self.workqueue if not scope.startswith(_WAITING))
            if first := next(computes, ""):
                self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """For tests that are dealt out by the file."""
    return _TwoWait(config, log) if config.option.dist == "loadfile" else None


# Two log-prob workers: one of them is killed, the other takes its partitions over.
DEMO_WORDS = (
    "--prompts.evaluate_rows=32",
    "--logprob.workers=2",
    "--track.tensorboard.folder=tb/{id}",
)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`host:port` of `RLSTREAMS_BOOTSTRAP` if that is set, else of an embedded broker: the first of
    pytest-xdist's workers that needs it starts it, and the last one stops it."""
    if named := os.environ.get("RLSTREAMS_BOOTSTRAP"):
        yield named
        return
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with visited(EmbeddedBroker(shared / "broker")) as bootstrap:
        yield bootstrap


@pytest.fixture(scope="session")
def finished_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Workspace, subprocess.CompletedProcess[str]]]:
    """A short demo, and what it printed: its run lies in `runs/demo` of the workspace."""
    workspace = Workspace(tmp_path_factory.mktemp("demo"))
    yield workspace, workspace.up("--steps", "12", *DEMO_WORDS)
    workspace.close()


@pytest.fixture(scope="module")
def looked_at(
    finished_run: tuple[Workspace, subprocess.CompletedProcess[str]],
) -> Iterator[Workspace]:
    """The finished run while somebody looks at its log: no command has to start its broker."""
    workspace, _ = finished_run
    with RunPlace.of_folder(workspace.folder / "runs/demo").served():
        yield workspace


@pytest.fixture
def run_id() -> str:
    """A run id that no other test uses: tests share the broker, never a topic."""
    return f"t{secrets.token_hex(4)}"

"""A live run whose fleet comes and goes: scaled, struck, joined from a folder without files."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

from rlstreams.schemas.events import Trajectory, WorkerReport
from rlstreams.streams.audit.auditor import audit
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.read_to import read_to
from rlstreams.streams.log.topics import TRAJECTORIES, WORKER_EVENTS, Topic
from rlstreams.streams.run.open_run import open_run
from rlstreams.streams.workers import JOINED_FROM, JOINING, Workers
from tests.e2e.command import Workspace

pytestmark = pytest.mark.slow
E = TypeVar("E")
JOINED = f"rollout-{JOINED_FROM}"
WORDS = (
    "--steps", "2000", "--trainer.groups_per_step=4", "--prompts.evaluate_rows=8", "--no-live",
    "--demo.kills=[]",
)  # fmt: skip
ENDS_S = 240.0
BEGINS_S = 10.0  # from a joiner's claim of its number to its first sample; on two idle cores 3 s
PAUSE_S = 5.0  # of the others, at most: commits, pulls and a busy machine included


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path)
    yield workspace
    workspace.close()


def pid_of(workspace: Workspace, worker: str) -> int:
    """The process that writes this worker's log."""
    for pid in workspace.processes():
        with suppress(OSError):
            if Path(f"/proc/{pid}/fd/1").readlink().name == f"{worker}.log":
                return pid
    raise AssertionError(f"no process of {worker}")


def events(bus: Bus, topic: Topic, kind: type[E]) -> list[E]:
    """All of one topic, a partition after the other."""
    with bus.reader(bus.beginnings(topic.name)) as reader:
        raws = [raw for some in read_to(reader, bus.ends(topic.name), ENDS_S) for raw in some]
    found = (decoded(raw, bus.schemas()).event for raw in raws)
    return [event for event in found if isinstance(event, kind)]


def test_one_to_four_to_two_with_a_kill_and_a_joiner(workspace: Workspace, tmp_path: Path) -> None:
    """Every sample is accounted for, the joiner works soon, and nobody waits for it."""

    def done(*words: str) -> str:
        found = workspace.run("rlstreams", *words)
        assert 0 == found.returncode, found.stdout
        return found.stdout

    run = workspace.start_up(*WORDS)
    run.wait_for_step(2)
    assert "rollout 4" in done("control", "scale", "runs/demo", "rollout=4")
    port = next(word for word in run.output.split() if word.startswith("127.0.0.1:"))
    elsewhere = Workspace(tmp_path / "elsewhere", workspace.mark, has_files=False)
    words = ("rlstreams", "worker", "rollout", "--join", port, "--run", "demo")
    password = ("--password-file", str(tmp_path / "runs/demo/broker/password"))
    joiner = elsewhere.start(*words, *password)
    while '"samples_per_s"' not in joiner.output:  # in its line of each ten seconds
        run.wait_for_step(run.last_step + 1)
    os.kill(pid_of(workspace, "rollout-1"), signal.SIGKILL)
    while "rollout-1 has started again" not in run.output:
        run.wait_for_step(run.last_step + 1)
    assert "rollout 2" in done("control", "scale", "runs/demo", "rollout=2")
    (elsewhere.folder / "wrong").write_text("wrong")
    refused = elsewhere.run(*words, "--password-file", "wrong")
    assert 0 != refused.returncode
    assert "refuses our login" in refused.stdout
    run.wait_for_step(run.last_step + 2)
    run.signal(signal.SIGINT)
    assert 0 == run.ended_within(ENDS_S), run.output
    assert 0 == joiner.ended_within(ENDS_S), joiner.output
    with open_run(tmp_path / "runs/demo") as log:
        assert not audit(log.bus).breaches
        check(events(log.bus, TRAJECTORIES, Trajectory),
              events(log.bus, WORKER_EVENTS, WorkerReport))  # fmt: skip


def check(trajectories: list[Trajectory], reports: list[WorkerReport]) -> None:
    """Who came and left, when the joiner began, and how long the others stood still."""
    workers = Workers()
    for report in reports:
        workers.apply(report)
    assert {f"rollout-{n}" for n in range(4)} | {JOINED} == {
        w.worker for w in workers.of("rollout")
    }
    assert {"stopped"} == {life.state for life in workers.of("rollout")}
    (came_ms,) = [one.at_ms for one in reports if one.state == JOINING]
    of_joiner = [one for one in trajectories if one.worker == JOINED]
    began_ms = min(one.started_at_ms for one in of_joiner)
    assert began_ms - came_ms <= BEGINS_S * 1000
    around = range(came_ms - 2_000, began_ms + 2_000)
    own = [one.finished_at_ms for one in trajectories if one.worker != JOINED]
    times = sorted({*own} & {*around})
    pauses_ms = [after - before for before, after in itertools.pairwise(times)]
    assert max(pauses_ms) <= PAUSE_S * 1000

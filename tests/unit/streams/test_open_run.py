"""The Python API: what a name means, what counts, and following a run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rlstreams
from rlstreams import open_run
from rlstreams.schemas.events import DeadLetter, Prompt, StepCompleted, TrainerHeartbeat, Trajectory
from rlstreams.streams.broker.ports import free_ports
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import BrokerError, ConfigError
from rlstreams.streams.log.record import Position, RawRecord
from rlstreams.streams.log.topics import DEAD_LETTERS, STEPS
from rlstreams.streams.run import open_run as module
from rlstreams.streams.run.place import RunPlace
from rlstreams.words.sample_detail import stages
from tests import factories
from tests.unit.inspect import told_run

BROKER = {"bootstrap": "", "options": {"sasl.password": "env:PW"}, "jars_dir": "", "heap_mb": 99}


def test_importing_the_package_costs_nothing() -> None:
    """What it exports is imported when it is asked for."""
    text = (
        "import sys, rlstreams; assert not [n for n in sys.modules if n.startswith('rlstreams.')]"
    )
    subprocess.run([sys.executable, "-c", text], check=True)
    assert rlstreams.open_run is open_run
    with pytest.raises(AttributeError, match="no attribute 'open'"):
        rlstreams.open  # noqa: B018


def test_looking_at_a_healthy_run_needs_neither_torch_nor_the_second_kafka_client() -> None:
    """Which cost a second before the first record is read."""
    text = (
        "import sys; import rlstreams.streams.run.open_run, rlstreams.streams.audit.auditor, "
        "rlstreams.streams.kafka.open_transactions, rlstreams.workers.bootstrap.parts, "
        "rlstreams.words.sample_detail, rlstreams.show.metrics.rows; "
        "assert not {'kafka', 'torch', 'transformers', 'datasets'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", text], check=True)


def test_a_recording_is_opened_by_its_folder(tmp_path: Path) -> None:
    folder = told_run.recorded(tmp_path / "r", told_run.memory_bus())
    with open_run(folder) as log:
        assert [1, 2] == [event.step for event in log.steps()]
        (sample,) = log.samples("1/0")
        assert "trained" == sample.outcome
        assert stages(sample)
        assert () == log.problems
        assert [1, 2] == [
            r.event.step for r in log.follow(StepCompleted, deadline_s=9, from_start=True)
        ]


def test_what_counts_and_what_does_not() -> None:
    """Of a sample the first record, of steps the first of each number by its owner."""
    log = told_run.bus_log()
    trajectories = [r.event for r in log.read(Trajectory, skip_unreadable=True)]
    names = [(event.group_id, event.sample) for event in trajectories]
    assert sorted(set(names)) == sorted(names)
    every = list(log.read(Trajectory, with_copies=True, skip_unreadable=True))
    assert len(names) + 1 == len(every)
    assert 1 + len(list(log.steps())) == len(list(log.read(StepCompleted, with_copies=True)))
    assert {"4"} == {letter.group_id for letter in log.dead_letters()}
    with pytest.raises(ValueError, match="name samples, as 12/3, or groups, as 12"):
        log.samples()


def test_the_configuration_is_that_of_the_newest_claim() -> None:
    """A start that goes on may change it."""
    claims = [factories.trainer_started(epoch=n, config=json.dumps({"n": n})) for n in (1, 2)]
    assert {"n": 2} == told_run.bus_log(claims).configuration
    assert {} == told_run.bus_log([]).configuration


def test_following_ends_with_the_run() -> None:
    """Or at its deadline, or when it is told to; what was there comes if it is asked for."""
    log = told_run.bus_log()
    assert log.bus is not None
    events = log.follow(DeadLetter, deadline_s=60)
    past = sum(1 for _ in log.dead_letters())
    assert past == len(list(log.follow(DeadLetter, deadline_s=0.5, from_start=True)))
    assert [] == list(log.follow(DeadLetter, Prompt, deadline_s=60, stopped=lambda: True))
    with log.bus.producer("trainer") as producer:
        letter = outgoing(DEAD_LETTERS, factories.dead_letter(group_id="9"))
        heartbeat = TrainerHeartbeat(
            run="told", epoch=2, instance="i", state="done", next_step=4, detail="", at_ms=1
        )
        started_s = time.monotonic()
        assert [] == list(log.follow(DeadLetter, deadline_s=0.3))
        assert 0.3 <= time.monotonic() - started_s < 30  # not the 60 of the others
        ends = iter(events)
        producer.commit([letter, outgoing(STEPS, heartbeat)])
        assert past + 1 == len(list(log.follow(DeadLetter, deadline_s=60, from_start=True)))
        assert [] == list(ends)  # it begins at the first `next`


def test_what_is_no_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what was looked for, and what is there."""
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "runs/demo/config.json").write_text('{"run": {"id": "demo"}}')
    (tmp_path / "run.toml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"runs/dmo is not there; did you mean runs/demo\?"):
        open_run("runs/dmo")
    with pytest.raises(
        ConfigError, match=r"no config\.json of a run and no manifest\.json of a recording; there"
    ):
        open_run("run.toml")
    with pytest.raises(ConfigError, match=r"config\.json is no configuration of a run: KeyError"):
        open_run("runs/demo")
    (port,) = free_ports(1)
    with pytest.raises(BrokerError, match=f"no broker answers at 127.0.0.1:{port}"):
        open_run("demo", bootstrap=f"127.0.0.1:{port}")


@pytest.mark.broker
def test_a_run_that_a_broker_does_not_have_is_refused(broker: str, run_id: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no run '{run_id}': .*; runs there: "):
        open_run(run_id, bootstrap=broker)


def test_a_run_folder_says_where_its_log_is(tmp_path: Path) -> None:
    """As `up` left it; secrets stay names."""
    (tmp_path / "config.json").write_text(json.dumps({"run": {"id": "r1"}, "broker": BROKER}))
    place = RunPlace.of_folder(tmp_path)
    assert ("r1", "", 99, "env:PW") == (
        place.run,
        place.bootstrap,
        place.heap_mb,
        place.options["sasl.password"],
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"run": {}}', '{"run": 3, "broker": 4}'])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=r"config\.json is no configuration of a run"):
        RunPlace.of_folder(tmp_path)


def test_a_run_without_a_broker_is_refused(tmp_path: Path) -> None:
    """Nothing is started in a folder where no broker ever ran."""
    text = json.dumps({"run": {"id": "r1"}, "broker": {**BROKER, "options": {}}})
    (tmp_path / "config.json").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match="run r1 has left no log under"):
        open_run(tmp_path)
    assert ["config.json"] == [path.name for path in tmp_path.iterdir()]


def test_progress_counts_the_records_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic has as many as it has, however often it is read, whatever is read between."""
    monkeypatch.setattr(module, "SAY_EVERY_S", 0.0)
    said: list[str] = []
    report = module._reporter(said.append)

    def batch(topic: str, partition: int, *offsets: int) -> list[RawRecord]:
        return [RawRecord(Position(topic, partition, n), (n,), b"", b"") for n in offsets]

    one_pass = [batch("prompts", 0, 0, 1), batch("prompts", 0, 2) + batch("prompts", 1, 0)]
    for records in (*one_pass, [], batch("steps", 0, 0, 2), *one_pass, batch("steps", 0, 0)):
        report(records)
    numbers = ("prompts: 2", "prompts: 4", "steps: 2", "prompts: 2", "prompts: 4", "steps: 1")
    assert [f"reading {text} records" for text in numbers] == said

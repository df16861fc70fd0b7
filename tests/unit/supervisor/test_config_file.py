"""What a start that is refused leaves in the run's folder: what was there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import CONTROL, STEPS
from rlstreams.streams.run.place import BROKER_FOLDER
from rlstreams.up.supervisor import up as module
from rlstreams.up.supervisor.fault_hook import UpOptions
from rlstreams.up.supervisor.up import up
from rlstreams.workers.bootstrap.config_file import configured, refuse_other_run, refuse_place
from rlstreams.workers.bootstrap.model_server import LOGS, SERVERS
from rlstreams.workers.bootstrap.sessions import FOLDER as AGENTS
from rlstreams.workers.bootstrap.weights import PULLED_FOLDER, SECRET_FILE, WEIGHTS_FOLDER
from rlstreams.workers.config.load import load, resolved_json
from rlstreams.workers.config.run import RunConfig, RunSection
from rlstreams.workers.loop.control import PAUSED, RUNNING, ControlFollower, desired
from rlstreams.workers.loop.lease import lock_file
from tests.factories import step_completed, trainer_started
from tests.logs import made_log
from tests.memory.bus import MemoryBus

DEMO = Path(__file__).parents[3] / "infra/examples/demo.toml"


def config_of(folder: Path, *words: str) -> RunConfig:
    return load([DEMO], [f"--run.dir={folder / 'run'}", "--run.id=run", *words])


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "up.lock"
    }


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryBus:
    """A run of one step, with its folder; `up` finds both."""
    bus, config = MemoryBus(made_log(), "run"), config_of(tmp_path)
    with bus.producer("test") as producer:
        claim = trainer_started(config=resolved_json(config))
        producer.commit([outgoing(STEPS, event) for event in (claim, step_completed(1))])
    (tmp_path / "run/logs").mkdir(parents=True)
    for name in ("config.json", "report.html", "logs/trainer-0.log"):
        (tmp_path / "run" / name).write_text(f"{resolved_json(config)}\n")

    @contextmanager
    def given(*_: object, **__: object) -> Iterator[MemoryBus]:
        yield bus

    @contextmanager
    def no_broker(_: RunConfig) -> Iterator[None]:
        yield None

    monkeypatch.setattr(module, "_broker", no_broker)
    for name in ("apply", "bootstrap_of"):
        monkeypatch.setattr(module, name, lambda *_: "")
    monkeypatch.setattr(module, "open_bus", given)
    monkeypatch.setattr(module, "make_spawner", lambda **_: None)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RLSTREAMS_PRELOAD_MODEL", "")
    return bus


@pytest.mark.parametrize(
    ("words", "is_resumed", "told"),
    [
        (["--run.seed=5"], True, "run.seed is 5, but the run was started with 0"),
        (["--prompts.group_size=4"], True, "prompts.group_size is 4, but"),
        (["--trainer.lora.rank=4"], True, "trainer.lora.rank is 4, but"),
        ([], False, "has steps already: .* `--run.id NAME --run.dir DIR`"),
        (["--run.id=other"], True, "is the folder of run 'run', .* `--run.id run`, or .*--run.dir"),
    ],
)
def test_a_refused_start_changes_nothing(
    bus: MemoryBus, tmp_path: Path, words: list[str], is_resumed: bool, told: str
) -> None:
    """Neither in the folder nor in the log."""
    before = files(tmp_path)
    config = config_of(tmp_path, *words)
    options = UpOptions(config=config, command="up", is_resumed=is_resumed, is_live=False)
    with pytest.raises(ConfigError, match=told):
        up(options)
    assert before == files(tmp_path)
    assert not any(bus.ends(CONTROL.name).values())


@pytest.mark.parametrize(("is_since", "state"), [(False, RUNNING), (True, PAUSED)])
def test_a_pause_while_up_reads_the_log_is_not_taken_back(
    bus: MemoryBus, tmp_path: Path, *, is_since: bool, state: str
) -> None:
    """The operator was told that the run pauses; a pause of an earlier `up` is over."""
    config = config_of(tmp_path)
    begun = bus.ends(CONTROL.name)
    with bus.producer("control") as producer:
        producer.commit([outgoing(CONTROL, desired("run", PAUSED, by="operator"))])
    before = bus.ends(CONTROL.name)
    module._say_running(bus, config, begun if is_since else before)
    assert ControlFollower(bus).caught_up().state == state
    assert bus.ends(CONTROL.name) != before, "`up` itself reads what comes now"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("recording/manifest.json", "recording is a recording"),
        ("checkpoints/000001-00000005/manifest.json", "checkpoints is a folder of checkpoints"),
        ("weights/v000001-abc.safetensors", "weights is a folder of weight versions"),
        ("model/config.json", "model has a config.json that is of no run"),
        ("mine/report.html", r"mine has other things in it \(report.html\)"),
        ("home/.bashrc", r"home has other things in it \(.bashrc\)"),
        ("file", "file is a file"),
        ("file/below", "file is a file"),
    ],
)
def test_a_folder_of_something_else_is_refused_as_it_is(
    bus: MemoryBus, tmp_path: Path, name: str, told: str
) -> None:
    """A run among a recording's files would be both to every command that takes either."""
    place = tmp_path / name.partition("/")[0]
    if name.startswith("file"):
        (tmp_path / "file").write_text("mine")
        place = tmp_path / name
    else:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}" if "recording" in name else '{"weight_hash": ""}')
    before = sorted(tmp_path.rglob("*"))
    config = load([DEMO], [f"--run.dir={place}", "--run.id=new"])
    options = UpOptions(config=config, command="up", is_resumed=False, is_live=False)
    with pytest.raises(ConfigError, match=f"run.dir: .*{told}.*name another.*--run.dir"):
        up(options)
    assert before == sorted(tmp_path.rglob("*"))


@pytest.mark.parametrize("place", [".", "/"])
def test_a_run_does_not_scatter_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Where a project lies, or a system; `up` is not tried there."""
    (tmp_path / "reward.py").write_text("mine")
    monkeypatch.chdir(tmp_path)
    told = rf"run.dir: {place} has other things in it .*, not a folder of a run: name another"
    with pytest.raises(ConfigError, match=told):
        refuse_place(RunConfig(run=RunSection(dir=place)))


@pytest.mark.parametrize(
    "names",
    [[], ["run.toml", "up.log"], ["given/a", "checkpoints/b", "weights/c"], ["up.lock", "x"]],
)
def test_a_folder_that_a_run_may_begin_in(tmp_path: Path, names: list[str]) -> None:
    """A shell's log, what roles by hand left, an earlier start that got no further."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    refuse_place(RunConfig(run=RunSection(dir=str(tmp_path))))


def test_what_roles_by_hand_leave_is_no_stranger(tmp_path: Path) -> None:
    """A run that they began goes on under `up`."""
    for name in (AGENTS, LOGS, PULLED_FOLDER, SECRET_FILE, SERVERS, WEIGHTS_FOLDER, BROKER_FOLDER):
        (tmp_path / name).write_text("")
    lock_file(tmp_path, "trainer-0").write_text("")
    refuse_place(RunConfig(run=RunSection(dir=str(tmp_path))))


def test_what_the_trainer_refuses_leaves_the_configuration_as_it_was(tmp_path: Path) -> None:
    """It is written for the processes, and taken back unless a trainer took the run with it."""
    run = RunSection(id="run", dir=str(tmp_path))
    before, now = RunConfig(run=run), RunConfig(run=RunSection(id="run", dir=str(tmp_path), seed=1))
    file, epochs = tmp_path / "config.json", [1]
    for epoch, config, left in ((1, before, before), (1, now, before), (2, now, now)):
        file.write_text(resolved_json(before))
        epochs[:] = [1]
        with configured(config, lambda: epochs[0]):
            assert file.read_text() == f"{resolved_json(config)}\n"
            epochs[:] = [epoch]
        assert file.read_text().strip() == resolved_json(left)


def test_the_configuration_of_a_new_run_stays(tmp_path: Path) -> None:
    """Also where nothing was claimed: a run that has not begun is the newest start's."""
    config = RunConfig(run=RunSection(dir=str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    refuse_other_run(config)
    with configured(config, lambda: 0):
        pass
    assert (tmp_path / "config.json").read_text() == f"{resolved_json(config)}\n"

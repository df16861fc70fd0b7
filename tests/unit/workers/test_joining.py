"""A worker joins a run by the log alone: its configuration, what it lacks, and its number."""

from __future__ import annotations

import json
import random
import shutil
import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlstreams.schemas.events import TrainerStarted
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.errors import BrokerError, ConfigError
from rlstreams.streams.log.topics import STEPS, WORKER_EVENTS
from rlstreams.streams.run.open_run import NoRunError
from rlstreams.streams.run.place import RunPlace
from rlstreams.streams.run.run_log import RunLog
from rlstreams.streams.workers import JOIN_S, SILENT_S, Workers
from rlstreams.streams.workers import JOINED_FROM as FIRST
from rlstreams.workers.bootstrap import joining, seats
from rlstreams.workers.bootstrap.joining import configured, refuse_missing
from rlstreams.workers.bootstrap.model_server import server_urls, servers_of
from rlstreams.workers.bootstrap.seats import Seats, take_seat
from rlstreams.workers.config.load import load, over, resolved_json
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.agreement import disagreement
from rlstreams.workers.loop.compared import ComparedRole, OtherClaimError
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.trainer.facts import hashes_of
from tests import factories
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.unit.workers.test_stage import HeldStage

EXAMPLE = Path(__file__).parents[3] / "infra/examples/demo.toml"
RULES = "def score(prompt, completion, answer, metadata): return 1.0\n"


@pytest.fixture
def theirs(tmp_path: Path) -> RunConfig:
    """Of the trainer's host: a model, a reward of its own, a password that is its own."""
    there = tmp_path / "there"
    shutil.copytree(EXAMPLE.parent / "demo/model", there / "model")
    (there / "rules.py").write_text(RULES)
    words = [f"model.path={there / 'model'}", f"reward.verifier={there / 'rules.py'}:score"]
    words += ["broker.bootstrap=10.0.0.1:9092", "broker.options.sasl.password=env:THEIRS"]
    return load([EXAMPLE], words)


def claim_of(config: RunConfig, epoch: int = 3) -> TrainerStarted:
    hashes = {"model": "abcdef0123456789"} | hashes_of(config)
    return factories.trainer_started(config=resolved_json(config), hashes=hashes, epoch=epoch)


def test_the_claim_is_the_configuration_and_the_way_to_the_broker_is_ours(
    theirs: RunConfig,
) -> None:
    claim = claim_of(theirs)
    own = ["broker.bootstrap=kafka:9094", "broker.options.sasl.username=me", "rollout.slots=7"]
    here = configured(claim, own)
    assert ("kafka:9094", {"sasl.username": "me"}) == (here.broker.bootstrap, here.broker.options)
    expected = replace(theirs, broker=here.broker, rollout=replace(theirs.rollout, slots=7))
    assert expected == here
    for role in ("rollout", "logprob"):
        refuse_missing(here, role, claim)


def test_a_joiner_brings_model_servers_of_its_own(
    theirs: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the trainer's hosts is taken for this one's: addresses, counts, GPUs."""
    monkeypatch.setenv("LINK", "s")
    there = ["rollout.engine=vllm", "rollout.workers=2", "engine.port=8000", "weights.channel=gloo"]
    there += [
        'engine.urls=["http://10.0.0.1:8000", "http://10.0.0.1:8001"]',
        "engine.report_host=10.0.0.1",
    ]
    there += [
        "engine.env.CUDA_VISIBLE_DEVICES=6,7",
        "engine.env.NAME=kept",
        "weights.secret=env:LINK",
    ]
    claim = claim_of(over(theirs, there, "test"))
    with pytest.raises(
        ConfigError, match=r"brings servers of its own.*--engine\.urls=.*--engine\.port"
    ):
        refuse_missing(configured(claim, []), "rollout", claim)
    own = ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]
    here = configured(claim, [f"engine.urls={json.dumps(own)}"])
    refuse_missing(here, "rollout", claim)
    assert ("127.0.0.1", {"NAME": "kept"}) == (here.engine.report_host, here.engine.env)
    assert not disagreement(here, "rollout", claim)
    bus = MemoryBus(made_log("demo"), "demo")
    worker = Context(
        config=here, bus=bus, role="rollout", ordinal=FIRST, instance="i", is_joined=True
    )
    assert own == list(servers_of(worker))
    server = configured(claim, ["engine.port=8002", "weights.secret=env:NONE"])
    refuse_missing(server, "server", claim)
    context = replace(worker, config=server, role="server", ordinal=FIRST + 1)
    assert "http://127.0.0.1:8002" == server_urls(context)[context.place]
    with pytest.raises(ConfigError, match=r"as server: rollout\.engine is 'builtin'"):
        refuse_missing(configured(claim_of(theirs), []), "server", claim)


def test_what_is_missing_is_named_with_path_and_hash(theirs: RunConfig, tmp_path: Path) -> None:
    """Model and reward in one sentence, with what to type; a log-prob worker needs no reward."""
    claim = claim_of(theirs)
    shutil.rmtree(tmp_path / "there")
    here = configured(claim, [])
    with pytest.raises(ConfigError) as refused:
        refuse_missing(here, "rollout", claim)
    text = str(refused.value)
    for name in ("model", "tokenizer", "reward.verifier: rules.py"):
        assert claim.hashes[name][:12] in text
    assert f"there is no folder {theirs.model.path} " in text
    assert f"there it is {theirs.reward.verifier}" in text
    assert "--model.path=DIR" in text
    assert "--reward.verifier=VALUE" in text
    with pytest.raises(ConfigError, match=r"model\.path") as only_model:
        refuse_missing(here, "logprob", claim)
    assert "reward" not in str(only_model.value)
    moved = tmp_path / "here"
    shutil.copytree(EXAMPLE.parent / "demo/model", moved / "model")
    (moved / "rules.py").write_text(RULES)
    own = [f"model.path={moved / 'model'}", f"reward.verifier={moved / 'rules.py'}:score"]
    refuse_missing(configured(claim, own), "rollout", claim)


def test_a_secret_that_is_not_here_is_asked_for(
    theirs: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's own reference may mean nothing on this host."""
    pulled = replace(theirs, weights=replace(theirs.weights, channel="gloo"))
    bare = claim_of(pulled)
    with pytest.raises(ConfigError, match=r"weights\.secret is empty.*--weights\.secret=file:PATH"):
        refuse_missing(configured(bare, []), "logprob", bare)
    named = claim_of(replace(pulled, weights=replace(pulled.weights, secret="env:LINK")))
    monkeypatch.delenv("LINK", raising=False)
    with pytest.raises(ConfigError, match=r"LINK is not set.*--weights\.secret=file:PATH"):
        refuse_missing(configured(named, []), "logprob", named)
    monkeypatch.setenv("LINK", "s")
    refuse_missing(configured(named, []), "logprob", named)


def test_a_run_that_is_not_there_is_told_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(_place: RunPlace) -> RunLog:
        raise NoRunError("create a run's topics by `rlstreams broker topics`", ["demo", "other"])

    monkeypatch.setattr(joining, "open_run", none)
    monkeypatch.setattr(joining, "BEGIN_S", 0.0)
    with pytest.raises(ConfigError, match=r"--run dema: b:1 has demo, other; a run is") as told:
        joining.join("rollout", "b:1", "dema")
    assert "topics" not in str(told.value)


def test_a_broker_that_may_want_a_password_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where none was given: the broker hangs up without a word."""

    def gone(_place: RunPlace) -> RunLog:
        raise BrokerError("b:1: transport failure")

    monkeypatch.setattr(joining, "open_run", gone)
    with pytest.raises(BrokerError, match=r"transport failure; it may want a password.*--pass"):
        joining.join("rollout", "b:1", "demo")
    copy = tmp_path / "password"
    copy.write_text("old")
    with pytest.raises(BrokerError, match=rf"--password-file {copy}: is it a copy of broker/pass"):
        joining.join("rollout", "b:1", "demo", password_file=str(copy))
    with pytest.raises(BrokerError, match=r"transport failure$"):
        joining.join("rollout", "b:1", "demo", ["broker.options.sasl.username=me"])
    with pytest.raises(ConfigError, match=r"/none: cannot be read.*--password-file"):
        joining.join("rollout", "b:1", "demo", password_file="/none")


def test_an_address_where_nobody_listens_wants_no_password() -> None:
    """What was typed is named: a joiner has no file that names a broker."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(BrokerError, match=rf"^--join: no broker answers at {address}") as nobody:
        joining.join("rollout", address, "demo")
    assert "password" not in str(nobody.value)
    assert "broker.bootstrap" not in str(nobody.value)
    with pytest.raises(ConfigError, match=r"^--join nowhere --run demo: .*HOST:PORT.*'nowhere'"):
        joining.join("rollout", "nowhere", "demo")


def test_a_joined_worker_starts_anew_under_a_new_claim(theirs: RunConfig) -> None:
    """It is no mistake of its host's: a restart reads the new configuration."""
    log = made_log("demo")
    context = Context(
        config=theirs, bus=MemoryBus(log, "demo"), role="rollout", ordinal=FIRST, instance="i",
        claims_after=0, is_joined=True,
    )  # fmt: skip
    bus = context.bus
    loop = StageLoop(context, bus, HeldStage(), "prompts", reporter=Reporter(context), interval_s=0)
    role = ComparedRole(loop, context)
    role.tick()
    cooler = over(theirs, ["rollout.temperature=0.5"], "test")
    with MemoryBus(log, "demo").producer("trainer.0") as pen:
        pen.commit([outgoing(STEPS, claim_of(cooler, epoch=1))])
    role._next_s = 0.0
    with pytest.raises(OtherClaimError, match=r"temperature is 1\.0 here and 0\.5 there"):
        role.tick()


class Fleet:
    """Workers that come and go, as `worker-events` tells it, on a clock of our own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, partitions: int = 64) -> None:
        self.log = made_log("demo", partitions)
        self.now_ms = 1_000_000
        self._pen = MemoryBus(self.log, "demo").producer("rollout.pen")
        monkeypatch.setattr(seats, "now_ms", lambda: self.now_ms)
        monkeypatch.setattr(self.log, "written_since", lambda *_: (0, 0))

    def says(self, worker: str, instance: str, state: str = "working") -> None:
        self.now_ms += 1
        report = factories.worker_report(
            worker=worker, role=worker.partition("-")[0], instance=instance, state=state,
            at_ms=self.now_ms, host="learner",
        )  # fmt: skip
        self._pen.commit([outgoing(WORKER_EVENTS, report)])

    def joins(self, instance: str, ordinal: int | None = None) -> int:
        return take_seat(MemoryBus(self.log, "demo"), "rollout", instance, ordinal)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(monkeypatch)


def test_joiners_get_the_lowest_free_numbers(fleet: Fleet) -> None:
    """From 1000 on; who stopped has left its number to others, and who is silent only after ten
    minutes: it may wait for a transaction, and would be fenced."""
    fleet.says("rollout-0", "up")
    assert [FIRST, FIRST + 1, FIRST + 2] == [fleet.joins(f"i{n}") for n in range(3)]
    fleet.says(f"rollout-{FIRST}", "i0")
    fleet.says(f"rollout-{FIRST + 1}", "i1", "stopped")
    assert FIRST + 1 == fleet.joins("i4")
    there = (("rollout-0", "up"), (f"rollout-{FIRST + 1}", "i4"), (f"rollout-{FIRST + 2}", "i2"))
    for silent_s, number in ((SILENT_S, FIRST + 3), (JOIN_S, FIRST)):
        fleet.now_ms += int(silent_s * 1000) + 1
        for name, instance in there:
            fleet.says(name, instance)
        assert number == fleet.joins(f"i{number}")


def test_two_that_choose_the_same_number_are_told_apart_by_the_log(fleet: Fleet) -> None:
    """Both have read that 1000 is free; the second to write goes on to 1001, in every fold."""
    first, second = (Seats(MemoryBus(fleet.log, "demo"), "rollout") for _ in range(2))
    numbers: dict[str, int] = {}
    claim = second._claim

    def beaten(worker: str, instance: str) -> bool:
        if not numbers:
            numbers["first"] = first.take("one")
        return claim(worker, instance)

    second._claim = beaten  # type: ignore[method-assign]
    numbers["second"] = second.take("two")
    assert {"first": FIRST, "second": FIRST + 1} == numbers
    workers = Workers()
    bus = MemoryBus(fleet.log, "demo")
    for raw in bus.reader(bus.beginnings(WORKER_EVENTS.name)).poll(100, 0.0):
        workers.apply(decoded(raw).event)
    held = {life.worker: life.instance for life in workers.all}
    assert {f"rollout-{FIRST}": "one", f"rollout-{FIRST + 1}": "two"} == held
    assert not workers.restarts


def test_a_name_that_somebody_has_is_refused_with_who_has_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And given to who was killed once it is silent."""
    monkeypatch.setattr(seats, "SILENT_S", -2.0)
    fleet.says("rollout-7", "0123456789")
    with pytest.raises(ConfigError, match="rollout-7 is there, instance 01234567 on host learner"):
        fleet.joins("i", 7)
    fleet.now_ms += int(SILENT_S * 1000) + 1
    fleet.says("rollout-0", "clock")
    assert 7 == fleet.joins("i", 7)


def test_more_workers_than_partitions_are_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(monkeypatch, partitions=2)
    assert [FIRST, FIRST + 1] == [fleet.joins(f"i{n}") for n in range(2)]
    with pytest.raises(ConfigError, match="prompts has 2 partitions and the run has 2 rollout"):
        fleet.joins("i3")


@pytest.mark.parametrize("seed", range(5))
def test_no_two_that_are_there_have_one_number(fleet: Fleet, seed: int) -> None:
    """Twenty joins and leaves in any order."""
    dice = random.Random(seed)
    there: dict[str, int] = {}
    for n in range(20):
        if there and dice.random() < 0.4:
            gone = dice.choice(sorted(there))
            fleet.says(f"rollout-{there.pop(gone)}", gone, "stopped")
        there[f"i{n}"] = fleet.joins(f"i{n}")
        assert len(set(there.values())) == len(there)
        assert sorted(there.values())[0] >= FIRST


def test_a_run_that_begins_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of Slurm starts its joiners beside `up`, which makes topics; a wrong name is told."""
    place, opened = RunPlace(run="demo", bootstrap="b:1"), object()
    answers: list[Any] = [NoRunError("topics are being made"), NoRunError("still"), opened]

    def open_run(_: RunPlace) -> Any:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(joining, "open_run", open_run)
    monkeypatch.setattr(joining, "_LOOK_S", 0.001)
    assert joining._opened(place, 5.0) is opened
    answers[:] = [NoRunError("there is no run 'demo'; runs there: demo-2")]
    with pytest.raises(ConfigError, match="runs there: demo-2"):
        joining._opened(place, 0.01)

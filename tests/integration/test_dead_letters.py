"""Strangers write into every topic of a run on a real broker; operators see it and ask again."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.schemas import decode
from rlstreams.schemas.events import ClosedGroups, DeadLetter, Event, Prompt
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.topics import (
    CONTROL,
    DEAD_LETTERS,
    POLICY_VERSIONS,
    PROMPTS,
    SCORED,
    STEPS,
    TRAJECTORIES,
    Topic,
)
from rlstreams.workers.bootstrap import parts as bootstrap
from rlstreams.workers.config.load import load, resolved_json
from rlstreams.workers.engines.base import Sampling
from rlstreams.workers.logprob.worker import make_worker as make_logprob
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.loop.runtime import Role
from rlstreams.workers.model.tokenizer import Tokenizer
from rlstreams.workers.prompts.worker import PromptsWorker
from rlstreams.workers.rollout.sampling import Sampler
from rlstreams.workers.rollout.worker import make_worker as make_rollout
from rlstreams.workers.sandbox.reward import Verifier
from rlstreams.workers.trainer.intake.admission import Admission
from rlstreams.workers.trainer.intake.intake import Intake
from rlstreams.workers.trainer.intake.payloads import Payloads
from rlstreams.workers.weights.file import FileWeightChannel, FileWeightServer
from tests import factories
from tests.fake_engine import FakeEngine, FakeScorer, fake_weights
from tests.integration import stranger
from tests.unit.roles.stand import EXAMPLE, length, make_prompt

DEADLINE_S = 240.0
# Topics of which a role commits the position of each record: what strangers left there.
EXPECTED = {PROMPTS.name: 3, TRAJECTORIES.name: 4, SCORED.name: 4}


class Site:
    """A run without a trainer process: its roles are driven from here."""

    def __init__(self, broker: str, run_id: str, folder: Path) -> None:
        self.config = load(
            [EXAMPLE],
            [
                f"run.id={run_id}", f"run.dir={folder}", f"broker.bootstrap={broker}",
                "rollout.workers=1", "prompts.group_size=2", "prompts.evaluate_rows=1",
                "trainer.groups_per_step=1", "trainer.max_staleness=0", "trainer.steps=2",
            ],
        )  # fmt: skip
        (folder / "config.json").write_text(resolved_json(self.config), "utf-8")
        apply(broker, run_id, bootstrap.topic_plan(self.config))
        self.bus = bootstrap.open_bus(self.config)
        self._pen = self.bus.producer("test")
        self._server = FileWeightServer(folder / "weights", keep=1)

    def says(self, topic: Topic, *events: Event, partition: int | None = None) -> None:
        self._pen.commit([outgoing(topic, event, partition=partition) for event in events])

    def publish(self) -> str:
        """Version 0; its hash."""
        manifest = self._server.publish(0, fake_weights(0))
        self.says(
            POLICY_VERSIONS,
            factories.policy_published(
                0,
                weight_hash=manifest.weight_hash,
                layout=manifest.layout,
                endpoints=tuple(self._server.endpoints()),
                versions_served=(0,),
            ),
        )
        return manifest.weight_hash

    def context(self, role: str) -> Context:
        return Context(config=self.config, bus=self.bus, role=role, ordinal=0, instance=role)

    def letters(self) -> list[DeadLetter]:
        found = self.events(DEAD_LETTERS)
        return [event for event in found if isinstance(event, DeadLetter)]

    def events(self, topic: Topic) -> list[Event | None]:
        """All of a topic by now; None for what is no event."""
        found: list[Event | None] = []
        ends = self.bus.ends(topic.name)
        with self.bus.reader(self.bus.beginnings(topic.name)) as reader:
            while any(reader.positions()[p] < end for p, end in ends.items()):
                for raw in reader.poll(100, 0.1):
                    try:
                        found.append(decoded(raw).event)
                    except ValueError:
                        found.append(None)
        return found

    def rollout(self) -> Role:
        engine = FakeEngine(slots=8)
        sampler = Sampler(
            engine=engine,
            verifier=Verifier(length, require_stop=False),
            tokenizer=Tokenizer.load(self.config.model.path),
            sampling=Sampling(max_new_tokens=4),
            max_attempts=2,
            deadline_s=DEADLINE_S,
        )
        return make_rollout(self.context("rollout"), self.bus, engine, FileWeightChannel(), sampler)

    def intake(self, weight_hash: str, reporter: Reporter) -> Intake:
        return Intake(
            self.context("trainer"),
            self.bus,
            Admission(self.config.trainer),
            Payloads(self.bus, lambda: None),
            vocab_size=16,
            max_tokens=100,
            start=(),
            hashes={0: weight_hash},
            reporter=reporter,
        )


@pytest.fixture
def site(broker: str, run_id: str, tmp_path: Path) -> Site:
    """A run with its topics."""
    return Site(broker, run_id, tmp_path)


def write_rubbish(broker: str, run_id: str) -> None:
    """Records that are none of ours into every topic: three, and where parts are large, half one.

    Only there, because every reader waits a second or two for a half that never comes.
    """
    prompt = b"".join(bytes(piece) for piece in outgoing(PROMPTS, factories.prompt()).value)
    part = [("rlstreams-part", b"0/2"), ("rlstreams-record", b"nobody")]
    values = [b"rubbish", prompt[:2] + b"unknown." + prompt[10:], prompt[:-5]]
    topics = (*EXPECTED, STEPS.name, POLICY_VERSIONS.name, CONTROL.name, DEAD_LETTERS.name)
    whole = [(f"{run_id}.{name}", b"k", value, []) for name in topics for value in values]
    torn = [(f"{run_id}.{topic.name}", b"k", prompt, part) for topic in (TRAJECTORIES, SCORED)]
    stranger.write_all(broker, [*whole, *torn])


def drive(site: Site, roles: list[Role], intake: Intake) -> None:
    """Ticks of all until our samples are through and the strangers' records are set aside."""
    until_s = time.monotonic() + DEADLINE_S
    while True:
        for _ in range(20):
            for role in roles:
                role.tick()
            intake.poll(0.0)
        found = Counter(letter.origin_topic for letter in (*site.letters(), *intake.letters))
        if (intake.num_samples, found) == (2, EXPECTED):
            return
        assert time.monotonic() < until_s, (intake.num_samples, found)


def cli(*words: str) -> int:
    return main(["dead-letters", *words])


def test_strangers_stop_nobody_and_are_all_named(
    site: Site, broker: str, run_id: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each record is set aside by the role that reads it; ours behind them come through."""
    write_rubbish(broker, run_id)
    site.says(STEPS, factories.trainer_started(step_target=2))
    weight_hash = site.publish()
    prompts = [make_prompt("0", n, 2, seed=site.config.run.seed) for n in range(2)]
    site.says(PROMPTS, *prompts, partition=0)
    logprob = make_logprob(site.context("logprob"), site.bus, FakeScorer(), FileWeightChannel())
    roles: list[Role] = [site.rollout(), logprob]
    reporter = Reporter(site.context("trainer"))
    intake = site.intake(weight_hash, reporter)
    drive(site, roles, intake)
    site.says(DEAD_LETTERS, *intake.letters)
    for role in (*roles, intake):
        role.close()
    found = site.letters()
    assert EXPECTED == Counter(letter.origin_topic for letter in found)
    assert {("", -1, "decode")} == {(x.group_id, x.sample, x.reason) for x in found}
    (report,) = reporter.last_report()
    assert 3 == decode(b"".join(report.value)).counters["foreign_records"]

    operators_see_them(site, found, tmp_path, capsys)
    a_group_is_asked_for_again(site, tmp_path, capsys)


def operators_see_them(
    site: Site, found: list[DeadLetter], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`list` in both forms; `show` by place."""
    assert 0 == cli("list", str(folder), "--json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ("logprob-0", TRAJECTORIES.name) in {(x["worker"], x["origin_topic"]) for x in lines}
    assert 0 == cli("list", str(folder))
    out = capsys.readouterr().out
    assert f"{len(found)} dead letters: decode {len(found)}" in out
    assert " in these topics could not be decoded" in out
    rubbish = next(x for x in found if x.value == b"rubbish")
    place = f"{rubbish.origin_topic}-{rubbish.origin_partition}@{rubbish.origin_offset}"
    assert 0 == cli("show", place, str(folder))
    assert "\n  value: rubbish\n" in capsys.readouterr().out
    assert 1 == cli("show", "0/1", str(folder))


def a_group_is_asked_for_again(
    site: Site, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused while it is open; asked for once it is dropped; answered by `prompts`, once."""
    assert 1 == cli("requeue", "0", str(folder))
    assert "group 0 is open" in capsys.readouterr().err
    dropped = factories.dropped_group("0", row=3, permanent=True, reason="dead_samples")
    closed = ClosedGroups(watermark=1)
    site.says(DEAD_LETTERS, factories.dead_letter(group_id="0", sample=1))
    site.says(STEPS, factories.groups_dropped(groups=(dropped,), closed=closed))
    assert 0 == cli("requeue", "--reason", "reward", str(folder))
    assert "requested 1 group again: 0" in capsys.readouterr().out
    assert 1 == cli("requeue", "0", str(folder))
    assert "asked for before" in capsys.readouterr().err
    for _ in range(2):
        worker = PromptsWorker(
            site.context("prompts"), Tokenizer.load(site.config.model.path), poll_s=0.05
        )
        until_s = time.monotonic() + DEADLINE_S
        while worker._issued.num_groups < 2:
            assert time.monotonic() < until_s
            worker.tick()
        worker.tick()
        worker.close()
    assert [("1", 3)] == [(prompt.group_id, prompt.row) for prompt in replacing(site)]
    assert 1 == cli("requeue", "0", str(folder))
    assert "group 0 was replaced by group 1" in capsys.readouterr().err


def replacing(site: Site) -> list[Prompt]:
    """First samples of groups that answer for group 0."""
    found = [event for event in site.events(PROMPTS) if isinstance(event, Prompt)]
    return [prompt for prompt in found if prompt.replaces == "0" and prompt.sample == 0]
